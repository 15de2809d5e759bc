"""OLMo 3: three sliding layers with plain RoPE, then a full one whose RoPE may be scaled.

``q = rope(rms(x W_q))``, ``k = rope(rms(x W_k))`` with one norm over all heads together.
``h = x + N1(attend(q, K, x W_v) W_o)``, ``y = h + N2(mlp(h))``: the norms follow the parts.
"""

from __future__ import annotations

from engine.oracle.architectures import parts
from engine.oracle.attention import Attention
from engine.oracle.config import ModelConfig, every_nth_full
from engine.oracle.decoder import Decoder, SequentialBlock
from engine.oracle.geometry import Geometry
from engine.oracle.rope import Rope, build_rope, rope_scaling, rope_theta
from engine.oracle.weights import Weights
from kvpack.layout import LayerKind


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """The model for an ``olmo3`` config.

    Raises:
        OracleModelError: A field or a tensor is missing or unsupported.
    """
    config.require_absent("hidden_act", "silu")
    heads = config.integer("num_attention_heads")
    size = Geometry.read(config, config.integer("hidden_size") // heads, heads)
    kinds = config.layer_kinds() or every_nth_full(size.layers, 4)
    final = parts.rms_norm(weights, "model.norm", size.hidden, config.number("rms_norm_eps"))
    return Decoder(
        parts.embedding(weights, size),
        tuple(
            _block(config, weights, size, f"model.layers.{index}", kind)
            for index, kind in enumerate(kinds)
        ),
        parts.head(weights, size, final, config.flag("tie_word_embeddings", False)),
    )


def _block(
    config: ModelConfig, weights: Weights, size: Geometry, name: str, kind: LayerKind
) -> SequentialBlock:
    eps, inner = config.number("rms_norm_eps"), config.integer("intermediate_size")
    bias = config.flag("attention_bias", False)
    attention = Attention(
        parts.projections(weights, f"{name}.self_attn", size, bias),
        size,
        size.head_dim**-0.5,
        window=config.window(kind),
        rope=_rope(config, size, kind),
        query_norm=parts.rms_norm(weights, f"{name}.self_attn.q_norm", size.query_width, eps),
        key_norm=parts.rms_norm(weights, f"{name}.self_attn.k_norm", size.key_width, eps),
        norm_per_head=False,
    )
    return SequentialBlock(
        attention,
        parts.gated_mlp(weights, f"{name}.mlp", size.hidden, inner),
        after_attention=parts.rms_norm(
            weights, f"{name}.post_attention_layernorm", size.hidden, eps
        ),
        after_mlp=parts.rms_norm(weights, f"{name}.post_feedforward_layernorm", size.hidden, eps),
    )


def _rope(config: ModelConfig, size: Geometry, kind: LayerKind) -> Rope:
    """Sliding layers see only near keys and keep plain RoPE; full layers take the scaling rule."""
    scaling = rope_scaling(config, kind) if kind is LayerKind.FULL else None
    return build_rope(
        rope_theta(config, kind), size.head_dim, scaling=scaling, dialect=config.dialect
    )
