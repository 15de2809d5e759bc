"""Whether rows are those of the reference, and if not, by which mistake they would be.

A backend may pair a head's elements otherwise, count positions from another origin, look one key
further back, or hand over values as keys; its rows are then as plausible as the right ones and say
nothing. Here rows are compared with those that each such mistake would give, and the nearest names
the refusal. Functions of their inputs: no model, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpack.layout import CacheLayout, Encoding, LayerLayout, RopeLayout
from node.errors import ProducerCheckError

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

#: How far rows of the first layers may be from the reference's, relative to their own length. The
#: reference sums in float64 and rounds to float32; found for right rows: see docs/models.md.
BOUNDS: Final[Mapping[Encoding, float]] = {
    Encoding.F32LE: 1e-3,
    Encoding.F16LE: 0.02,
    Encoding.BF16LE: 0.12,
}

#: How much nearer than the bound a mistake has to be, to be named: it may be a rough fit only.
_NAMED_WITHIN: Final = 3.0


@dataclass(frozen=True, slots=True, repr=False)
class Rows:
    """Rows of one layer at positions from ``first`` on.

    Attributes:
        first: Position of the first.
        keys: ``[rows, kv_heads, key_dim]``.
        values: ``[rows, kv_heads, value_dim]``.
    """

    first: int
    keys: Floats
    values: Floats

    @property
    def end(self) -> int:
        """One past the last row's position."""
        return self.first + len(self.keys)


def pairing(interleaved: bool) -> str:
    """The word for a rotation's pairs."""
    return "interleaved" if interleaved else "half-split"


def turned(rows: Floats, positions: Doubles, rope: RopeLayout, *, interleaved: bool) -> Floats:
    """``rows`` ``[rows, heads, dim]``, each rotated by its position; negative ones turn back."""
    half = rope.dims // 2
    theta = np.array([rope.theta_bits], np.uint64).view(np.float64)[0]
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    cosine, sine = np.cos(angles), np.sin(angles)
    first, second = slice(0, half), slice(half, rope.dims)
    if interleaved:
        first, second = slice(0, rope.dims, 2), slice(1, rope.dims, 2)
    out = rows.astype(np.float64)
    left, right = out[..., first].copy(), out[..., second].copy()
    out[..., first] = left * cosine - right * sine
    out[..., second] = right * cosine + left * sine
    return out.astype(np.float32)


def reordered(rows: Floats, rope: RopeLayout, *, interleaved: bool) -> Floats:
    """``rows`` of the pairing named, with their elements in the other pairing's order."""
    order = np.arange(rope.dims).reshape(2, -1).T.ravel()
    if interleaved:
        order = np.argsort(order)
    out = rows.copy()
    out[..., : rope.dims] = rows[..., order]
    return out


def distance(found: Floats, expected: Floats) -> float:
    """How far apart they are, relative to ``expected``; infinity where one is not finite."""
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return float("inf")
    size = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(found.astype(np.float64) - expected)) / (size or 1.0)


def check_layer(
    layer: int, layout: CacheLayout, expected: Rows, found: Rows, bound: float | None = None
) -> float:
    """Compare one layer's rows with the reference's.

    Args:
        layer: Which.
        layout: Shape of all rows.
        expected: The reference's.
        found: The backend's, of the same positions.
        bound: How far they may be apart; None: that of the encoding.

    Returns:
        How far they are apart.

    Raises:
        ProducerCheckError: Too far. Names layer, role, what was expected and what was found.
    """
    bound = BOUNDS[layout.encoding] if bound is None else bound
    name = f"layers[{layer}]"
    if found.keys.shape != expected.keys.shape or found.values.shape != expected.values.shape:
        shapes = [
            f"{list(rows.keys.shape)} and {list(rows.values.shape)}" for rows in (expected, found)
        ]
        raise ProducerCheckError(f"{name}.rows: shape", *shapes)
    apart = {
        "keys": distance(found.keys, expected.keys),
        "values": distance(found.values, expected.values),
    }
    if max(apart.values()) <= bound:
        return max(apart.values())
    near = distance(found.keys, expected.values), distance(found.values, expected.keys)
    if max(near) <= bound * _NAMED_WITHIN:
        raise ProducerCheckError(f"{name}: roles", "keys, then values", "values, then keys")
    _require_rows(name, expected, found, bound)
    if apart["keys"] > bound:
        mistakes = list(_of_keys(layout.layers[layer], _any_rope(layout), expected))
        far, said = min(
            ((distance(found.keys, keys), said) for said, keys in mistakes), default=(2.0, None)
        )
        if said is not None and far <= bound * _NAMED_WITHIN:
            raise ProducerCheckError(f"{name}.keys: {said[0]}", said[1], said[2])
    role = max(apart, key=lambda one: apart[one])
    raise ProducerCheckError(
        f"{name}.{role}", f"rows within {bound} of the reference's", f"{apart[role]:.3g}"
    )


def check_window(
    layer: int, window_tokens: int, expected: Mapping[int, Rows], found: Rows
) -> float:
    """Whether a layer looked as many keys back as its window says, by the rows of the layer above.

    One key more or less among thousands changes a row by less than half precision rounds it. But it
    changes all elements of all rows, and by how much is known: what is found is laid along that.

    Args:
        layer: The layer that looks back; ``layer + 1`` has the rows.
        window_tokens: How many keys it is to see.
        expected: Rows of the layer above by the keys that the layer sees, other numbers included.
        found: The backend's.

    Returns:
        How far along the nearest mistake the rows lie: 0 is none of it, 1 the whole mistake.

    Raises:
        ProducerCheckError: They are the rows of another window, or nothing can be told.
    """
    right, far = _joined(expected[window_tokens]), 0.0
    for width, rows in expected.items():
        if width == window_tokens:
            continue
        along = _joined(rows) - right
        size = float(along @ along)
        share = float((_joined(found) - right) @ along) / size if size else float("nan")
        # Written so that what is no number is refused.
        if not abs(share) < 0.5:
            saw = width if share >= 0.5 else f"neither {window_tokens} nor {width}"
            raise ProducerCheckError(
                f"layers[{layer}]: window: keys seen", f"{window_tokens}, its own among them", saw
            )
        far = max(far, abs(share))
    return far


def _require_rows(name: str, expected: Rows, found: Rows, bound: float) -> None:
    """Whether it is the same rows, a position earlier or later."""
    span = f"[{expected.first}, {expected.end})"
    for shift, ours, theirs in (
        (1, slice(1, None), slice(None, -1)),
        (-1, slice(None, -1), slice(1, None)),
    ):
        pairs = ((found.keys, expected.keys), (found.values, expected.values))
        if len(expected.keys) > 1 and all(
            distance(rows[theirs], wanted[ours]) <= bound for rows, wanted in pairs
        ):
            other = f"rows [{expected.first + shift}, {expected.end + shift})"
            raise ProducerCheckError(f"{name}: window", f"rows {span}", other)


def _of_keys(
    shape: LayerLayout, other: RopeLayout | None, expected: Rows
) -> Iterator[tuple[tuple[str, str, str], Floats]]:
    """What each mistake is called, expected and found, and the keys that it would give."""
    places = np.arange(expected.first, expected.end, dtype=np.float64)
    rope, keys = shape.rope, expected.keys
    if rope is None:
        for interleaved in (False, True):
            if other is not None and other.dims <= shape.key_dim:
                said = ("rope", "none", pairing(interleaved))
                yield said, turned(keys, places, other, interleaved=interleaved)
        return
    own = rope.interleaved
    plain = turned(keys, -places, rope, interleaved=own)
    words = ("rope layout", pairing(own), pairing(not own))
    yield words, turned(plain, places, rope, interleaved=not own)
    yield words, reordered(keys, rope, interleaved=own)
    yield words, reordered(turned(plain, places, rope, interleaved=not own), rope, interleaved=own)
    yield ("rope", pairing(own), "none"), plain
    for origin in (-1, 1):
        shifted = turned(keys, np.full(len(keys), float(origin)), rope, interleaved=own)
        yield ("rope: position of the first token", "0", str(origin)), shifted


def _any_rope(layout: CacheLayout) -> RopeLayout | None:
    return next((layer.rope for layer in layout.layers if layer.rope is not None), None)


def _joined(rows: Rows) -> Doubles:
    joined: Doubles = np.concatenate([rows.keys.ravel(), rows.values.ravel()]).astype(np.float64)
    return joined
