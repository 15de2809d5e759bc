"""EXAONE 4: a pattern such as LLLG of sliding layers with RoPE and full layers without.

A model without a sliding window is all full, and then every layer has RoPE.
``q = rope(rms(x W_q))``, ``k = rope(rms(x W_k))`` per head.
``h = x + N1(attend(q, K, x W_v) W_o)``, ``y = h + N2(mlp(h))``: the norms follow the parts.
"""

from __future__ import annotations

from engine.oracle.architectures import parts
from engine.oracle.attention import Attention
from engine.oracle.config import ModelConfig, every_nth_full
from engine.oracle.decoder import Decoder, SequentialBlock
from engine.oracle.errors import OracleModelError
from engine.oracle.geometry import Geometry
from engine.oracle.rope import Rope, build_rope, rope_scaling, rope_theta
from engine.oracle.weights import Weights
from kvpack.layout import LayerKind

_LETTERS = {"L": LayerKind.SWA, "G": LayerKind.FULL}


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """The model for an ``exaone4`` config.

    Raises:
        OracleModelError: A field or a tensor is missing or unsupported.
    """
    config.require_absent("hidden_act", "silu")
    size = Geometry.read(config)
    kinds = _kinds(config, size.layers)
    final = parts.rms_norm(weights, "model.norm", size.hidden, config.number("rms_norm_eps"))
    return Decoder(
        parts.embedding(weights, size),
        tuple(
            _block(config, weights, size, f"model.layers.{index}", kind)
            for index, kind in enumerate(kinds)
        ),
        parts.head(weights, size, final, config.flag("tie_word_embeddings")),
    )


def _block(
    config: ModelConfig, weights: Weights, size: Geometry, name: str, kind: LayerKind
) -> SequentialBlock:
    eps, inner = config.number("rms_norm_eps"), config.integer("intermediate_size")
    turned = kind is LayerKind.SWA or not config.has("sliding_window")
    attention = Attention(
        parts.projections(weights, f"{name}.self_attn", size),
        size,
        size.head_dim**-0.5,
        window=config.window(kind),
        rope=_rope(config, size, kind) if turned else None,
        query_norm=parts.rms_norm(weights, f"{name}.self_attn.q_norm", size.head_dim, eps),
        key_norm=parts.rms_norm(weights, f"{name}.self_attn.k_norm", size.head_dim, eps),
    )
    return SequentialBlock(
        attention,
        parts.gated_mlp(weights, f"{name}.mlp", size.hidden, inner),
        after_attention=parts.rms_norm(
            weights, f"{name}.post_attention_layernorm", size.hidden, eps
        ),
        after_mlp=parts.rms_norm(weights, f"{name}.post_feedforward_layernorm", size.hidden, eps),
    )


def _kinds(config: ModelConfig, layers: int) -> tuple[LayerKind, ...]:
    """Letters repeated to the last layer, a period, or ``layer_types``; all given must agree."""
    if not config.has("sliding_window"):
        return (LayerKind.FULL,) * layers
    pattern = config.values.get("sliding_window_pattern")
    named = config.layer_kinds()
    if pattern is None and named is not None:
        return named
    kinds = _pattern_kinds(config, pattern, layers)
    if named is not None and named != kinds:
        raise OracleModelError("layer_types", "what sliding_window_pattern says", "another order")
    return kinds


def _pattern_kinds(config: ModelConfig, pattern: object, layers: int) -> tuple[LayerKind, ...]:
    if not isinstance(pattern, str):
        return every_nth_full(layers, config.integer("sliding_window_pattern"))
    if not pattern or set(pattern) - set(_LETTERS):
        raise OracleModelError("sliding_window_pattern", "letters L and G", pattern)
    return tuple(_LETTERS[pattern[index % len(pattern)]] for index in range(layers))


def _rope(config: ModelConfig, size: Geometry, kind: LayerKind) -> Rope:
    scaling = rope_scaling(config, kind)
    return build_rope(
        rope_theta(config, kind), size.head_dim, scaling=scaling, dialect=config.dialect
    )
