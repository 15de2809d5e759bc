"""The shape of a session's KV state, layer by layer, and the grid on which it is cut.

Nothing here reads bytes or knows a model. A layout is a value that checks itself: one that could
not exist is refused when it is made.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpack import limits
from kvpack.errors import LayoutMismatchError, LimitError


class LayerKind(enum.Enum):
    """How a layer attends: over a sliding window, or over everything."""

    SWA = "swa"
    FULL = "full"


class Encoding(enum.Enum):
    """Element type of every K/V row in a snapshot. Little-endian, no padding."""

    F16LE = "f16le"
    BF16LE = "bf16le"
    F32LE = "f32le"

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is Encoding.F32LE else 2


class Producer(enum.Enum):
    """Who computed the rows. Oracle rows and all others refuse each other at the gate."""

    ENGINE = "engine"
    ORACLE = "oracle"
    TRANSFORMERS = "transformers"
    MLX_LM = "mlx-lm"


@dataclass(frozen=True, slots=True)
class RopeLayout:
    """How keys of a layer were rotated before they were stored.

    Attributes:
        theta_bits: Base frequency as the bits of an IEEE 754 double.
        dims: Leading elements of a head that are rotated.
        interleaved: True where pairs are ``(0, 1), (2, 3)``; False where they are
            ``(i, i + dims/2)``.
        scaling: Canonical text of the scaling rule, ``"none"`` where there is none.

    Raises:
        LimitError: A field is outside its cap.
    """

    theta_bits: int
    dims: int
    interleaved: bool
    scaling: str = "none"

    def __post_init__(self) -> None:
        limits.check_range("rope.theta_bits", self.theta_bits, 0, (1 << 64) - 1)
        limits.check_range("rope.dims", self.dims, 2, limits.HEAD_DIM_MAX)
        limits.check_name("rope.scaling", self.scaling)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer's K/V rows. ``rope`` is None for NoPE: the keys carry no position.

    Attributes:
        kind: Sliding window or full attention.
        window_tokens: For SWA the query at p sees keys ``p - window_tokens + 1 .. p``; None for
            full.
        kv_heads: Key/value heads.
        key_dim: Elements per key head.
        value_dim: Elements per value head.
        rope: Rotation of the keys, or None.

    Raises:
        LimitError: A field is outside its cap.
        LayoutMismatchError: ``kind`` and ``window_tokens`` contradict each other.
    """

    kind: LayerKind
    window_tokens: int | None
    kv_heads: int
    key_dim: int
    value_dim: int
    rope: RopeLayout | None = None

    def __post_init__(self) -> None:
        limits.check_range("kv_heads", self.kv_heads, 1, limits.KV_HEADS_MAX)
        limits.check_range("key_dim", self.key_dim, 1, limits.HEAD_DIM_MAX)
        limits.check_range("value_dim", self.value_dim, 1, limits.HEAD_DIM_MAX)
        if self.kind is LayerKind.FULL:
            if self.window_tokens is not None:
                raise LayoutMismatchError("window_tokens", "none for full", self.window_tokens)
        elif self.window_tokens is None:
            raise LayoutMismatchError("window_tokens", "a window for swa", None)
        else:
            limits.check_range("window_tokens", self.window_tokens, 1, limits.POSITION_MAX)
        if self.rope is not None and self.rope.dims > self.key_dim:
            raise LayoutMismatchError("rope.dims", f"<= key_dim {self.key_dim}", self.rope.dims)

    def held_rows(self, position: int) -> int:
        """Rows that a cut after ``position`` tokens must hold: all, or the last window."""
        return position if self.window_tokens is None else min(position, self.window_tokens)

    def first_row(self, position: int) -> int:
        """Absolute position of the oldest row that a cut after ``position`` tokens must hold."""
        return position - self.held_rows(position)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All layers of one model, in model order, with one encoding for every row.

    Raises:
        LimitError: No layer, too many layers, or a row wider than a grid block may be.
    """

    layers: tuple[LayerLayout, ...]
    encoding: Encoding
    max_context_tokens: int
    _row_bytes: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())
    _group_bytes: dict[tuple[int, ...], int] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        limits.check_range("layers", len(self.layers), 1, limits.LAYERS_MAX)
        limits.check_range("max_context_tokens", self.max_context_tokens, 1, limits.POSITION_MAX)
        sizes = [
            self.key_row_bytes(index) + self.value_row_bytes(index)
            for index in range(len(self.layers))
        ]
        object.__setattr__(self, "_row_bytes", tuple(sizes))
        for index, found in enumerate(sizes):
            if found > limits.ROW_BYTES_MAX:
                raise LimitError(
                    f"layers[{index}].row_bytes", f"<= {limits.ROW_BYTES_MAX} bytes", found
                )

    def key_row_bytes(self, layer: int) -> int:
        """Bytes of one key row ``[kv_heads, key_dim]`` of ``layer``."""
        shape = self.layers[layer]
        return shape.kv_heads * shape.key_dim * self.encoding.element_bytes

    def value_row_bytes(self, layer: int) -> int:
        """Bytes of one value row ``[kv_heads, value_dim]`` of ``layer``."""
        shape = self.layers[layer]
        return shape.kv_heads * shape.value_dim * self.encoding.element_bytes

    def row_bytes(self, layer: int) -> int:
        """Bytes of one token in ``layer``: its key row and its value row."""
        return self._row_bytes[layer]

    def group_row_bytes(self, kind: LayerKind, layers: tuple[int, ...]) -> int:
        """Bytes of one token in ``layers``, which must all be of ``kind``.

        The groups of :func:`layer_groups` are remembered: a manifest asks for each a thousand
        times.

        Raises:
            LayoutMismatchError: A layer does not exist or is of another kind.
        """
        if layers in self._group_bytes and self.layers[layers[0]].kind is kind:
            return self._group_bytes[layers]
        row_bytes = 0
        for layer in layers:
            if layer >= len(self.layers):
                raise LayoutMismatchError("tile.layers", f"< {len(self.layers)}", layer)
            if self.layers[layer].kind is not kind:
                raise LayoutMismatchError(
                    f"layers[{layer}].kind", self.layers[layer].kind.value, kind.value
                )
            row_bytes += self._row_bytes[layer]
        # Bounded: what a peer asks for is not always one of the groups.
        if len(self._group_bytes) < limits.LAYERS_MAX:
            self._group_bytes[layers] = row_bytes
        return row_bytes

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Indices of the layers of ``kind``, ascending."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind is kind)

    def state_bytes(self, kind: LayerKind, position: int) -> int:
        """Plaintext K/V bytes of all layers of ``kind`` in a cut after ``position`` tokens."""
        return sum(
            self.layers[i].held_rows(position) * self.row_bytes(i) for i in self.layers_of(kind)
        )


def layer_groups(layout: CacheLayout, kind: LayerKind) -> tuple[tuple[int, ...], ...]:
    """Split the layers of ``kind`` into the groups that share a chunk.

    A group's grid block is at most about ``CHUNK_TARGET_BYTES`` and never above the hard cap. The
    split depends on the layout alone, so a row always lands in the same chunk however it was
    computed. Layers of one group have one window, so a group's rows cover one range.
    """
    groups: list[tuple[int, ...]] = []
    for members in _by_window(layout, kind).values():
        block_bytes = [layout.row_bytes(i) * limits.GRID_TOKENS for i in members]
        count = max(1, -(-sum(block_bytes) // limits.CHUNK_TARGET_BYTES))
        groups.extend(_split_evenly(members, block_bytes, count))
    return tuple(groups)


def _by_window(layout: CacheLayout, kind: LayerKind) -> dict[int | None, list[int]]:
    members: dict[int | None, list[int]] = {}
    for index in layout.layers_of(kind):
        members.setdefault(layout.layers[index].window_tokens, []).append(index)
    return members


def _split_evenly(
    members: list[int], block_bytes: list[int], count: int
) -> Iterator[tuple[int, ...]]:
    """Yield ``members`` in order, in ``count`` or more groups of even length under the hard cap."""
    per_group = -(-len(members) // count)
    group: list[int] = []
    group_bytes = 0
    for index, size in zip(members, block_bytes, strict=True):
        full = len(group) == per_group or group_bytes + size > limits.CHUNK_PLAINTEXT_BYTES_MAX
        if group and full:
            yield tuple(group)
            group, group_bytes = [], 0
        group.append(index)
        group_bytes += size
    if group:
        yield tuple(group)


def grid_ranges(
    first: int, end: int, grid_tokens: int = limits.GRID_TOKENS
) -> Iterator[tuple[int, int]]:
    """Cut ``[first, end)`` at the grid: yields ``(first_position, token_count)``, ascending.

    Inner pieces are whole grid blocks; the head and the tail may be shorter.
    """
    position = first
    while position < end:
        stop = min(end, (position // grid_tokens + 1) * grid_tokens)
        yield position, stop - position
        position = stop
