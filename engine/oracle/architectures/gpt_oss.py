"""GPT-OSS: sliding and full layers in turn, all with RoPE, with attention sinks and experts.

Every projection has a bias. A sink per query head joins the softmax without a value.
``h = x + attend(rope(N1 x W_q), rope(N1 x W_k), N1 x W_v; sinks) W_o``, ``y = h + f(N2 h)``.
``f(x) = sum over the k best e of share_e · mlp_e(x)``; the best by ``x W_r + b``, the shares are
the softmax of those k. ``mlp_e`` gates with ``(up + 1) · g · sigmoid(1.702 g)``, clamped at 7.
"""

from __future__ import annotations

from engine.oracle.architectures import parts
from engine.oracle.attention import Attention
from engine.oracle.config import ModelConfig, every_nth_full
from engine.oracle.decoder import Decoder, SequentialBlock
from engine.oracle.geometry import Geometry
from engine.oracle.mlp import ExpertMlp, SoftmaxRouter, clamped_gating
from engine.oracle.rope import Rope, build_rope, rope_scaling, rope_theta
from engine.oracle.weights import Weights
from kvpack.layout import LayerKind


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """The model for a ``gpt_oss`` config.

    Raises:
        OracleModelError: A field or a tensor is missing or unsupported.
    """
    config.require_absent("hidden_act", "silu")
    config.require_absent("attention_bias", True)
    config.require_absent("tie_word_embeddings", False)
    config.require_absent("swiglu_alpha", 1.702)
    config.require_absent("swiglu_limit", 7.0)
    size = Geometry.read(config)
    kinds = config.layer_kinds() or every_nth_full(size.layers, 2)
    final = parts.rms_norm(weights, "model.norm", size.hidden, config.number("rms_norm_eps", 1e-5))
    return Decoder(
        parts.embedding(weights, size),
        tuple(
            _block(config, weights, size, f"model.layers.{index}", kind)
            for index, kind in enumerate(kinds)
        ),
        parts.head(weights, size, final, tied=False),
    )


def _block(
    config: ModelConfig, weights: Weights, size: Geometry, name: str, kind: LayerKind
) -> SequentialBlock:
    eps = config.number("rms_norm_eps", 1e-5)
    attention = Attention(
        parts.projections(weights, f"{name}.self_attn", size, bias=True),
        size,
        size.head_dim**-0.5,
        window=config.window(kind),
        rope=_rope(config, size, kind),
        sinks=weights.vector(f"{name}.self_attn.sinks", size.heads),
    )
    return SequentialBlock(
        attention,
        _experts(config, weights, size, f"{name}.mlp"),
        before_attention=parts.rms_norm(weights, f"{name}.input_layernorm", size.hidden, eps),
        before_mlp=parts.rms_norm(weights, f"{name}.post_attention_layernorm", size.hidden, eps),
    )


def _experts(config: ModelConfig, weights: Weights, size: Geometry, name: str) -> ExpertMlp:
    count, inner = config.integer("num_local_experts"), config.integer("intermediate_size")
    return ExpertMlp(
        parts.stacked_experts(
            weights, f"{name}.experts", count, size.hidden, inner, clamped_gating, bias=True
        ),
        SoftmaxRouter(
            weights.linear(f"{name}.router", size.hidden, count, bias=True),
            config.integer("num_experts_per_tok"),
        ),
    )


def _rope(config: ModelConfig, size: Geometry, kind: LayerKind) -> Rope:
    theta = rope_theta(config, kind, 150_000.0)
    scaling = rope_scaling(config, kind)
    return build_rope(theta, size.head_dim, scaling=scaling, dialect=config.dialect)
