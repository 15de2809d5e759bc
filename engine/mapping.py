"""From a network to its cache layout, layer by layer.

Kinds and windows come from the caches that the model itself asks for, shapes and dtypes from one
probe call through the real layers, RoPE from the attention modules. Nothing is taken from a config
value alone, so a config that contradicts the weights cannot produce a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from blake3 import blake3
from mlx.nn.layers.positional_encoding import RoPE

from engine.canonical import canonical_json, f64_bits
from engine.dtypes import encoding_of
from engine.encodings import dtype_name
from engine.errors import ModelFolderError
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, RopeLayout

#: Classes of mlx-lm whose angles depend on the position alone, apart from the plain ``RoPE``, and
#: what configs call their rule. The layout says the latter: a class may be renamed in any release.
ROPE_CLASSES: Final = {"Llama3RoPE": "llama3", "YarnRoPE": "yarn"}


@dataclass(frozen=True, slots=True)
class LayerCacheKind:
    """What a layer's own cache is: a window in tokens, or None for full attention."""

    window_tokens: int | None


@dataclass(slots=True)
class _ProbeCache:
    """Stands in for a cache during one single-token call and notes what is stored."""

    layer: int
    window_tokens: int | None
    offset: int = 0
    key: mx.array | None = None
    value: mx.array | None = None
    calls: int = 0

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,
    ) -> None:
        """A single token sees itself; noted is only whether the model masks with this window."""
        if window_size not in (None, self.window_tokens):
            raise ModelFolderError(
                f"layers[{self.layer}]: window: expected {self.window_tokens}, as its cache has, "
                f"found a mask of {window_size}"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Note the rows and hand them back."""
        self.key, self.value, self.calls = keys, values, self.calls + 1
        return keys, values


@dataclass(frozen=True, slots=True)
class ProbedNetwork:
    """What one single-token call showed: the cache layout and the number of logits."""

    layout: CacheLayout
    vocab_size: int


def probe_network(
    call: Callable[[mx.array, Sequence[Any]], mx.array],
    layers: Sequence[Any],
    kinds: Sequence[LayerCacheKind],
    args: Any,  # noqa: ANN401  mlx-lm's argument classes have no common type
    rope_flag: str | None,
    max_context_tokens: int,
) -> ProbedNetwork:
    """Run one token through ``call`` and describe what its layers keep.

    Args:
        call: The network: ids ``[1, count]`` and caches to logits ``[1, count, vocab]``.
        layers: Its layers, in order.
        kinds: What the cache of each is.
        args: The language model's arguments.
        rope_flag: Attribute of an attention module that says whether its RoPE is applied; None
            where it always is.
        max_context_tokens: Tokens that the context holds.

    Raises:
        ModelFolderError: A layer keeps nothing, more than one row, another dtype than the others,
            rotates by more than the position or masks with another window than its cache has; or
            layers and caches differ in number.
    """
    if len(layers) != len(kinds):
        raise ModelFolderError(f"layers: expected {len(layers)} caches, found {len(kinds)}")
    probes = [_ProbeCache(index, kind.window_tokens) for index, kind in enumerate(kinds)]
    logits = call(mx.array([[0]]), probes)
    mx.eval(logits)
    shapes = [
        _layer_layout(index, kind, probe, _rope_layout(index, layer.self_attn, args, rope_flag))
        for index, (layer, kind, probe) in enumerate(zip(layers, kinds, probes, strict=True))
    ]
    layout = CacheLayout(tuple(shapes), _one_encoding(probes), max_context_tokens)
    return ProbedNetwork(layout, logits.shape[-1])


def _one_encoding(probes: Sequence[_ProbeCache]) -> Encoding:
    """The element type of all rows."""
    first = encoding_of(_rows(probes[0])[0].dtype)
    for probe in probes:
        for name, rows in zip(("keys", "values"), _rows(probe), strict=True):
            found = encoding_of(rows.dtype)
            if found is not first:
                raise ModelFolderError(
                    f"layers[{probe.layer}].{name}: dtype: expected {dtype_name(first)}, as in "
                    f"layer 0, found {dtype_name(found)}"
                )
    return first


def _rows(probe: _ProbeCache) -> tuple[mx.array, ...]:
    return () if probe.key is None or probe.value is None else (probe.key, probe.value)


def _layer_layout(
    index: int, kind: LayerCacheKind, probe: _ProbeCache, rope: RopeLayout | None
) -> LayerLayout:
    rows = _rows(probe)
    if probe.calls != 1 or not rows or any(r.ndim != 4 or r.shape[2] != 1 for r in rows):
        raise ModelFolderError(f"layers[{index}] does not keep one K/V row per token")
    key, value = rows
    if key.shape[1] != value.shape[1]:
        raise ModelFolderError(f"layers[{index}]: keys and values have different heads")
    return LayerLayout(
        kind=LayerKind.FULL if kind.window_tokens is None else LayerKind.SWA,
        window_tokens=kind.window_tokens,
        kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        rope=rope,
    )


def _rope_layout(
    index: int,
    attention: Any,  # noqa: ANN401  mlx-lm's modules are untyped
    args: Any,  # noqa: ANN401
    rope_flag: str | None,
) -> RopeLayout | None:
    """How this very layer rotates its keys: bases and rules may differ from layer to layer."""
    if rope_flag is not None and not getattr(attention, rope_flag):
        return None
    rope = attention.rope
    name = type(rope).__name__
    if type(rope) is not RoPE and name not in ROPE_CLASSES:
        expected = " or ".join(("RoPE", *ROPE_CLASSES))
        raise ModelFolderError(f"layers[{index}].rope: expected {expected}, found {name}")
    return RopeLayout(
        # The scaled classes keep no base; they are built from the one that the arguments name.
        theta_bits=f64_bits(float(getattr(rope, "base", args.rope_theta))),
        dims=int(rope.dims),
        interleaved=bool(rope.traditional),
        scaling=_rope_scaling(rope, args),
    )


def _rope_scaling(rope: Any, args: Any) -> str:  # noqa: ANN401
    """The rule as canonical text: equal text, equal angles."""
    if type(rope) is RoPE:
        return "none" if rope.scale == 1.0 else f"linear {f64_bits(rope.scale):016x}"
    rule = canonical_json(args.rope_scaling)
    return f"{ROPE_CLASSES[type(rope).__name__]} {blake3(rule).hexdigest()[:32]}"
