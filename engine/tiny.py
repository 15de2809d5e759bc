"""Tiny random hybrid models: real folders that this engine and mlx-lm both load.

They stand in for checkpoints that nobody can download in a test: same architecture code, same
pattern of three sliding-window layers with RoPE and one full layer without, small dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from engine.dtypes import dtype_name, encoding_named
from engine.tiny_weights import LAYERS, safetensors_file
from kvpack.layout import Encoding

#: Architectures that :func:`tiny_model_files` can make.
ARCHITECTURES: Final = tuple(sorted(LAYERS))

_PATTERN_LAYERS: Final = 4
_SPECIALS: Final = ("<|begin|>", "<|end|>", "<|role|>", "<|turn_end|>")

#: 256 bytes and 64 specials, most of them reserved, so that every logit has a token.
VOCAB_SIZE: Final = 320

_GEOMETRY: Final[Mapping[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 131_072,
}

#: Line ends are written inside expressions, since Jinja trims them outside.
_CHAT_TEMPLATE: Final = r"""
{%- for message in messages -%}
{{ '<|role|>' + message.role + '\n' + message.content + '<|turn_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|role|>assistant\n' }}
{%- endif -%}
"""


def tiny_model_files(
    arch: str, *, seed: int, window: int, layers: int, dtype: str | None = None
) -> dict[str, bytes]:
    """The files of a model folder, by name; equal arguments give equal bytes.

    Args:
        arch: One of :data:`ARCHITECTURES`.
        seed: Chooses the weights.
        window: Sliding window in tokens.
        layers: Number of layers, at least one whole pattern.
        dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``; None for float16, and for float32
            where the architecture is a mixture of experts, which MLX's CPU runs in no other.

    Raises:
        ValueError: An argument is outside what the architecture allows.
    """
    if arch not in LAYERS:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, not {arch!r}")
    if layers < _PATTERN_LAYERS:
        raise ValueError(f"layers must be at least {_PATTERN_LAYERS} (one pattern), not {layers}")
    if window < 1:
        raise ValueError(f"window must be at least 1 token, not {window}")
    default = Encoding.F32LE if arch == "afmoe" else Encoding.F16LE
    encoding = default if dtype is None else encoding_named(dtype)
    config = {
        **_GEOMETRY,
        **_CONFIGS[arch](window, layers),
        "model_type": arch,
        "num_hidden_layers": layers,
        "torch_dtype": dtype_name(encoding),
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    return {
        "config.json": _json(config),
        "model.safetensors": safetensors_file(arch, config, seed, encoding),
        "tokenizer.json": _json(_tokenizer()),
        "tokenizer_config.json": _json(_tokenizer_config()),
        "chat_template.jinja": _CHAT_TEMPLATE.encode(),
    }


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _layer_types(layers: int) -> list[str]:
    kinds = ["sliding_attention"] * (_PATTERN_LAYERS - 1) + ["full_attention"]
    return [kinds[index % _PATTERN_LAYERS] for index in range(layers)]


def _muse_glimmer_config(window: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["MuseGlimmerForConditionalGeneration"],
        "sliding_window": window,
        "layer_types": _layer_types(layers),
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    }


def _cohere2_config(window: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Cohere2ForCausalLM"],
        "sliding_window": window,
        "sliding_window_pattern": _PATTERN_LAYERS,
        "layer_types": _layer_types(layers),
        "rope_theta": 50_000.0,
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
        "tie_word_embeddings": True,
    }


def _exaone4_config(window: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Exaone4ForCausalLM"],
        "sliding_window": window,
        "sliding_window_pattern": "LLLG",
        "layer_types": _layer_types(layers),
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


def _afmoe_config(window: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["AfmoeForCausalLM"],
        "sliding_window": window,
        "layer_types": _layer_types(layers),
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "tie_word_embeddings": False,
    }


_CONFIGS: Final[Mapping[str, Callable[[int, int], dict[str, Any]]]] = {
    "muse_glimmer": _muse_glimmer_config,
    "cohere2": _cohere2_config,
    "exaone4": _exaone4_config,
    "afmoe": _afmoe_config,
}


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE uses for each byte, by byte value."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in shown]
    table = {value: chr(value) for value in shown}
    table.update({value: chr(256 + index) for index, value in enumerate(hidden)})
    return [table[value] for value in range(256)]


def _special_tokens() -> list[str]:
    reserved = range(VOCAB_SIZE - 256 - len(_SPECIALS))
    return [*_SPECIALS, *(f"<|reserved_{index}|>" for index in reserved)]


def _tokenizer() -> dict[str, Any]:
    """Byte-level BPE without merges: one id per byte, equal to the byte."""
    added = [
        {
            "id": 256 + index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, content in enumerate(_special_tokens())
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: value for value, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIALS[0],
        "eos_token": _SPECIALS[1],
        "model_max_length": _GEOMETRY["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
