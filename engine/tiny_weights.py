"""Random weights for tiny models: which tensors an architecture has, and their values.

Values come from BLAKE3's extendable output under seed and tensor name, so they depend on no
library's random generator. Scales are chosen so that attention is sharp enough to depend on
positions and old rows, and logits spread over a few units instead of being flat or saturated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvpack.layout import Encoding

_SAFETENSORS_NAMES: Final = {
    Encoding.F16LE: "F16",
    Encoding.BF16LE: "BF16",
    Encoding.F32LE: "F32",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight: uniform around ``centre`` with standard deviation ``spread``."""

    name: str
    shape: tuple[int, ...]
    spread: float
    centre: float = 0.0
    keep_float32: bool = False


Config = Mapping[str, Any]


def _linear(name: str, out_dim: int, in_dim: int, gain: float = 1.0) -> Tensor:
    return Tensor(f"{name}.weight", (out_dim, in_dim), gain * in_dim**-0.5)


def _norm(name: str, dim: int, centre: float = 1.0) -> Tensor:
    return Tensor(f"{name}.weight", (dim,), 0.05, centre)


def _attention(prefix: str, config: Config, gain: float) -> Iterator[Tensor]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield _linear(f"{prefix}.q_proj", queries, hidden, gain)
    yield _linear(f"{prefix}.k_proj", keys, hidden, gain)
    yield _linear(f"{prefix}.v_proj", keys, hidden)
    yield _linear(f"{prefix}.o_proj", hidden, queries, 2.0)


def _mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[Tensor]:
    yield _linear(f"{prefix}.gate_proj", intermediate, hidden, 1.5)
    yield _linear(f"{prefix}.up_proj", intermediate, hidden)
    yield _linear(f"{prefix}.down_proj", hidden, intermediate, 2.0)


def _muse_glimmer_layer(prefix: str, _: int, config: Config) -> Iterator[Tensor]:
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    yield from _attention(f"{prefix}.self_attn", config, 1.0)
    yield _linear(f"{prefix}.self_attn.gate_proj", heads, hidden)
    yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        # Centred norms: the scale is one plus the weight.
        yield _norm(f"{prefix}.{name}_layernorm", hidden, 0.0)


def _cohere2_layer(prefix: str, _: int, config: Config) -> Iterator[Tensor]:
    hidden = config["hidden_size"]
    yield from _attention(f"{prefix}.self_attn", config, 1.8)
    yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    yield _norm(f"{prefix}.input_layernorm", hidden)


def _exaone4_layer(prefix: str, _: int, config: Config) -> Iterator[Tensor]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    yield from _attention(f"{prefix}.self_attn", config, 1.0)
    yield _norm(f"{prefix}.self_attn.q_norm", dim, 1.8)
    yield _norm(f"{prefix}.self_attn.k_norm", dim, 1.8)
    yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    for name in ("post_attention", "post_feedforward"):
        yield _norm(f"{prefix}.{name}_layernorm", hidden)


def _afmoe_layer(prefix: str, index: int, config: Config) -> Iterator[Tensor]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    yield from _attention(f"{prefix}.self_attn", config, 1.0)
    yield _linear(f"{prefix}.self_attn.gate_proj", config["num_attention_heads"] * dim, hidden)
    yield _norm(f"{prefix}.self_attn.q_norm", dim, 1.8)
    yield _norm(f"{prefix}.self_attn.k_norm", dim, 1.8)
    if index < config["num_dense_layers"]:
        yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    else:
        yield from _experts(f"{prefix}.mlp", config)
    for name in ("input_", "post_attention_", "pre_mlp_", "post_mlp_"):
        yield _norm(f"{prefix}.{name}layernorm", hidden)


def _experts(prefix: str, config: Config) -> Iterator[Tensor]:
    hidden, count = config["hidden_size"], config["num_experts"]
    yield _linear(f"{prefix}.router.gate", count, hidden)
    yield Tensor(f"{prefix}.expert_bias", (count,), 0.01, keep_float32=True)
    for expert in range(count):
        yield from _mlp(f"{prefix}.experts.{expert}", hidden, config["moe_intermediate_size"])
    yield from _mlp(f"{prefix}.shared_experts", hidden, config["moe_intermediate_size"])


def _gemma3_layer(prefix: str, _: int, config: Config) -> Iterator[Tensor]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    yield from _attention(f"{prefix}.self_attn", config, 1.0)
    yield _norm(f"{prefix}.self_attn.q_norm", dim, 0.8)
    yield _norm(f"{prefix}.self_attn.k_norm", dim, 0.8)
    yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        yield _norm(f"{prefix}.{name}_layernorm", hidden, 0.0)


def _gpt_oss_layer(prefix: str, _: int, config: Config) -> Iterator[Tensor]:
    hidden, count = config["hidden_size"], config["num_local_experts"]
    inner = config["intermediate_size"]
    for weight in _attention(f"{prefix}.self_attn", config, 1.8):
        yield weight
        yield Tensor(weight.name.replace(".weight", ".bias"), weight.shape[:1], 0.1)
    # A sink as strong as an average key: it takes a share of every row's weight.
    yield Tensor(f"{prefix}.self_attn.sinks", (config["num_attention_heads"],), 1.0)
    yield _linear(f"{prefix}.mlp.router", count, hidden)
    yield Tensor(f"{prefix}.mlp.router.bias", (count,), 0.1)
    for name, rows, columns in (
        ("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner),
    ):  # fmt: skip
        stem = f"{prefix}.mlp.experts.{name}"
        yield Tensor(f"{stem}.weight", (count, rows, columns), columns**-0.5)
        yield Tensor(f"{stem}.bias", (count, rows), 0.1)
    for name in ("input", "post_attention"):
        yield _norm(f"{prefix}.{name}_layernorm", hidden)


def _olmo3_layer(prefix: str, _: int, config: Config) -> Iterator[Tensor]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    yield from _attention(f"{prefix}.self_attn", config, 1.0)
    # One norm over all heads together.
    yield _norm(f"{prefix}.self_attn.q_norm", config["num_attention_heads"] * dim, 1.8)
    yield _norm(f"{prefix}.self_attn.k_norm", config["num_key_value_heads"] * dim, 1.8)
    yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    for name in ("post_attention", "post_feedforward"):
        yield _norm(f"{prefix}.{name}_layernorm", hidden)


def _llama_layer(prefix: str, _: int, config: Config) -> Iterator[Tensor]:
    hidden = config["hidden_size"]
    yield from _attention(f"{prefix}.self_attn", config, 1.8)
    yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    for name in ("input", "post_attention"):
        yield _norm(f"{prefix}.{name}_layernorm", hidden)


LAYERS: Final[Mapping[str, Callable[[str, int, Config], Iterator[Tensor]]]] = {
    "muse_glimmer": _muse_glimmer_layer,
    "cohere2": _cohere2_layer,
    "exaone4": _exaone4_layer,
    "afmoe": _afmoe_layer,
    "gemma3": _gemma3_layer,
    "gemma3_text": _gemma3_layer,
    "gpt_oss": _gpt_oss_layer,
    "olmo3": _olmo3_layer,
    "llama": _llama_layer,
}

#: Where a multimodal checkpoint keeps its language model.
_PREFIXES: Final = {"gemma3": "language_model."}

#: Standard deviation of embeddings: small where they are tied, so that a token's own embedding in
#: the residual stream does not win every argmax.
_EMBEDDING_SPREAD: Final = {"cohere2": 0.3, "gemma3": 0.04, "gemma3_text": 0.04, "llama": 0.3}

#: Centre of the final norm's weights: Gemma's norms scale by one plus the weight.
_FINAL_NORM: Final = {"gemma3": 5.5, "gemma3_text": 5.5}

#: Gain of the output layer, so that logits spread over a few units.
_OUTPUT_GAIN: Final = {"muse_glimmer": 15.0}


def tensors(arch: str, config: Config) -> Iterator[Tensor]:
    """Every weight of ``arch`` under ``config``, in a fixed order."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    root = f"{_PREFIXES.get(arch, '')}model"
    yield Tensor(f"{root}.embed_tokens.weight", (vocab, hidden), _EMBEDDING_SPREAD.get(arch, 1.0))
    for index in range(config["num_hidden_layers"]):
        yield from LAYERS[arch](f"{root}.layers.{index}", index, config)
    yield _norm(f"{root}.norm", hidden, _FINAL_NORM.get(arch, 1.0))
    if not config["tie_word_embeddings"]:
        yield _linear("lm_head", vocab, hidden, _OUTPUT_GAIN.get(arch, 3.0))


def _values(tensor: Tensor, seed: int) -> npt.NDArray[np.float32]:
    count = int(np.prod(tensor.shape))
    label = f"kvpack tiny model\0{seed}\0{tensor.name}".encode()
    words = np.frombuffer(blake3(label).digest(length=2 * count), dtype="<u2")
    # A uniform variable on [-1, 1] has standard deviation 1/sqrt(3).
    unit = words.astype(np.float32) / np.float32(32767.5) - np.float32(1)
    scaled = unit * np.float32(tensor.spread * 3**0.5) + np.float32(tensor.centre)
    return scaled.reshape(tensor.shape)


def _encode(values: npt.NDArray[np.float32], encoding: Encoding) -> bytes:
    if encoding is Encoding.F32LE:
        return values.astype("<f4").tobytes()
    if encoding is Encoding.F16LE:
        return values.astype("<f2").tobytes()
    # bfloat16 is the upper half of a float32, rounded to nearest, ties to even.
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    return (rounded >> 16).astype("<u2").tobytes()


def safetensors_file(arch: str, config: Config, seed: int, encoding: Encoding) -> bytes:
    """All weights as one safetensors file; the same bytes for the same arguments, always.

    Layout: header length (8 bytes, little-endian), header (JSON), tensors back to back.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    blocks: list[bytes] = []
    offset = 0
    for tensor in tensors(arch, config):
        own = Encoding.F32LE if tensor.keep_float32 else encoding
        blocks.append(_encode(_values(tensor, seed), own))
        end = offset + len(blocks[-1])
        header[tensor.name] = {
            "dtype": _SAFETENSORS_NAMES[own],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *blocks))
