"""Our planes against mlx-lm's own caches: same network, same tokens.

Prefill calls agree bit for bit always, because a chunk reads the same span either way; decode too,
until a ring has wrapped. From there on our ring is rotated by its origin and theirs by its history,
sums run in another order, and only a tolerance can be promised.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine_support import HEAD, TOKEN, ModelCase, tokens
from mlx_lm.models.cache import make_prompt_cache
from test_engine_window import network_of

import engine
from engine import Model

W = 16
CASES = [
    ModelCase("muse_glimmer", "float16", HEAD, window=W),
    ModelCase("muse_glimmer", "bfloat16", TOKEN, window=W),
    ModelCase("cohere2", "float16", HEAD, window=W),
    ModelCase("exaone4", "bfloat16", HEAD, window=W),
    ModelCase("afmoe", None, TOKEN, window=W),
]
TOLERANCE = {"float16": 0.06, "bfloat16": 0.5, None: 1e-3}
Load = Callable[[ModelCase], Model]
ALL_CASES = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)


def logits_of(network: object, caches: list, ids: list[int]) -> np.ndarray:
    out = network(mx.array([ids]), cache=caches)[0]
    return np.array(out.astype(mx.float32))


@ALL_CASES
def test_prefill_chunks_are_bitwise_equal(case: ModelCase, load: Load) -> None:
    model = load(case)
    network, ours = network_of(model), model.new_generation()._caches
    theirs = make_prompt_cache(network)
    ids, done = tokens(8 * W), 0
    for size in (5, W - 5, 3, W + 1, 2 * W, 2, 9):
        chunk = ids[done : done + size]
        left, right = (logits_of(network, caches, chunk) for caches in (ours, theirs))
        assert np.array_equal(left, right), f"chunk of {size} at {done}"
        done += size


@ALL_CASES
def test_decode_is_bitwise_equal_before_the_wrap_and_close_after(
    case: ModelCase, load: Load
) -> None:
    model = load(case)
    network, ours = network_of(model), model.new_generation()._caches
    theirs = make_prompt_cache(network)
    for position, token in enumerate(tokens(3 * W)):
        left, right = (logits_of(network, caches, [token]) for caches in (ours, theirs))
        if position < W:
            assert np.array_equal(left, right), position
        assert np.abs(left - right).max() <= TOLERANCE[case.dtype], position


@ALL_CASES
def test_decode_after_a_prefill_is_close(case: ModelCase, load: Load) -> None:
    model = load(case)
    network, ours = network_of(model), model.new_generation()._caches
    theirs = make_prompt_cache(network)
    for caches in (ours, theirs):
        logits_of(network, caches, tokens(2 * W + 5))
    for token in tokens(2 * W, salt=2):
        left, right = (logits_of(network, caches, [token]) for caches in (ours, theirs))
        assert np.abs(left - right).max() <= TOLERANCE[case.dtype]


def test_positions_are_right_whichever_layer_comes_first(load: Load) -> None:
    """Layer 0 of muse_glimmer slides; nothing derives the position from its row count."""
    for case in (CASES[0], ModelCase("exaone4", None, HEAD, window=W)):
        model = load(case)
        generation = model.new_generation()
        generation.prefill(tokens(3 * W + 7))
        assert generation.position == generation.schedule.position == 3 * W + 7
        assert {cache.offset for cache in generation._caches} == {3 * W + 7}
        assert generation.snapshot(tokens(3 * W + 7)).position == 3 * W + 7


def test_position_is_right_when_layer_0_is_full(
    tmp_path: Path, model_folder: Callable[[ModelCase], Path]
) -> None:
    folder = tmp_path / "full-first"
    shutil.copytree(model_folder(CASES[0]), folder)
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["full_attention", *["sliding_attention"] * 3]
    (folder / "config.json").write_text(json.dumps(config))
    model = engine.load_model(folder)
    assert [layer.window_tokens for layer in model.layout.layers] == [None, W, W, W]
    generation = model.new_generation()
    generation.prefill(tokens(3 * W + 7))
    assert generation.position == 3 * W + 7
    assert {cache.offset for cache in generation._caches} == {3 * W + 7}
