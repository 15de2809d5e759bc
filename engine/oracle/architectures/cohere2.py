"""Cohere2 (Command R7B, Command A): three sliding layers with RoPE, then a full one without.

RoPE pairs are neighbours ``(0, 1), (2, 3)``. ``N`` is a layer norm, read by both parts at once:
``y = x + attend(rope(N x W_q), rope(N x W_k), N x W_v) W_o + mlp(N x)``.
``logits = (N y) Eᵀ · logit_scale``: the head is always the embedding's table.
"""

from __future__ import annotations

from engine.oracle.architectures import parts
from engine.oracle.attention import Attention
from engine.oracle.config import ModelConfig, every_nth_full
from engine.oracle.decoder import Decoder, ParallelBlock
from engine.oracle.errors import OracleModelError
from engine.oracle.geometry import Geometry
from engine.oracle.operators import LayerNorm
from engine.oracle.rope import Rope, build_rope, rope_scaling, rope_theta
from engine.oracle.weights import Weights
from kvpack.layout import LayerKind


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """The model for a ``cohere2`` config.

    Raises:
        OracleModelError: A field or a tensor is missing or unsupported.
    """
    config.require_absent("hidden_act", "silu")
    config.require_absent("tie_word_embeddings", True)
    size = Geometry.read(config, config.integer("hidden_size") // _heads(config))
    if size.query_width != size.hidden:
        raise OracleModelError("head_dim", f"hidden_size / heads, {size.hidden}", size.query_width)
    return Decoder(
        parts.embedding(weights, size),
        tuple(
            _block(config, weights, size, f"model.layers.{index}", kind)
            for index, kind in enumerate(_kinds(config, size.layers))
        ),
        parts.head(
            weights,
            size,
            _norm(config, weights, "model.norm", size),
            tied=True,
            scale=config.number("logit_scale", 0.0625),
        ),
    )


def _block(
    config: ModelConfig, weights: Weights, size: Geometry, name: str, kind: LayerKind
) -> ParallelBlock:
    bias = config.flag("attention_bias", False)
    attention = Attention(
        parts.projections(weights, f"{name}.self_attn", size, bias),
        size,
        size.head_dim**-0.5,
        window=config.window(kind),
        rope=_rope(config, size) if kind is LayerKind.SWA else None,
    )
    inner = config.integer("intermediate_size")
    return ParallelBlock(
        attention,
        parts.gated_mlp(weights, f"{name}.mlp", size.hidden, inner),
        _norm(config, weights, f"{name}.input_layernorm", size),
    )


def _heads(config: ModelConfig) -> int:
    return config.integer("num_attention_heads")


def _kinds(config: ModelConfig, layers: int) -> tuple[LayerKind, ...]:
    """The pattern, or ``layer_types``; mlx-lm reads only the first, so both must say the same."""
    pattern = every_nth_full(layers, config.integer("sliding_window_pattern", 4))
    kinds = config.layer_kinds()
    if kinds is not None and kinds != pattern:
        raise OracleModelError("layer_types", "what sliding_window_pattern says", "another order")
    return pattern


def _norm(config: ModelConfig, weights: Weights, name: str, size: Geometry) -> LayerNorm:
    bias = config.flag("layer_norm_bias", False)
    return LayerNorm(
        weights.vector(f"{name}.weight", size.hidden),
        weights.vector(f"{name}.bias", size.hidden) if bias else None,
        config.number("layer_norm_eps", 1e-5),
    )


def _rope(config: ModelConfig, size: Geometry) -> Rope:
    theta = rope_theta(config, LayerKind.SWA)
    scaling = rope_scaling(config, LayerKind.SWA)
    return build_rope(theta, size.head_dim, True, scaling, config.dialect)
