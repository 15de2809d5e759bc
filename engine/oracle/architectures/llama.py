"""Llama (SmolLM2 among them): every layer full with RoPE, unless ``layer_types`` says otherwise.

``h = x + attend(rope(N1 x W_q), rope(N1 x W_k), N1 x W_v) W_o``, ``y = h + mlp(N2 h)``.
"""

from __future__ import annotations

from engine.oracle.architectures import parts
from engine.oracle.attention import Attention
from engine.oracle.config import Dialect, ModelConfig
from engine.oracle.decoder import Decoder, SequentialBlock
from engine.oracle.geometry import Geometry
from engine.oracle.rope import Rope, build_rope, rope_scaling, rope_theta
from engine.oracle.weights import Weights
from kvpack.layout import LayerKind


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """The model for a ``llama`` config.

    Raises:
        OracleModelError: A field or a tensor is missing or unsupported.
    """
    config.require_absent("hidden_act", "silu")
    heads = config.integer("num_attention_heads")
    size = Geometry.read(config, config.integer("hidden_size") // heads, heads)
    final = parts.rms_norm(weights, "model.norm", size.hidden, config.number("rms_norm_eps"))
    return Decoder(
        parts.embedding(weights, size),
        tuple(
            _block(config, weights, size, f"model.layers.{index}", kind)
            for index, kind in enumerate(_kinds(config, size.layers))
        ),
        parts.head(
            weights, size, final, config.flag("tie_word_embeddings", config.either(True, False))
        ),
    )


def _kinds(config: ModelConfig, layers: int) -> tuple[LayerKind, ...]:
    """``layer_types`` as mlx-lm reads it; transformers' Llama has full layers only."""
    kinds = config.layer_kinds()
    if kinds is None or config.dialect is Dialect.TRANSFORMERS:
        return (LayerKind.FULL,) * layers
    return kinds


def _block(
    config: ModelConfig, weights: Weights, size: Geometry, name: str, kind: LayerKind
) -> SequentialBlock:
    eps, inner = config.number("rms_norm_eps"), config.integer("intermediate_size")
    attention = Attention(
        parts.projections(weights, f"{name}.self_attn", size, config.flag("attention_bias", False)),
        size,
        size.head_dim**-0.5,
        window=config.window(kind),
        rope=_rope(config, size, kind),
    )
    return SequentialBlock(
        attention,
        parts.gated_mlp(
            weights, f"{name}.mlp", size.hidden, inner, bias=config.flag("mlp_bias", False)
        ),
        before_attention=parts.rms_norm(weights, f"{name}.input_layernorm", size.hidden, eps),
        before_mlp=parts.rms_norm(weights, f"{name}.post_attention_layernorm", size.hidden, eps),
    )


def _rope(config: ModelConfig, size: Geometry, kind: LayerKind) -> Rope:
    theta = rope_theta(config, kind, 10_000.0)
    interleaved = config.flag("rope_traditional", False)
    return build_rope(theta, size.head_dim, interleaved, rope_scaling(config, kind), config.dialect)
