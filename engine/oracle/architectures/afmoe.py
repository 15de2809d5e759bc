"""AFMoE (Trinity): three sliding layers with RoPE, then a full one without; experts later on.

``e = E[ids] · sqrt(hidden)`` where ``mup_enabled``.
``q = rope(rms(x W_q))``, ``k = rope(rms(x W_k))`` per head; RoPE on sliding layers.
``a(x) = (attend(q, K, x W_v) · sigmoid(x W_g)) W_o``.
``h = x + N2(a(N1 x))``, ``y = h + N4(f(N3 h))``; ``f`` is an MLP in the first ``num_dense_layers``.
Then ``f(x) = shared(x) + sum over the k best e of share_e · mlp_e(x)`` with ``s = sigmoid(x W_r)``,
the best by ``s + bias``, ``share = route_scale · s / sum of the chosen s``.
"""

from __future__ import annotations

import math

from engine.oracle.architectures import parts
from engine.oracle.attention import Attention
from engine.oracle.config import Dialect, ModelConfig, every_nth_full
from engine.oracle.decoder import Decoder, SequentialBlock
from engine.oracle.errors import OracleModelError
from engine.oracle.geometry import Geometry
from engine.oracle.mlp import ExpertMlp, SigmoidRouter
from engine.oracle.operators import Transform
from engine.oracle.rope import Rope, build_rope, rope_scaling, rope_theta
from engine.oracle.weights import Weights
from kvpack.layout import LayerKind


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """The model for an ``afmoe`` config.

    Raises:
        OracleModelError: A field or a tensor is missing or unsupported.
    """
    _refuse_other_routing(config)
    size = Geometry.read(config)
    kinds = config.layer_kinds() or every_nth_full(
        size.layers, config.integer("global_attn_every_n_layers", 4)
    )
    final = parts.rms_norm(weights, "model.norm", size.hidden, config.number("rms_norm_eps", 1e-5))
    scale = (
        math.sqrt(size.hidden) if config.flag("mup_enabled", config.either(True, False)) else 1.0
    )
    return Decoder(
        parts.embedding(weights, size, scale),
        tuple(
            _block(config, weights, size, f"model.layers.{index}", kind, _is_dense(config, index))
            for index, kind in enumerate(kinds)
        ),
        parts.head(weights, size, final, config.flag("tie_word_embeddings", False)),
    )


def _refuse_other_routing(config: ModelConfig) -> None:
    """Published checkpoints route by sigmoid in one group; other settings exist only in configs."""
    config.require_absent("hidden_act", "silu")
    config.require_absent("attention_bias", False)
    config.require_absent("score_func", "sigmoid")
    config.require_absent("n_group", 1)
    config.require_absent("topk_group", 1)
    config.require_absent("route_norm", True)


def _is_dense(config: ModelConfig, index: int) -> bool:
    dense = config.values.get("num_dense_layers")
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise OracleModelError("num_dense_layers", "a natural number", dense)
    return index < dense


def _block(
    config: ModelConfig, weights: Weights, size: Geometry, name: str, kind: LayerKind, dense: bool
) -> SequentialBlock:
    eps = config.number("rms_norm_eps", 1e-5)
    attention = Attention(
        parts.projections(weights, f"{name}.self_attn", size),
        size,
        size.head_dim**-0.5,
        window=config.window(kind),
        rope=_rope(config, size) if kind is LayerKind.SWA else None,
        query_norm=parts.rms_norm(weights, f"{name}.self_attn.q_norm", size.head_dim, eps),
        key_norm=parts.rms_norm(weights, f"{name}.self_attn.k_norm", size.head_dim, eps),
        gate=weights.linear(f"{name}.self_attn.gate_proj", size.hidden, size.query_width),
    )
    return SequentialBlock(
        attention,
        _mlp(config, weights, size, f"{name}.mlp", dense),
        parts.rms_norm(weights, f"{name}.input_layernorm", size.hidden, eps),
        parts.rms_norm(weights, f"{name}.post_attention_layernorm", size.hidden, eps),
        parts.rms_norm(weights, f"{name}.pre_mlp_layernorm", size.hidden, eps),
        parts.rms_norm(weights, f"{name}.post_mlp_layernorm", size.hidden, eps),
    )


def _mlp(
    config: ModelConfig, weights: Weights, size: Geometry, name: str, dense: bool
) -> Transform:
    if dense:
        return parts.gated_mlp(weights, name, size.hidden, config.integer("intermediate_size"))
    experts, inner = config.integer("num_experts"), config.integer("moe_intermediate_size")
    shared = config.integer("num_shared_experts")
    return ExpertMlp(
        parts.stacked_experts(weights, f"{name}.experts", experts, size.hidden, inner),
        _router(config, weights, size, name, experts),
        parts.gated_mlp(weights, f"{name}.shared_experts", size.hidden, inner * shared),
    )


def _router(
    config: ModelConfig, weights: Weights, size: Geometry, name: str, experts: int
) -> SigmoidRouter:
    """With one expert per token mlx-lm keeps the bare score, transformers divides it by itself."""
    count = config.integer("num_experts_per_tok")
    return SigmoidRouter(
        weights.linear(f"{name}.router.gate", size.hidden, experts),
        weights.vector(f"{name}.expert_bias", experts),
        count,
        normalised=count > 1 or config.dialect is Dialect.TRANSFORMERS,
        scale=config.number("route_scale", config.either(2.826, 1.0)),
    )


def _rope(config: ModelConfig, size: Geometry) -> Rope:
    theta = rope_theta(config, LayerKind.SWA, 10_000.0)
    scaling = rope_scaling(config, LayerKind.SWA)
    return build_rope(theta, size.head_dim, scaling=scaling, dialect=config.dialect)
