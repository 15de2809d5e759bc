"""Gemma 3 (text): five sliding layers with a local RoPE base, then a full one with a global base.

``e = E[ids] · sqrt(hidden)``. ``q = rope(rms(x W_q))``, ``k = rope(rms(x W_k))`` per head;
scores are scaled by ``query_pre_attn_scalar^-1/2``; a RoPE scaling rule is for full layers only.
``h = x + N2(attend(…)(N1 x))``, ``y = h + N4(mlp(N3 h))``; the MLP gates with tanh-GELU.
Every norm is centred.
"""

from __future__ import annotations

import math

import numpy as np

from engine.oracle.architectures import parts
from engine.oracle.attention import Attention
from engine.oracle.config import Dialect, ModelConfig, every_nth_full
from engine.oracle.decoder import Decoder, SequentialBlock
from engine.oracle.errors import OracleModelError
from engine.oracle.geometry import Geometry
from engine.oracle.operators import Doubles, gelu_tanh
from engine.oracle.rope import Rope, build_rope, rope_scaling, rope_theta
from engine.oracle.weights import Weights
from kvpack.layout import LayerKind

LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """The model for a ``gemma3_text`` config, or for the text part of a ``gemma3`` one.

    Raises:
        OracleModelError: A field or a tensor is missing or unsupported.
    """
    config.require_absent("hidden_activation", "gelu_pytorch_tanh")
    config.require_absent("attention_bias", False)
    config.require_absent("use_bidirectional_attention", False)
    config.require_absent("attn_logit_softcapping")
    config.require_absent("final_logit_softcapping")
    size, eps = Geometry.read(config, 256), config.number("rms_norm_eps", 1e-6)
    final = parts.centred_norm(weights, "model.norm", size.hidden, eps)
    # The published checkpoints are tied and say so by having no head.
    tied = not weights.has("lm_head.weight")
    return Decoder(
        parts.embedding(weights, size, _embedding_scale(config, size.hidden)),
        tuple(
            _block(config, weights, size, f"model.layers.{index}", kind)
            for index, kind in enumerate(_kinds(config, size.layers))
        ),
        parts.head(weights, size, final, tied),
    )


def _embedding_scale(config: ModelConfig, hidden: int) -> float:
    """``sqrt(hidden)``, which mlx-lm rounds to bfloat16 whatever the weights are.

    transformers rounds it to the weights' type: float32 here.
    """
    exact = np.float32(math.sqrt(hidden))
    if config.dialect is Dialect.TRANSFORMERS:
        return float(exact)
    # Nearest bfloat16, ties to even: a float32 without its lower 16 bits.
    bits = int(exact.view(np.uint32))
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(nearest).view(np.float32))


def _gelu_gating(gate: Doubles, up: Doubles) -> Doubles:
    return gelu_tanh(gate) * up


def _block(
    config: ModelConfig, weights: Weights, size: Geometry, name: str, kind: LayerKind
) -> SequentialBlock:
    eps, inner = config.number("rms_norm_eps", 1e-6), config.integer("intermediate_size")
    attention = Attention(
        parts.projections(weights, f"{name}.self_attn", size),
        size,
        config.number("query_pre_attn_scalar", 256) ** -0.5,
        window=config.window(kind),
        rope=_rope(config, size, kind),
        query_norm=parts.centred_norm(weights, f"{name}.self_attn.q_norm", size.head_dim, eps),
        key_norm=parts.centred_norm(weights, f"{name}.self_attn.k_norm", size.head_dim, eps),
    )
    return SequentialBlock(
        attention,
        parts.gated_mlp(weights, f"{name}.mlp", size.hidden, inner, _gelu_gating),
        parts.centred_norm(weights, f"{name}.input_layernorm", size.hidden, eps),
        parts.centred_norm(weights, f"{name}.post_attention_layernorm", size.hidden, eps),
        parts.centred_norm(weights, f"{name}.pre_feedforward_layernorm", size.hidden, eps),
        parts.centred_norm(weights, f"{name}.post_feedforward_layernorm", size.hidden, eps),
    )


def _kinds(config: ModelConfig, layers: int) -> tuple[LayerKind, ...]:
    """The pattern, or ``layer_types``; mlx-lm reads only the first, so both must say the same."""
    pattern = every_nth_full(layers, config.integer("sliding_window_pattern", 6))
    kinds = config.layer_kinds()
    if kinds is not None and kinds != pattern:
        raise OracleModelError("layer_types", "what sliding_window_pattern says", "another order")
    return pattern


def _rope(config: ModelConfig, size: Geometry, kind: LayerKind) -> Rope:
    if kind is LayerKind.SWA:
        local = config.values.get("rope_local_base_freq")
        theta = (
            config.number("rope_local_base_freq")
            if local is not None
            else _nested_theta(config, kind, LOCAL_THETA)
        )
        return build_rope(theta, size.head_dim)
    theta = rope_theta(config, kind, GLOBAL_THETA)
    scaling = rope_scaling(config, kind)
    return build_rope(theta, size.head_dim, scaling=scaling, dialect=config.dialect)


def _nested_theta(config: ModelConfig, kind: LayerKind, default: float) -> float:
    """The local base as newer configs nest it; ``rope_theta`` is the global one and not read."""
    newer = {name: value for name, value in config.values.items() if name != "rope_theta"}
    return rope_theta(ModelConfig(newer, config.dialect), kind, default)
