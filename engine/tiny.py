"""Tiny random models: real folders that this engine and mlx-lm both load.

They stand in for checkpoints that nobody can download in a test: same architecture code, same kinds
of layers in the same order, RoPE of the same form on the same layers, small dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from engine.architectures import FULL, SLIDING
from engine.encodings import dtype_name, encoding_named
from engine.tiny_tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, tokenizer, tokenizer_config
from engine.tiny_weights import LAYERS, safetensors_file
from kvpack.layout import Encoding

#: Architectures that :func:`tiny_model_files` can make.
ARCHITECTURES: Final = tuple(sorted(LAYERS))

#: At least one layer of each kind in every architecture.
_LAYERS_MIN: Final = 4

#: Mixtures of experts, which MLX's CPU runs in float32 only.
_WITH_EXPERTS: Final = ("afmoe", "gpt_oss")

_GEOMETRY: Final[Mapping[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 131_072,
}


def tiny_model_files(
    arch: str, *, seed: int, window: int, layers: int, dtype: str | None = None
) -> dict[str, bytes]:
    """The files of a model folder, by name; equal arguments give equal bytes.

    Args:
        arch: One of :data:`ARCHITECTURES`.
        seed: Chooses the weights.
        window: Sliding window in tokens; without effect on ``llama``, whose layers are all full.
        layers: Number of layers, at least four.
        dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``; None for float16, and for float32
            where the architecture is a mixture of experts, which MLX's CPU runs in no other.

    Raises:
        ValueError: An argument is outside what the architecture allows.
    """
    if arch not in LAYERS:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, not {arch!r}")
    if layers < _LAYERS_MIN:
        raise ValueError(f"layers must be at least {_LAYERS_MIN} (one of each kind), not {layers}")
    if window < 1:
        raise ValueError(f"window must be at least 1 token, not {window}")
    default = Encoding.F32LE if arch in _WITH_EXPERTS else Encoding.F16LE
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
        "config.json": _json(_nested(config) if arch == "gemma3" else config),
        "model.safetensors": safetensors_file(arch, config, seed, encoding),
        "tokenizer.json": _json(tokenizer()),
        "tokenizer_config.json": _json(tokenizer_config(config["max_position_embeddings"])),
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
    }


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    """As the multimodal checkpoints are published: the language model is one part of several."""
    outer = ("architectures", "vocab_size", "torch_dtype", "bos_token_id", "eos_token_id")
    inner = {name: value for name, value in config.items() if name != "architectures"}
    inner["model_type"] = "gemma3_text"
    return {
        **{name: config[name] for name in outer},
        "model_type": "gemma3",
        "text_config": inner,
    }


def _layer_types(layers: int, period: int = 4) -> list[str]:
    """``period - 1`` sliding layers, then a full one, and so on."""
    kinds = [SLIDING] * (period - 1) + [FULL]
    return [kinds[index % period] for index in range(layers)]


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
        "sliding_window_pattern": 4,
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


def _gemma3_config(window: int, _: int) -> dict[str, Any]:
    """Published ones have a period of six; three gives a short model a layer of each kind, too."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "sliding_window": window,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": _GEOMETRY["head_dim"],
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }


def _gpt_oss_config(window: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "sliding_window": window,
        "layer_types": _layer_types(layers, 2),
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }


def _olmo3_config(window: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": _layer_types(layers),
        "max_position_embeddings": 65_536,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }


def _llama_config(_: int, __: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 100_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }


_CONFIGS: Final[Mapping[str, Callable[[int, int], dict[str, Any]]]] = {
    "muse_glimmer": _muse_glimmer_config,
    "cohere2": _cohere2_config,
    "exaone4": _exaone4_config,
    "afmoe": _afmoe_config,
    "gemma3": _gemma3_config,
    "gemma3_text": _gemma3_config,
    "gpt_oss": _gpt_oss_config,
    "olmo3": _olmo3_config,
    "llama": _llama_config,
}
