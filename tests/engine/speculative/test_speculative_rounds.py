"""The loop over a network whose logits are exact: what comes out is what plain decoding says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from speculative_support import (
    CONTEXT,
    NETWORK,
    VOCAB,
    WINDOW,
    CountingNetwork,
    ScriptedDraft,
    begun,
    counting_layout,
    prompt,
    tokens_of,
)

from engine.draft import ModelDraft, PromptLookup
from engine.logits import Logits
from engine.sampling import SamplingParameters
from engine.sampling_state import SamplerState
from engine.speculative import LivePair, speculate, speculative_rounds
from engine.speculative_report import Agreement, SpeculationCounts, plain_tokens
from kvpack.errors import LayoutMismatchError, LimitError
from kvpack.identity import CallRun, CallSchedule

GREEDY = SamplerState.greedy()


def plain(network: CountingNetwork, ids: Sequence[int], count: int, **kwargs: object) -> list[int]:
    return plain_tokens(begun(network, ids), ids[-1], GREEDY, tokens_max=count, **kwargs)  # type: ignore[arg-type]


def test_a_draft_that_is_the_target_is_always_right() -> None:
    """2,000 tokens: a draft that fell behind by one a round would decay long before."""
    ids = prompt(30)
    target, draft = begun(NETWORK, ids), ModelDraft(NETWORK.new_generation)
    rounds = []
    for one in speculative_rounds(target, draft, ids, GREEDY, draft_tokens=7, tokens_max=2000):
        rounds.append(one)
        assert one.accepted_tokens == one.proposed_tokens
        assert draft.generation.position == target.position

    counts = SpeculationCounts.of(rounds)
    assert counts == SpeculationCounts(250, 1750, 1750, 2000)
    assert counts.acceptance == 1.0
    assert tokens_of(rounds) == plain(NETWORK, ids, 2000)


@pytest.mark.parametrize("start", [1, WINDOW - 1, WINDOW, WINDOW + 2, 3 * WINDOW])
@pytest.mark.parametrize("count", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 15])
def test_a_draft_that_is_wrong_at_every_place(start: int, count: int) -> None:
    ids = prompt(start)
    truth = plain(NETWORK, ids, 40)
    for wrong_at in range(count + 1):
        target, draft = begun(NETWORK, ids), ScriptedDraft(truth, start, wrong_at)
        rounds = list(
            speculative_rounds(target, draft, ids, GREEDY, draft_tokens=count, tokens_max=24)
        )
        assert tokens_of(rounds) == truth[:24]
        assert target.position == start - 1 + 24
        first = rounds[0]
        assert (first.accepted_tokens, len(first.token_ids)) == (wrong_at, wrong_at + 1)


@pytest.mark.parametrize("multiplier", [7, 8, 11])
def test_another_model_as_draft_changes_the_rate_and_not_the_tokens(multiplier: int) -> None:
    ids = prompt(20)
    target, other = begun(NETWORK, ids), CountingNetwork(counting_layout(), multiplier)
    draft = ModelDraft(other.new_generation)
    rounds = []
    for one in speculative_rounds(target, draft, ids, GREEDY, draft_tokens=4, tokens_max=200):
        rounds.append(one)
        assert draft.generation.position == target.position
    assert tokens_of(rounds) == plain(NETWORK, ids, 200)
    assert (SpeculationCounts.of(rounds).acceptance == 1.0) == (multiplier == 7)


def test_the_schedule_says_what_was_computed_in_which_call() -> None:
    ids = prompt(9)
    truth = plain(NETWORK, ids, 30)
    target = begun(NETWORK, ids)
    known = list(ids)
    for wrong_at in (2, 2, 4, 9):
        draft = ScriptedDraft(truth, 9, wrong_at)
        known += speculate(target, draft, known, GREEDY, draft_tokens=4).token_ids
    known += speculate(target, draft, known, GREEDY, draft_tokens=0).token_ids

    assert target.schedule == CallSchedule(
        (CallRun(8, 1), CallRun(5, 2, 2), CallRun(5, 2), CallRun(1, 1))
    )
    assert target.schedule.position == target.position == len(known) - 1


def test_rounds_end_at_the_budget_a_stop_token_and_the_context() -> None:
    ids = prompt(20)
    truth = plain(NETWORK, ids, 60)
    for budget in (1, 2, 3, 17):
        target = begun(NETWORK, ids)
        draft = ScriptedDraft(truth, 20, 99)
        rounds = list(
            speculative_rounds(target, draft, ids, GREEDY, draft_tokens=15, tokens_max=budget)
        )
        assert tokens_of(rounds) == truth[:budget]

    stop = truth[10]
    end = truth.index(stop) + 1
    for wrong_at in (0, 3, 99):
        target, draft = begun(NETWORK, ids), ScriptedDraft(truth, 20, wrong_at)
        rounds = list(
            speculative_rounds(
                target, draft, ids, GREEDY, draft_tokens=6, tokens_max=60, stop_ids={stop}
            )
        )
        assert tokens_of(rounds) == truth[:end] == plain(NETWORK, ids, 60, stop_ids={stop})
        # Like every last token, the one that ends the text is known and not computed.
        assert target.position == 20 - 1 + end


@pytest.mark.parametrize("count", [1, 5, 6, 15])
def test_rounds_fill_the_context_to_its_last_row(count: int) -> None:
    ids = prompt(20)
    small = CountingNetwork(counting_layout(context=33))
    truth = plain(small, ids, 60)
    target, draft = begun(small, ids), ScriptedDraft(truth, 20, 99)
    rounds = list(speculative_rounds(target, draft, ids, GREEDY, draft_tokens=count, tokens_max=60))
    assert tokens_of(rounds) == truth
    assert target.position == 33


def test_a_draft_that_is_ahead_or_behind_comes_to_the_target() -> None:
    """Ahead it cannot be rewound, so it begins again; behind it computes what it has not seen."""
    ids = prompt(20)
    for stands_at in (0, 5, 19, 25):
        target = begun(NETWORK, ids)
        draft = ModelDraft(NETWORK.new_generation, begun(NETWORK, prompt(stands_at + 1)))
        one = speculate(target, draft, ids, GREEDY, draft_tokens=5)
        assert one.accepted_tokens == one.proposed_tokens == 5
        assert draft.generation.position == target.position == 25


def test_a_stop_token_leaves_the_sampler_where_plain_decoding_would() -> None:
    parameters = SamplingParameters(temperature=0.0, repetition_penalty=1.2)
    sampler = SamplerState.begin(parameters, seed=1, prompt=prompt(20))
    ids = prompt(20)
    truth = plain_tokens(begun(NETWORK, ids), ids[-1], sampler, tokens_max=9)
    draft = ScriptedDraft(truth, 20, 99)
    one = speculate(begun(NETWORK, ids), draft, ids, sampler, draft_tokens=8, stop_ids={truth[4]})
    end = truth.index(truth[4]) + 1
    assert one.token_ids == tuple(truth[:end])
    assert one.sampler == sampler.observe(truth[:end])


def test_penalties_see_accepted_drafts_as_history() -> None:
    parameters = SamplingParameters(temperature=0.0, presence_penalty=3.0, penalty_window_tokens=9)
    ids = prompt(15)
    sampler = SamplerState.begin(parameters, seed=1, prompt=ids)
    truth = plain_tokens(begun(NETWORK, ids), ids[-1], sampler, tokens_max=120)
    draft = ModelDraft(NETWORK.new_generation)
    target = begun(NETWORK, ids)
    rounds = list(speculative_rounds(target, draft, ids, sampler, draft_tokens=5, tokens_max=120))

    assert tokens_of(rounds) == truth
    assert SpeculationCounts.of(rounds).acceptance == 1.0
    assert truth != plain(NETWORK, ids, 120)


def test_lookup_proposes_what_followed() -> None:
    def said(ids: list[int], count: int, **kwargs: int) -> tuple[int, ...]:
        return PromptLookup(**kwargs).propose(ids, count, GREEDY).token_ids

    assert said([1, 2, 3, 4, 9, 1, 2, 3], 2) == (4, 9)
    assert said([1, 2, 3, 4, 9, 1, 2, 3], 9) == (4, 9, 1, 2, 3)
    # The latest occurrence that is followed by enough, else the one followed by most.
    assert said([5, 6, 5, 7, 5, 8, 5], 1, ngram_max=1) == (8,)
    assert said([5, 5, 5, 5], 3) == (5,)
    assert said([5, 5, 5, 5], 3, ngram_max=1) == (5, 5, 5)
    # The longest run decides.
    assert said([1, 2, 7, 9, 2, 8, 1, 2], 1) == (7,)
    assert said([1, 2, 3], 4) == ()
    assert said([1], 4) == ()
    assert said([1, 1], 0) == ()
    assert said([1, 2, 1, 9, 9, 9, 1], 1, lookup_tokens=4) == ()


@pytest.mark.parametrize(
    "numbers",
    [{"ngram_min": 0}, {"ngram_max": 17}, {"ngram_min": 4}, {"lookup_tokens": 1 << 17}],
    ids=repr,
)
def test_lookups_outside_their_caps_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(LimitError, match="lookup"):
        PromptLookup(**numbers)


def test_lookup_in_a_text_that_repeats_is_worth_it() -> None:
    network = CountingNetwork(counting_layout(), multiplier=0)
    ids = prompt(12)
    target = begun(network, ids)
    rounds = list(
        speculative_rounds(target, PromptLookup(), ids, GREEDY, draft_tokens=8, tokens_max=300)
    )
    assert tokens_of(rounds) == plain(network, ids, 300)
    counts = SpeculationCounts.of(rounds)
    assert counts.rounds < 100
    assert counts.accepted_tokens > 200


def test_a_pair_stands_at_one_position() -> None:
    target, draft = begun(NETWORK, prompt(9)), begun(NETWORK, prompt(8))
    with pytest.raises(LayoutMismatchError, match=r"draft\.position: expected 8, found 7"):
        LivePair(target, draft)
    draft.prefill(prompt(8)[-1:])
    assert LivePair(target, draft).draft is draft
    assert LivePair(target).draft is None


@pytest.mark.parametrize("count", [-1, 16])
def test_more_than_a_block_can_hold_is_refused(count: int) -> None:
    target = begun(NETWORK, prompt(9))
    for draft in (ModelDraft(NETWORK.new_generation), PromptLookup()):
        with pytest.raises(LimitError, match=r"draft\.tokens: expected 0 to 15 tokens"):
            speculate(target, draft, prompt(9), GREEDY, draft_tokens=count)
        with pytest.raises(LimitError, match=r"draft\.tokens"):
            draft.propose(prompt(9), count, GREEDY)


@pytest.mark.parametrize("count", [8, 10])
def test_tokens_and_cache_must_agree(count: int) -> None:
    with pytest.raises(LayoutMismatchError, match="token_ids: expected 9 ids"):
        speculate(begun(NETWORK, prompt(9)), PromptLookup(), prompt(count), GREEDY, draft_tokens=2)


def test_a_schedule_that_fills_up_is_left_to_plain_steps() -> None:
    """Every block that drops rows may take a run; a session must never end for lack of one."""
    ids = prompt(20)
    target = begun(NETWORK, ids)
    runs = (CallRun(1, 1), CallRun(2, 1)) * 30_000
    target._schedule = CallSchedule(runs)
    draft = ScriptedDraft(plain(NETWORK, ids, 40), 20, 99)
    one = speculate(target, draft, ids, GREEDY, draft_tokens=8)
    assert (one.proposed_tokens, len(one.token_ids)) == (0, 1)


def test_agreement_counts_places() -> None:
    assert Agreement.between([1, 2, 3, 4], [1, 9, 3]) == Agreement(3, 2, 1)
    assert Agreement.between([1, 2], [1, 2]) == Agreement(2, 2, None)
    assert Agreement.between([1, 2], [1, 2]).rate == Agreement.between([], []).rate == 1.0


def test_the_last_tokens_logits_come_with_the_round() -> None:
    ids = prompt(20)
    twin = begun(NETWORK, ids)
    truth, logits, token = [], [], ids[-1]
    for _ in range(12):
        logits.append(twin.step(token))
        token = logits[-1].argmax()
        truth.append(token)
    for wrong_at in (0, 2, 9):
        draft = ScriptedDraft(truth, 20, wrong_at)
        one = speculate(begun(NETWORK, ids), draft, ids, GREEDY, draft_tokens=6)
        expected: Logits = logits[len(one.token_ids) - 1]
        assert one.logits == expected


def test_the_exact_network_sees_its_window_and_no_more() -> None:
    """The other tests rest on this: calls of any size say the same, and rows out of place show."""
    ids = prompt(40)
    whole = begun(NETWORK, ids[:1])
    for first in range(0, 32, 16):
        whole.block(ids[first : first + 16])
    stepwise = begun(NETWORK, ids[:1])
    for token in ids[:32]:
        stepwise.step(token)
    assert whole.step(1).data == stepwise.step(1).data
    other = begun(NETWORK, [*ids[:31], (ids[31] + 1) % VOCAB, 1])
    assert other.step(1).data != begun(NETWORK, [*ids[:32], 1]).step(1).data
    assert NETWORK.layout.max_context_tokens == CONTEXT
