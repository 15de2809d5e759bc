"""The oracle against mlx-lm's own networks in float32: same weights, two codes, one result.

The bound is absolute, on every logit of every position. Found on x86-64: at most 2.3e-5 (gemma3,
whose logits here reach 70), at most 1e-5 for all others.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from oracle_cases import ARCHITECTURES, Case, make_case, reference_logits, token_ids

BOUND = 1e-4
WINDOWS = (8, 16)

case_of = functools.cache(make_case)


def lengths(window: int) -> list[int]:
    """Around one window, around two, and well past the wrap."""
    near_one = range(window - 2, window + 3)
    near_two = range(2 * window - 1, 2 * window + 2)
    return [1, *near_one, *near_two, 5 * window + 3]


def difference(case: Case, calls: list[int]) -> float:
    """Largest difference over all positions when both compute in calls of these sizes."""
    ids = token_ids(sum(calls))
    session = case.oracle().new_session()
    parts, start = [], 0
    for size in calls:
        parts.append(session.append(ids[start : start + size]))
        start += size
    return float(np.abs(np.concatenate(parts) - reference_logits(case, ids, calls)).max())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_of_one_call_agree(architecture: str, window: int) -> None:
    case = case_of(architecture, window)
    for length in lengths(window):
        assert difference(case, [length]) < BOUND, f"{length} tokens"


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_agree_through_the_reference_s_ring(architecture: str, window: int) -> None:
    """Chunks that cross the wrap and single steps: the reference overwrites, the oracle masks."""
    case = case_of(architecture, window)
    assert difference(case, [window - 1, 3, window + 2, 1, 1, 2 * window, 1]) < BOUND
    assert difference(case, [1] * (2 * window + 3)) < BOUND


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_bound_is_far_below_what_a_wrong_window_would_show(architecture: str) -> None:
    """The tests above can fail: one more visible key moves logits by far more than the bound."""
    if architecture == "llama":
        wrong, right = case_of(architecture, 8), make_case(architecture, 8, seed=8)
    else:
        wrong, right = case_of(architecture, 9), case_of(architecture, 8)
    ids = token_ids(30)
    moved = np.abs(wrong.oracle().new_session().append(ids) - reference_logits(right, ids))
    assert moved.max() > 100 * BOUND


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_calls_of_any_size_give_one_result(architecture: str) -> None:
    """Chunked equals whole to 1e-5: only the order inside float64 sums differs."""
    model = case_of(architecture, 8).oracle()
    ids = token_ids(43)
    whole = model.new_session().append(ids)
    for calls in ([43], [1] * 43, [7, 8, 9, 19], [40, 3]):
        session, parts, start = model.new_session(), [], 0
        for size in calls:
            parts.append(session.append(ids[start : start + size]))
            start += size
        assert np.abs(np.concatenate(parts) - whole).max() < 1e-5, calls


def test_a_call_longer_than_a_query_block_gives_one_result() -> None:
    """Queries are computed in blocks of 256; the seam must not show."""
    model = case_of("muse_glimmer", 16).oracle()
    ids = token_ids(530)
    session = model.new_session()
    stepwise = np.concatenate([session.append(ids[at : at + 53]) for at in range(0, 530, 53)])
    assert np.abs(model.new_session().append(ids) - stepwise).max() < 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_grouping_of_heads_agrees(architecture: str) -> None:
    """One key head per query head, and one for all: the grouping of heads is right at both ends."""
    heads = 6
    for kv_heads in (1, heads):
        case = make_case(architecture, 8, seed=3, changes={"num_key_value_heads": kv_heads})
        assert difference(case, [29]) < BOUND


def test_a_llama_with_sliding_layers_agrees() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    case = make_case("llama", 8, changes={"layer_types": kinds, "rope_traditional": True})
    assert difference(case, [43]) < BOUND
    assert difference(case, [11] * 3) < BOUND


@pytest.mark.parametrize("architecture", ["llama", "olmo3"])
def test_projection_biases_agree(architecture: str) -> None:
    changes = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    assert difference(make_case(architecture, 8, changes=changes), [21]) < BOUND


def test_cohere2_biases_agree() -> None:
    changes = {"attention_bias": True, "layer_norm_bias": True}
    assert difference(make_case("cohere2", 8, changes=changes), [21]) < BOUND
