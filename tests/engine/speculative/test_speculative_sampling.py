"""Speculation at a temperature: the target's distribution comes out, whatever the draft says."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from speculative_support import (
    NETWORK,
    CountingNetwork,
    begun,
    counting_layout,
    prompt,
    tokens_of,
)

from engine.draft import ModelDraft, PromptLookup, Proposal
from engine.generation import Generation
from engine.logits import Logits
from engine.sampling import Distribution, SamplingParameters
from engine.sampling_state import SamplerState
from engine.speculative import Round, speculate, speculative_rounds
from engine.speculative_report import SpeculationCounts
from engine.speculative_rule import verify
from kvpack.errors import LimitError
from kvpack.layout import Encoding

#: Chi-square that 0.1 % of all seeds would exceed, by degrees of freedom.
CRITICAL = {4: 18.47, 5: 20.52, 24: 51.18, 35: 66.62}

ROUNDS = 8000


def logits_of(values: list[float]) -> Logits:
    return Logits(Encoding.F32LE, np.array(values, "<f4").tobytes())


TARGET = [logits_of([0.5, 1.0, -0.5, 0.0, 2.0, -1.0]), logits_of([1.0, 0.0, 0.5, 1.5, -2.0, 0.2])]
DRAFTS = {
    "model": [
        logits_of([1.5, 0.0, 0.5, -1.0, 0.3, 0.0]),
        logits_of([0.0, 2.0, 0.0, 0.0, 1.0, -3.0]),
    ],
    "same": TARGET,
    # All its mass where the target has little.
    "opposite": [logits_of([-2.0, -2.0, 0.5, -1.0, -9.0, 3.0]), logits_of([-9, -9, -9, -9, 4, -9])],
}


def draft_by_model(logits: list[Logits], state: SamplerState) -> Proposal:
    said, choices = [], []
    for one in logits:
        choices.append(state.distribution(one))
        token, state = state.draw(choices[-1])
        said.append(token)
    return Proposal(tuple(said), tuple(choices), state.stream)


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    draws = sum(counts.values())
    assert set(counts) <= set(expected)
    return sum((counts[key] - draws * p) ** 2 / (draws * p) for key, p in expected.items())


@pytest.mark.parametrize("kind", [*DRAFTS, "lookup"])
@pytest.mark.parametrize("top_k", [0, 5])
def test_what_comes_out_is_distributed_as_the_target_alone(kind: str, top_k: int) -> None:
    """First tokens, and pairs where the first was accepted or the block brought two anyway."""
    parameters = SamplingParameters(temperature=0.8, top_k=top_k)
    state = SamplerState.begin(parameters, seed=17)
    after = logits_of([0.0] * 6)
    first = dict_of(state.distribution(TARGET[0]))
    second = dict_of(state.distribution(TARGET[1]))
    firsts: Counter[tuple[int, ...]] = Counter()
    seconds: Counter[tuple[int, ...]] = Counter()
    for number in range(ROUNDS):
        if kind == "lookup":
            said = (number % 6, (number // 6) % 6)
            proposal = Proposal(said, tuple(map(Distribution.point, said)), state.stream)
        else:
            proposal = draft_by_model(DRAFTS[kind], state)
        verdict = verify(proposal, [*TARGET, after], state)
        state = verdict.sampler
        firsts[verdict.token_ids[:1]] += 1
        if len(verdict.token_ids) > 1:
            seconds[verdict.token_ids[1:2]] += 1

    freedom = len(first) - 1
    assert chi_square(firsts, first) < CRITICAL[freedom]
    assert sum(seconds.values()) > ROUNDS // 50
    assert chi_square(seconds, second) < CRITICAL[freedom]


def dict_of(choices: Distribution) -> dict[tuple[int, ...], float]:
    pairs = zip(choices.ids.tolist(), choices.probabilities.tolist(), strict=True)
    return {(token,): p for token, p in pairs}


def test_a_token_the_target_never_says_is_never_kept() -> None:
    target = logits_of([0.0, 0.0, -np.inf])
    state = SamplerState.begin(SamplingParameters(), seed=3)
    for _ in range(200):
        proposal = Proposal((2,), (Distribution.point(2),), state.stream)
        verdict = verify(proposal, [target, target], state)
        state = verdict.sampler
        assert verdict.token_ids[0] in (0, 1)
        assert verdict.accepted_tokens == 0


def test_a_draft_equal_to_the_target_is_always_kept_at_any_temperature() -> None:
    ids = prompt(20)
    sampler = SamplerState.begin(SamplingParameters(temperature=1.3, top_p=0.9), seed=8, prompt=ids)
    target, draft = begun(NETWORK, ids), ModelDraft(NETWORK.new_generation)
    rounds = list(speculative_rounds(target, draft, ids, sampler, draft_tokens=5, tokens_max=300))
    assert SpeculationCounts.of(rounds).acceptance == 1.0
    assert len(set(tokens_of(rounds))) > 20


def test_a_wrong_number_of_logits_is_refused() -> None:
    proposal = Proposal((1,), (Distribution.point(1),), SamplerState.greedy().stream)
    with pytest.raises(LimitError, match="expected 2 positions, found 1"):
        verify(proposal, TARGET[:1], SamplerState.greedy())


@pytest.mark.parametrize("draft_is_model", [True, False])
@pytest.mark.parametrize("cut", [1, 7, 24])
def test_restored_between_rounds_the_same_stream_goes_on(draft_is_model: bool, cut: int) -> None:
    """Sampler by its bytes, target by its rows; the draft, if any, computes itself anew."""
    network = CountingNetwork(counting_layout(), sharpness=3.0)
    other = CountingNetwork(counting_layout(), multiplier=8, sharpness=3.0)
    ids = prompt(21)
    begin = SamplerState.begin(SamplingParameters(temperature=0.7), seed=5, prompt=ids)

    def rounds(
        target: Generation, known: list[int], state: SamplerState, number: int
    ) -> list[Round]:
        draft = ModelDraft(other.new_generation) if draft_is_model else PromptLookup()
        known, done = list(known), []
        for _ in range(number):
            done.append(speculate(target, draft, known, state, draft_tokens=4))
            known += done[-1].token_ids
            state = done[-1].sampler
        return done

    whole = rounds(begun(network, ids), ids, begin, 25)
    head = rounds(begun(network, ids), ids, begin, cut)
    known = [*ids, *tokens_of(head)]
    moved = SamplerState.from_bytes(head[-1].sampler.to_bytes())
    tail = rounds(begun(network, known), known, moved, 25 - cut)

    assert tokens_of(head) + tokens_of(tail) == tokens_of(whole)
    assert tail[-1].sampler == whole[-1].sampler
    counts = SpeculationCounts.of(whole)
    assert counts.accepted_tokens < counts.proposed_tokens
    assert counts.accepted_tokens > 0 or not draft_is_model
