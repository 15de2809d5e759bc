"""Muse Glimmer: three sliding layers with RoPE, then a full one without positions.

``e = rms(E[ids])`` without scale.
``q = 3.87 · rms(x W_q)``, ``k = rms(x W_k)`` per head without scale; RoPE on sliding layers.
``a(x) = (attend(q, K, V) · sigmoid(x W_g)) W_o``, scores scaled by ``head_dim^-1/2``.
``h = x + N2(a(N1 x))``, ``y = h + N4(mlp(N3 h))``; N1 … N4 centred, N2 and N4 with their own eps.
``logits = 20 · tanh(rms(y) W · output_multiplier / 20)``.
"""

from __future__ import annotations

from engine.oracle.architectures import parts
from engine.oracle.attention import Attention
from engine.oracle.config import ModelConfig, every_nth_full
from engine.oracle.decoder import Decoder, SequentialBlock
from engine.oracle.errors import OracleModelError
from engine.oracle.geometry import Geometry
from engine.oracle.operators import RmsNorm
from engine.oracle.rope import Rope, build_rope, rope_scaling, rope_theta
from engine.oracle.weights import Weights
from kvpack.layout import LayerKind


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """The model for a ``muse_glimmer`` config.

    Raises:
        OracleModelError: A field or a tensor is missing or unsupported.
    """
    config.require_absent("hidden_activation", "silu")
    config.require_absent("attention_bias", False)
    size, eps = Geometry.read(config), config.number("rms_norm_eps", 1e-5)
    kinds = _kinds(config, size.layers)
    final = parts.rms_norm(weights, "model.norm", size.hidden, eps)
    return Decoder(
        parts.embedding(weights, size, norm=RmsNorm(None, eps)),
        tuple(
            _block(config, weights, size, f"model.layers.{index}", kind, turned)
            for index, (kind, turned) in enumerate(zip(kinds, _turned(config, kinds), strict=True))
        ),
        parts.head(
            weights,
            size,
            final,
            config.flag("tie_word_embeddings", False),
            config.number("output_multiplier", 256**0.5 / 6656**0.5),
            config.number("final_logit_softcapping", 20.0),
        ),
    )


def _block(
    config: ModelConfig, weights: Weights, size: Geometry, name: str, kind: LayerKind, turned: bool
) -> SequentialBlock:
    eps, post_eps = config.number("rms_norm_eps", 1e-5), config.number("post_norm_eps", 1e-8)
    attention = Attention(
        parts.projections(weights, f"{name}.self_attn", size),
        size,
        size.head_dim**-0.5,
        window=config.window(kind),
        rope=_rope(config, size) if turned else None,
        query_norm=RmsNorm(None, eps),
        key_norm=RmsNorm(None, eps),
        query_factor=config.number("qk_scale_factor", 3.87),
        gate=weights.linear(f"{name}.self_attn.gate_proj", size.hidden, size.query_width),
    )
    return SequentialBlock(
        attention,
        parts.gated_mlp(weights, f"{name}.mlp", size.hidden, config.integer("intermediate_size")),
        parts.centred_norm(weights, f"{name}.input_layernorm", size.hidden, eps),
        parts.centred_norm(weights, f"{name}.post_attention_layernorm", size.hidden, post_eps),
        parts.centred_norm(weights, f"{name}.pre_feedforward_layernorm", size.hidden, eps),
        parts.centred_norm(weights, f"{name}.post_feedforward_layernorm", size.hidden, post_eps),
    )


def _kinds(config: ModelConfig, layers: int) -> tuple[LayerKind, ...]:
    """``layer_types``; without it the references count from opposite ends, so only 4n agree."""
    kinds = config.layer_kinds()
    if kinds is None and layers % 4:
        raise OracleModelError("layer_types", "a value, unless layers are a multiple of 4", layers)
    return kinds or every_nth_full(layers, 4)


def _turned(config: ModelConfig, kinds: tuple[LayerKind, ...]) -> list[bool]:
    """Which layers turn their keys: ``layer_rope_theta`` is not 0, or else the sliding ones.

    Both references turn every such layer by the one global base whatever number stands in the
    list, so any other number is refused.
    """
    bases = config.values.get("layer_rope_theta")
    if bases is None:
        return [kind is LayerKind.SWA for kind in kinds]
    if not isinstance(bases, list) or len(bases) != len(kinds):
        raise OracleModelError("layer_rope_theta", f"{len(kinds)} numbers", type(bases).__name__)
    theta = rope_theta(config, LayerKind.SWA)
    for index, base in enumerate(bases):
        if base not in (0, theta):
            raise OracleModelError(f"layer_rope_theta[{index}]", f"0 or {theta}", base)
    return [base != 0 for base in bases]


def _rope(config: ModelConfig, size: Geometry) -> Rope:
    theta = rope_theta(config, LayerKind.SWA)
    scaling = rope_scaling(config, LayerKind.SWA)
    return build_rope(theta, size.head_dim, scaling=scaling, dialect=config.dialect)
