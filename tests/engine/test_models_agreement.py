"""Our planes against mlx-lm's own caches, for hybrids whose full layers rotate and plain models.

As in ``test_engine_agreement.py``: prefill calls agree bit for bit always, decode until a ring has
wrapped, and close from there on, where the two rings are rotated differently.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from engine_support import ModelCase, tokens
from mlx_lm.models.cache import make_prompt_cache
from models_support import CASES, label, network_of

from engine import Model
from kvpack.layout import LayerKind

W = 8
TOLERANCE = {"float16": 0.06, "bfloat16": 0.5, None: 1e-3}
Load = Callable[[ModelCase], Model]
ALL_CASES = pytest.mark.parametrize("case", CASES, ids=label)


def logits_of(network: object, caches: list, ids: list[int]) -> np.ndarray:
    return np.array(network(mx.array([ids]), cache=caches)[0].astype(mx.float32))


@ALL_CASES
def test_prefill_chunks_are_bitwise_equal(case: ModelCase, load: Load) -> None:
    """Every span is in logical order on both sides, whatever the chunk's place and width."""
    model = load(case)
    network, ours = network_of(model), model.new_generation()._caches
    theirs, done = make_prompt_cache(network), 0
    for size in (5, W - 5, 3, W + 1, 2 * W, 2, 9, 4 * W):
        chunk = tokens(done + size)[done:]
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
    never_wraps = all(layer.kind is LayerKind.FULL for layer in model.layout.layers)
    for position, token in enumerate(tokens(3 * W)):
        left, right = (logits_of(network, caches, [token]) for caches in (ours, theirs))
        if position < W or never_wraps:
            assert np.array_equal(left, right), position
        assert np.abs(left - right).max() <= TOLERANCE[case.dtype], position


@ALL_CASES
def test_decode_after_a_prefill_past_the_wrap_is_close(case: ModelCase, load: Load) -> None:
    model = load(case)
    network, ours = network_of(model), model.new_generation()._caches
    theirs = make_prompt_cache(network)
    for caches in (ours, theirs):
        logits_of(network, caches, tokens(2 * W + 5))
    for token in tokens(2 * W, salt=2):
        left, right = (logits_of(network, caches, [token]) for caches in (ours, theirs))
        assert np.abs(left - right).max() <= TOLERANCE[case.dtype]
