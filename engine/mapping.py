"""From a network to its cache layout, layer by layer.

Kinds and windows come from the caches that the model itself asks for, shapes and dtypes from one
probe call through the real layers, RoPE from the attention modules. Nothing is taken from a config
value alone, so a config that contradicts the weights cannot produce a layout.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
from blake3 import blake3
from mlx.nn.layers.positional_encoding import RoPE

from engine.dtypes import encoding_of
from engine.errors import ModelFolderError
from kvpack.layout import CacheLayout, LayerKind, LayerLayout, RopeLayout

#: Attribute of an attention module that says whether its ``rope`` is applied, by architecture.
ROPE_FLAGS: Final[Mapping[str, str]] = {
    "muse_glimmer": "use_rope",
    "cohere2": "use_sliding_window",
    "exaone4": "use_rope",
    "afmoe": "is_local_attention",
}


@dataclass(frozen=True, slots=True)
class LayerCacheKind:
    """What a layer's own cache is: a window in tokens, or None for full attention."""

    window_tokens: int | None


@dataclass(slots=True)
class _ProbeCache:
    """Stands in for a cache during one single-token call and notes what is stored."""

    offset: int = 0
    key: mx.array | None = None
    value: mx.array | None = None
    calls: int = field(default=0)

    def make_mask(self, *_: object, **__: object) -> None:
        """A single token sees itself."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Note the rows and hand them back."""
        self.key, self.value, self.calls = keys, values, self.calls + 1
        return keys, values


def f64_bits(value: float) -> int:
    """The bits of ``value`` as an IEEE 754 double."""
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def canonical_json(value: object) -> bytes:
    """One spelling per value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode("ascii")


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
    max_context_tokens: int,
) -> ProbedNetwork:
    """Run one token through ``call`` and describe what its layers keep.

    Raises:
        ModelFolderError: A layer keeps nothing, more than one row, or another dtype than the
            others; or layers and caches differ in number.
    """
    if len(layers) != len(kinds):
        raise ModelFolderError(f"{len(layers)} layers, but caches for {len(kinds)}")
    probes = [_ProbeCache() for _ in layers]
    logits = call(mx.array([[0]]), probes)
    mx.eval(logits)
    shapes = [
        _layer_layout(index, layer, kind, probe, args)
        for index, (layer, kind, probe) in enumerate(zip(layers, kinds, probes, strict=True))
    ]
    encodings = {encoding_of(array.dtype) for p in probes for array in _rows(p)}
    if len(encodings) != 1:
        raise ModelFolderError(f"layers keep rows of {len(encodings)} different dtypes")
    layout = CacheLayout(tuple(shapes), encodings.pop(), max_context_tokens)
    return ProbedNetwork(layout, logits.shape[-1])


def _rows(probe: _ProbeCache) -> tuple[mx.array, ...]:
    return () if probe.key is None or probe.value is None else (probe.key, probe.value)


def _layer_layout(
    index: int,
    layer: Any,  # noqa: ANN401  mlx-lm's modules are untyped
    kind: LayerCacheKind,
    probe: _ProbeCache,
    args: Any,  # noqa: ANN401
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
        rope=_rope_layout(layer.self_attn, args),
    )


def _rope_layout(attention: Any, args: Any) -> RopeLayout | None:  # noqa: ANN401
    flag = ROPE_FLAGS[args.model_type]
    if not getattr(attention, flag):
        return None
    rope = attention.rope
    return RopeLayout(
        theta_bits=f64_bits(float(getattr(rope, "base", args.rope_theta))),
        dims=int(rope.dims if hasattr(rope, "dims") else rope.dim),
        interleaved=bool(getattr(rope, "traditional", False)),
        scaling=_rope_scaling(rope, args),
    )


def _rope_scaling(rope: Any, args: Any) -> str:  # noqa: ANN401
    if type(rope) is RoPE:
        return "none" if rope.scale == 1.0 else f"linear {f64_bits(rope.scale):016x}"
    rule = canonical_json(getattr(args, "rope_scaling", None))
    return f"{type(rope).__name__} {blake3(rule).hexdigest()[:32]}"
