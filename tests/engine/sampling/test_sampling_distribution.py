"""Each step of the distribution against the definition, written down naively; ties; statistics."""

from __future__ import annotations

import math
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from engine.logits import Logits
from engine.sampling import Distribution, SamplingParameters, distribution
from engine.sampling_state import SamplerState
from kvpack.errors import LimitError
from kvpack.layout import Encoding


def logits_of(values: list[float]) -> Logits:
    return Logits(Encoding.F32LE, np.array(values, "<f4").tobytes())


def naive(values: list[float], p: SamplingParameters, history: list[int]) -> dict[int, float]:
    """The documented order of operations, token by token, without an array in sight."""
    scores = {token: float(np.float32(value)) for token, value in enumerate(values)}
    window = history[-p.history_tokens :] if p.history_tokens else []
    for token, count in Counter(window).items():
        score = scores[token]
        score = score / p.repetition_penalty if score > 0 else score * p.repetition_penalty
        scores[token] = score - p.presence_penalty - p.frequency_penalty * count
    for token, value in p.logit_bias:
        scores[token] += value
    top = max(scores.values())
    if p.temperature == 0:
        return {min(token for token, score in scores.items() if score == top): 1.0}
    ranked = sorted(scores, key=lambda token: (-scores[token], token))
    ranked = ranked[: p.top_k or len(ranked)]
    shares = {token: math.exp((scores[token] - top) / p.temperature) for token in ranked}
    total = sum(shares.values())
    kept, mass = [], 0.0
    for token in ranked:
        if p.top_p < 1 and mass >= p.top_p:
            break
        kept.append(token)
        mass += shares[token] / total
    most = max(shares[token] for token in kept)
    kept = [token for token in kept if shares[token] >= p.min_p * most]
    total = sum(shares[token] for token in kept)
    return {token: shares[token] / total for token in kept}


#: Steps of an eighth: sums and products are exact, so naive and array code cannot part at an edge.
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    values=LOGITS,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.1, 0.35, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition=st.sampled_from([0.5, 1.0, 2.0]),
    presence=st.sampled_from([-1.0, 0.0, 0.5]),
    frequency=st.sampled_from([-0.5, 0.0, 0.25]),
    window=st.integers(0, 5),
    data=st.data(),
)
def test_agrees_with_the_definition(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float,
    repetition: float, presence: float, frequency: float, window: int, data: st.DataObject,
) -> None:  # fmt: skip
    token = st.integers(0, len(values) - 1)
    bias = data.draw(st.dictionaries(token, st.integers(-16, 16).map(lambda n: n / 8), max_size=3))
    parameters = SamplingParameters(
        temperature, top_k, top_p, min_p, repetition, presence, frequency, window,
        tuple(sorted(bias.items())),
    )  # fmt: skip
    history = data.draw(st.lists(token, max_size=8))
    expected = naive(values, parameters, history)
    found = distribution(np.array(values, np.float32), parameters, history)

    assert found.ids.tolist() == sorted(expected)
    for index, probability in zip(found.ids.tolist(), found.probabilities.tolist(), strict=True):
        assert probability == pytest.approx(expected[index], rel=1e-12)


def test_ties_go_to_the_lower_id() -> None:
    level = np.zeros(6, np.float32)

    def ids(**parameters: float) -> list[int]:
        return distribution(level, SamplingParameters(**parameters), []).ids.tolist()  # type: ignore[arg-type]

    assert ids(temperature=0.0) == [0]
    assert ids(top_k=2) == [0, 1]
    assert ids(top_p=0.5) == [0, 1, 2]
    # Above an edge everything stays, at it the lowest ids do.
    mixed = np.array([1, 3, 1, 2, 1, 3], np.float32)
    assert distribution(mixed, SamplingParameters(top_k=4), []).ids.tolist() == [0, 1, 3, 5]


def test_a_large_vocabulary_keeps_what_a_full_sort_keeps() -> None:
    """Most of its tokens are left out of the sort; which stay must not depend on that."""
    noise = np.random.default_rng(11).normal(size=20_000).astype("<f2").astype(np.float32)
    for spread in (0.01, 1.0, 3.0, 30.0):
        values = noise * np.float32(spread)
        shares = np.exp(values.astype(np.float64) - float(values.max()))
        shares = shares / shares.sum()
        order = np.lexsort((np.arange(values.size), -shares))
        masses = np.cumsum(shares[order])
        for top_p in (0.05, 0.5, 0.95, 0.999, 1 - 1e-9):
            found = distribution(values, SamplingParameters(top_p=top_p), [])
            expected = order[: int((masses < top_p).sum()) + 1]
            assert found.ids.tolist() == sorted(expected.tolist())


def test_extremes_give_distributions_and_not_numbers() -> None:
    values = np.array([1.0, 2.0, -np.inf, 65504.0], np.float32)
    for temperature in (1e-300, 1e-9, 1.0, 100.0):
        found = distribution(values, SamplingParameters(temperature=temperature), [])
        assert np.isfinite(found.probabilities).all()
        assert found.probability(2) == 0.0
        assert found.probabilities.sum() == pytest.approx(1.0)
    cold = distribution(values, SamplingParameters(temperature=1e-300), [])
    assert cold.probability(3) == 1.0
    assert cold.token_at(1 - 2**-53) == 3


@pytest.mark.parametrize("broken", [np.nan, np.inf, None])
def test_logits_without_a_largest_value_are_refused(broken: float | None) -> None:
    values = np.full(4, -np.inf, np.float32)
    if broken is not None:
        values = np.array([0, broken, 1, 2], np.float32)
    with pytest.raises(LimitError, match="logits"):
        distribution(values, SamplingParameters(), [])


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf},
        {"top_k": -1}, {"top_k": 1.5}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan},
        {"min_p": -0.1}, {"min_p": 1.1}, {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf}, {"presence_penalty": math.nan},
        {"frequency_penalty": -101.0}, {"penalty_window_tokens": 4097},
        {"penalty_window_tokens": -1}, {"logit_bias": ((3, 101.0),)},
        {"logit_bias": ((-1, 1.0),)}, {"logit_bias": ((4, 1.0), (3, 1.0))},
        {"logit_bias": ((3, 1.0), (3, 2.0))}, {"logit_bias": ((3, math.nan),)},
        {"logit_bias": tuple((i, 0.0) for i in range(1025))},
    ],
    ids=repr,
)  # fmt: skip
def test_parameters_outside_their_range_are_refused_by_name(parameters: dict[str, float]) -> None:
    with pytest.raises(LimitError, match=f"sampling.{next(iter(parameters))}"):
        SamplingParameters(**parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["logit_bias", "history"])
def test_ids_outside_the_vocabulary_are_refused(field: str) -> None:
    bias = ((9, 1.0),) if field == "logit_bias" else ()
    parameters = SamplingParameters(logit_bias=bias, presence_penalty=1.0)
    with pytest.raises(LimitError, match="token_id"):
        distribution(np.zeros(9, np.float32), parameters, [] if bias else [9])


def test_residual_takes_off_and_renormalises() -> None:
    target = Distribution(np.array([1, 3, 5]), np.array([0.5, 0.3, 0.2]))
    draft = Distribution(np.array([3, 4, 5]), np.array([0.1, 0.6, 0.3]))

    left = target.without(draft)

    assert left.ids.tolist() == [1, 3, 5]
    assert left.probabilities.tolist() == pytest.approx([0.5 / 0.7, 0.2 / 0.7, 0.0])
    assert target.without(target) is target
    assert left.token_at(1 - 2**-53) == 3, "a token of probability zero has no interval"


def test_samples_are_distributed_as_the_distribution_says() -> None:
    """Chi-square with a fixed seed: 7 degrees of freedom, 0.1 % of all seeds would be above."""
    values = [1.5, 0.0, 0.75, -1.0, 2.0, 0.25, -0.5, 1.0, -30.0]
    state = SamplerState.begin(SamplingParameters(temperature=0.9, top_k=8), seed=20_261_129)
    logits, draws = logits_of(values), 20_000
    expected = state.distribution(logits)
    counts: Counter[int] = Counter()
    for _ in range(draws):
        token, state = state.choose(logits)
        counts[token] += 1

    assert set(counts) <= set(expected.ids.tolist())
    statistic = sum(
        (counts[token] - draws * p) ** 2 / (draws * p)
        for token, p in zip(expected.ids.tolist(), expected.probabilities.tolist(), strict=True)
    )
    assert statistic < 24.3
