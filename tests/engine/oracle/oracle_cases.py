"""Tiny random models, one per architecture: the config, and weights that mlx-lm itself laid out."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from engine.oracle import Dialect, OracleModel, build_oracle

#: hidden_size 48 is no square, so that a rounded sqrt(hidden) shows; heads and widths differ, so
#: that swapped axes show.
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 97,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}

PATTERN = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

#: What each architecture adds to, or changes in, the sizes above.
FIELDS: dict[str, dict[str, Any]] = {
    "muse_glimmer": {
        "layer_types": PATTERN,
        "qk_scale_factor": 3.87,
        "rms_norm_eps": 1e-2,  # both far apart and large, so that a mix-up shows
        "post_norm_eps": 0.2,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.7,
    },
    "cohere2": {
        "head_dim": 8,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    },
    "exaone4": {
        "sliding_window_pattern": "LLLG",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "afmoe": {
        "layer_types": PATTERN,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "route_scale": 2.826,
        "mup_enabled": True,
    },
    "gemma3_text": {
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20,
        "rope_local_base_freq": 5_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
    "olmo3": {
        "head_dim": 8,
        "layer_types": PATTERN,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "gpt_oss": {
        "layer_types": PATTERN[2:] * 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "llama": {"tie_word_embeddings": True},
}

ARCHITECTURES = tuple(FIELDS)

#: Architectures with at least one window; llama has none.
HYBRIDS = tuple(name for name in ARCHITECTURES if name != "llama")


@dataclass(frozen=True)
class Case:
    """One tiny model in both forms."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    reference: Any

    def oracle(self, dialect: Dialect = Dialect.MLX_LM) -> OracleModel:
        return build_oracle(self.config, self.tensors, dialect)


def make_case(
    architecture: str, window: int, seed: int = 7, changes: Mapping[str, Any] | None = None
) -> Case:
    """The model of ``architecture`` with random weights: every tensor drawn, norms included."""
    config = {**SIZES, **FIELDS[architecture], "model_type": architecture, **(changes or {})}
    config.setdefault("sliding_window", window)
    if architecture == "exaone4":
        config.setdefault("rope_scaling", None)
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    reference = module.Model(module.ModelArgs.from_dict(config))
    rng = np.random.default_rng(seed)
    tensors = {
        name: _draw(rng, name, value.shape)
        for name, value in tree_flatten(reference.parameters())
        if not (architecture == "gemma3_text" and name == "lm_head.weight")
    }
    loaded = {name: mx.array(value) for name, value in tensors.items()}
    if hasattr(reference, "sanitize"):
        loaded = reference.sanitize(loaded)
    reference.update(tree_unflatten(list(loaded.items())))
    mx.eval(reference.parameters())
    return Case(config, tensors, reference)


def _draw(rng: np.random.Generator, name: str, shape: Sequence[int]) -> np.ndarray:
    """Values large enough that every term of every formula moves the logits."""
    if len(shape) == 1:
        return rng.normal(0.3 if "norm" in name else 0.0, 0.5, shape).astype(np.float32)
    scale = 1.0 if "embed" in name else 1.2 / np.sqrt(shape[-1])
    return rng.normal(0.0, scale, shape).astype(np.float32)


def token_ids(count: int, seed: int = 11, vocab: int = 97) -> list[int]:
    """``count`` random ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


def reference_logits(case: Case, ids: Sequence[int], calls: Sequence[int] | None = None) -> Any:
    """mlx-lm's own logits ``[tokens, vocab]``, in calls of these sizes through its own cache."""
    cache = case.reference.make_cache() if hasattr(case.reference, "make_cache") else None
    parts, start = [], 0
    for size in calls or [len(ids)]:
        block = mx.array([list(ids[start : start + size])])
        parts.append(np.array(case.reference(block, cache=cache)[0], dtype=np.float32))
        start += size
    return np.concatenate(parts)
