"""The muse_glimmer text model in plain PyTorch, with the mathematics of mlx-lm and transformers.

Twelve (or four) layers in the pattern window, window, window, full. Window layers see the last
``window`` positions through rotary embeddings; full layers see everything and have no position
signal at all (NoPE). Parameter names are the ones both libraries load, so export only casts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

NORM_EPS = 1e-5
POST_NORM_EPS = 1e-8
QK_SCALE = 3.87
SOFTCAP = 20.0
ROPE_THETA = 10_000.0

Mask = Tensor | BlockMask


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything that fixes the size of a model; units are elements and tokens.

    Raises:
        ValueError: The layers do not end in a full layer, or heads do not divide evenly.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 256
    vocabulary: int = 2048
    context: int = 8192

    def __post_init__(self) -> None:
        if self.layers % 4:
            raise ValueError(f"layers must be a multiple of 4, not {self.layers}")
        if self.heads % self.kv_heads or self.hidden % self.heads:
            raise ValueError("heads must be a multiple of kv_heads and divide hidden")

    @property
    def output_multiplier(self) -> float:
        """Scale of the logits before the softcap, by the released model's rule."""
        return (256 / self.hidden) ** 0.5

    def is_full(self, layer: int) -> bool:
        """Whether this layer sees the whole history: every fourth one."""
        return layer % 4 == 3

    def config(self) -> dict[str, object]:
        """The flat ``config.json`` that mlx-lm reads; token ids are added by the exporter."""
        kinds = [self.is_full(layer) for layer in range(self.layers)]
        return {
            "model_type": "muse_glimmer",
            "architectures": ["MuseGlimmerTextModel"],
            "dtype": "float16",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "rms_norm_eps": NORM_EPS,
            "post_norm_eps": POST_NORM_EPS,
            "sliding_window": self.window,
            "qk_scale_factor": QK_SCALE,
            "hidden_activation": "silu",
            "max_position_embeddings": self.context,
            "rope_theta": ROPE_THETA,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
            "layer_types": ["full_attention" if k else "sliding_attention" for k in kinds],
            "layer_rope_theta": [0 if k else ROPE_THETA for k in kinds],
            "tie_word_embeddings": True,
            "final_logit_softcapping": SOFTCAP,
            "output_multiplier": self.output_multiplier,
        }


def shape_from_config(config: dict[str, object]) -> Shape:
    """Read a shape back from an exported ``config.json``."""
    names = {
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "window": "sliding_window",
        "vocabulary": "vocab_size",
        "context": "max_position_embeddings",
    }
    return Shape(**{ours: int(str(config[theirs])) for ours, theirs in names.items()})


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square of the last axis, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


class CenteredNorm(nn.Module):
    """RMSNorm whose stored weight is centred on zero: ``norm(x) * (1 + weight)``."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (rms_norm(x, self.eps) * (1.0 + self.weight.float())).type_as(x)


class FinalNorm(nn.Module):
    """Plain RMSNorm: ``norm(x) * weight``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (rms_norm(x, NORM_EPS) * self.weight.float()).type_as(x)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding over pairs (i, i + head_dim / 2); ``x`` is [batch, heads, tokens, dim]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
    return turned.type_as(x)


def rope_tables(shape: Shape, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [tokens, head_dim / 2], for positions from 0."""
    half = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float64)
    angles = torch.arange(tokens, device=device, dtype=torch.float64)[:, None]
    angles = angles * ROPE_THETA ** (-half / shape.head_dim)
    return angles.cos().float(), angles.sin().float()


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Attention at scale ``head_dim ** -0.5``; the two KV heads are shared by query groups."""
    if isinstance(mask, BlockMask):
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Attention(nn.Module):
    """Gated attention with scaleless QK norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        self.gate_proj = nn.Linear(shape.hidden, wide, bias=False)

    def forward(self, x: Tensor, mask: Mask, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (
            layer(x).view(batch, tokens, -1, self.shape.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = (rms_norm(query, NORM_EPS) * QK_SCALE).type_as(value)
        key = rms_norm(key, NORM_EPS).type_as(value)
        if rope is not None:
            query, key = rotate(query, *rope), rotate(key, *rope)
        mixed = attend(query, key, value, mask).transpose(1, 2).reshape(batch, tokens, -1)
        return self.o_proj(mixed * torch.sigmoid(self.gate_proj(x)))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One block: norms before and after attention and before and after the feed-forward part."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = CenteredNorm(shape.hidden, NORM_EPS)
        self.post_attention_layernorm = CenteredNorm(shape.hidden, POST_NORM_EPS)
        self.pre_feedforward_layernorm = CenteredNorm(shape.hidden, NORM_EPS)
        self.post_feedforward_layernorm = CenteredNorm(shape.hidden, POST_NORM_EPS)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Mask, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        branch = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), mask, rope))
        x = x + functional.dropout(branch, self.dropout, self.training)
        branch = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x + functional.dropout(branch, self.dropout, self.training)


class Decoder(nn.Module):
    """Embedding (normed), layers, final norm: [batch, tokens] ids to [batch, tokens, hidden]."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = FinalNorm(shape.hidden)

    def forward(self, ids: Tensor, masks: tuple[Mask, Mask], rope: tuple[Tensor, Tensor]) -> Tensor:
        window_mask, full_mask = masks
        x = rms_norm(self.embed_tokens(ids), NORM_EPS).type_as(self.embed_tokens.weight)
        x = functional.dropout(x, self.dropout, self.training)
        for index, layer in enumerate(self.layers):
            full = self.shape.is_full(index)
            x = layer(x, full_mask if full else window_mask, None if full else rope)
        return self.norm(x)


class LanguageModel(nn.Module):
    """The decoder with its head tied to the embedding; parameters are named ``model.…``."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape, dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=scale)

    def hidden(self, ids: Tensor, masks: tuple[Mask, Mask]) -> Tensor:
        """Final hidden states, [batch, tokens, hidden]."""
        return self.model(ids, masks, rope_tables(self.shape, ids.shape[1], ids.device))

    def logits(self, hidden: Tensor) -> Tensor:
        """Softcapped logits in float32, [..., vocabulary]."""
        raw = functional.linear(hidden, self.model.embed_tokens.weight).float()
        return SOFTCAP * torch.tanh(raw * self.shape.output_multiplier / SOFTCAP)

    def forward(self, ids: Tensor, masks: tuple[Mask, Mask]) -> Tensor:
        return self.logits(self.hidden(ids, masks))


def attention_masks(
    window: int, tokens: int, device: torch.device, *, dense: bool = False
) -> tuple[Mask, Mask]:
    """(window mask, full mask): the query at p sees keys p-window+1 .. p, or 0 .. p.

    On CUDA they are block masks for compiled layers, unless ``dense`` asks for boolean ones.
    """

    def near(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    def past(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    dense = dense or device.type != "cuda"
    return make_mask(near, tokens, device, dense), make_mask(past, tokens, device, dense)


def make_mask(rule: Callable[..., Tensor], tokens: int, device: torch.device, dense: bool) -> Mask:
    """One mask from its rule: boolean [tokens, tokens], or blocks for flex attention."""
    if not dense:
        return create_block_mask(rule, None, None, tokens, tokens, device=str(device))
    steps = torch.arange(tokens, device=device)
    return rule(steps[:1], steps[:1], steps[:, None], steps[None, :])
