"""Engine and oracle from one folder: hybrids whose full layers rotate, and plain models.

The measure is that of ``oracle/test_oracle_engine.py``: the root mean square of the difference over
all logits of a position, in standard deviations of the oracle's. Found on x86-64, at worst: float16
0.011, bfloat16 0.09, float32 7e-6. A window that is off by one shows as 0.49 or more.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_support import HEAD, ModelCase
from models_support import CASES, NULL, edited, label, positions

import engine
from engine import Model
from engine.oracle import OracleModel, build_oracle, decode_safetensors
from kvpack.layout import Encoding

W = 8
BOUNDS = {Encoding.F16LE: 0.03, Encoding.BF16LE: 0.2, Encoding.F32LE: 3e-5}
IDS = [(i * i * 31 + i * 17 + 5) % 251 for i in range(5 * W + 3)]
Load = Callable[[ModelCase], Model]
FolderOf = Callable[[ModelCase], Path]
ALL_CASES = pytest.mark.parametrize("case", CASES, ids=label)


@functools.cache
def oracle_of(folder: Path, window: int = W, sink_shift: float = 0.0) -> OracleModel:
    config = json.loads((folder / "config.json").read_text())
    fields = config.get("text_config", config)
    if fields.get("sliding_window") is not None:
        fields["sliding_window"] = window
    tensors = decode_safetensors((folder / "model.safetensors").read_bytes())
    shifted = {name: value + np.float32(sink_shift) for name, value in tensors.items()}
    return build_oracle(
        config, {name: shifted[name] if "sinks" in name else tensors[name] for name in tensors}
    )


@functools.cache
def expected_logits(folder: Path, window: int = W, sink_shift: float = 0.0) -> np.ndarray:
    return oracle_of(folder, window, sink_shift).new_session().append(IDS)


def distance(model: Model, expected: np.ndarray, length: int) -> float:
    """Of the logits after ``length`` tokens: all but the last in one call, then a single step."""
    generation = model.new_generation()
    if length > 1:
        generation.prefill(IDS[: length - 1])
    found, wanted = generation.step(IDS[length - 1]).values(), expected[length - 1]
    return float(np.sqrt(np.mean((found - wanted) ** 2)) / wanted.std())


@ALL_CASES
def test_logits_agree_at_every_length(case: ModelCase, load: Load, model_folder: FolderOf) -> None:
    model, expected = load(case), expected_logits(model_folder(case))
    for length in positions(W):
        assert distance(model, expected, length) < BOUNDS[model.layout.encoding], f"T={length}"


@ALL_CASES
def test_logits_agree_along_a_decode_across_the_wrap(
    case: ModelCase, load: Load, model_folder: FolderOf
) -> None:
    """Single tokens from the first on: every one is read in place, sinks included."""
    model, expected = load(case), expected_logits(model_folder(case))
    generation, bound = model.new_generation(), BOUNDS[model.layout.encoding]
    for token, wanted in zip(IDS, expected, strict=True):
        found = generation.step(token).values()
        assert float(np.sqrt(np.mean((found - wanted) ** 2)) / wanted.std()) < bound


@pytest.mark.parametrize("case", [c for c in CASES if c.arch != "llama"], ids=label)
def test_a_window_that_is_off_by_one_is_outside_the_bound(
    case: ModelCase, load: Load, model_folder: FolderOf
) -> None:
    model = load(case)
    for wrong in (W - 1, W + 1):
        expected = expected_logits(model_folder(case), wrong)
        worst = max(distance(model, expected, length) for length in (2 * W, 5 * W + 3))
        assert worst > BOUNDS[model.layout.encoding]


def test_sinks_are_part_of_every_answer(load: Load, model_folder: FolderOf) -> None:
    """Sinks a little stronger are outside the bound, before the wrap and after it."""
    case = ModelCase("gpt_oss")
    expected = expected_logits(model_folder(case), W, 0.1)
    for length in (2, W, 5 * W + 3):
        assert distance(load(case), expected, length) > 100 * BOUNDS[Encoding.F32LE]


@ALL_CASES
def test_layouts_are_equal_but_for_the_encoding(
    case: ModelCase, load: Load, model_folder: FolderOf
) -> None:
    layout = dataclasses.replace(load(case).layout, encoding=Encoding.F32LE)
    assert layout == oracle_of(model_folder(case)).layout()


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
#: As newer configs say it; layouts agree to the digest of the rule.
NEWER_LLAMA = {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 50_000.0}}
NEWER_GEMMA = {
    "rope_theta": None,
    "rope_scaling": None,
    "rope_local_base_freq": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 200_000.0, "factor": 4.0},
    },
}
ALL_FULL = {
    "sliding_window": NULL,
    "sliding_window_pattern": NULL,
    "layer_types": ["full_attention"] * 4,
}
VARIANTS = [
    ("llama", NEWER_LLAMA),
    ("gemma3", NEWER_GEMMA),
    ("exaone4", ALL_FULL),
    ("llama", {"rope_scaling": LLAMA3}),
    ("llama", {"rope_traditional": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("llama", {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": W}),
    ("gemma3_text", {"sliding_window_pattern": 2}),
    ("olmo3", {"layer_types": ["full_attention", *["sliding_attention"] * 3]}),
]


@pytest.mark.parametrize(("arch", "changes"), VARIANTS, ids=lambda value: str(value)[:40])
def test_settings_mean_to_the_engine_what_they_mean_to_the_oracle(
    arch: str, changes: dict[str, object], tmp_path: Path
) -> None:
    folder = edited(tmp_path / "m", ModelCase(arch, "float16", HEAD), changes)
    model, oracle = engine.load_model(folder), oracle_of(folder)
    assert dataclasses.replace(model.layout, encoding=Encoding.F32LE) == oracle.layout()
    expected = oracle.new_session().append(IDS)
    for length in (1, W, W + 1, 5 * W + 3):
        assert distance(model, expected, length) < BOUNDS[Encoding.F16LE]
