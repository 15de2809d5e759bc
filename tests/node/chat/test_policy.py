"""What is kept when a conversation is longer than its context (group H: our own definition)."""

from __future__ import annotations

import chat_support
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import LimitError
from node.chat.messages import Message, Role
from node.chat.policy import (
    Budget,
    Lineage,
    Plan,
    Policy,
    RawPlan,
    Refusal,
    lineage,
    plan,
    plan_raw,
)
from node.chat.turns import Conversation

_KINDS = st.sampled_from([Role.USER, Role.USER, Role.ASSISTANT, Role.ASSISTANT, Role.TOOL])
SPOKEN = st.lists(st.builds(Message, _KINDS, st.sampled_from("abc")), max_size=14)
LEADING = st.lists(st.builds(Message, st.just(Role.SYSTEM), st.sampled_from("xy")), max_size=2)
BUDGETS = st.builds(
    Budget,
    st.integers(1, 120),
    st.integers(0, 60),
    st.sampled_from(Policy),
    st.integers(0, 40),
)


def cost(messages) -> int:
    """Tokens of some messages: 3 for the answer's head, and as many as a message weighs."""
    weights = {"a": 2, "b": 9, "c": 17, "x": 4, "y": 11}
    return 3 + sum(weights[one.content] for one in messages)


def counts_of(parts: Conversation) -> list[int]:
    return [cost(parts.without(k)) for k in range(max(1, len(parts.turns)))]


@given(LEADING, SPOKEN)
def test_turns_are_the_conversation_in_parts(leading, spoken):
    parts = Conversation.of([*leading, *spoken])
    assert parts.without(0) == (*leading, *spoken)
    assert all(one.role.is_system for one in parts.leading)
    for index, turn in enumerate(parts.turns):
        users = [at for at, one in enumerate(turn) if one.role is Role.USER]
        # A turn has one user's message, its first; but the first turn may begin with a greeting.
        assert users == [0] if index else len(users) <= 1


@given(LEADING, SPOKEN, BUDGETS)
def test_what_is_kept_is_whole_newest_and_leaves_the_reserve(leading, spoken, budget):
    parts = Conversation.of([*leading, *spoken])
    counts = counts_of(parts)
    decided = plan(parts, counts, cost(parts.leading), budget)
    if isinstance(decided, Refusal):
        shiftable = budget.policy is Policy.SHIFT and counts[-1] <= budget.room
        assert not shiftable and counts[0] > budget.room
        assert decided.needed_tokens > budget.limit_tokens == decided.limit_tokens
        return
    assert decided.prompt_tokens == cost(decided.messages) <= budget.room
    assert decided.messages[: len(leading)] == tuple(leading)
    assert decided.messages == parts.without(decided.dropped_turns)
    assert decided.messages[len(leading) :] == tuple(spoken[decided.dropped_messages :])
    if counts[0] <= budget.room:
        assert decided.dropped_turns == 0
        return
    assert budget.policy is Policy.SHIFT and 1 <= decided.dropped_turns < len(parts.turns)
    # No turn was dropped that the room, in whole steps, had a place for.
    allowed = budget.kept_at_most(counts[0])
    assert budget.room - max(1, budget.step_tokens) < allowed <= budget.room
    assert counts[decided.dropped_turns - 1] > allowed


@given(LEADING, SPOKEN, st.integers(30, 90), st.integers(1, 40))
def test_in_steps_the_next_turns_begin_with_the_same_text(leading, spoken, limit, step):
    """A shift computes everything anew: it must not come with every turn."""
    budget = Budget(limit, 5, Policy.SHIFT, step)
    begins, lengths = [], []
    for end in range(1, len(spoken) + 1):
        parts = Conversation.of([*leading, *spoken[:end]])
        decided = plan(parts, counts_of(parts), 0, budget)
        # Where only the newest turn is left, fewer than a whole step may have been dropped.
        if isinstance(decided, Plan) and decided.dropped_turns < len(parts.turns) - 1:
            begins.append(decided.dropped_messages)
            lengths.append(cost(parts.without(0)))
    assert begins == sorted(begins)
    whole_steps = -(-max([0, *(length - budget.room for length in lengths)]) // step)
    assert len({begin for begin in begins if begin}) <= whole_steps


def test_a_system_message_after_the_first_turn_refuses_a_shift_and_nothing_else():
    late = (
        *chat_support.conversation("a", "b"),
        Message(Role.DEVELOPER, "x"),
        Message(Role.USER, "c"),
    )
    parts = Conversation.of(late)
    counts = counts_of(parts)
    assert isinstance(plan(parts, counts, 0, Budget(counts[0], 0)), Plan)
    refused = plan(parts, counts, 0, Budget(counts[0] - 1, 0))
    assert isinstance(refused, Refusal) and "messages[2] is a system message" in refused.text


def test_a_refusal_names_what_does_not_fit():
    parts = Conversation.of(chat_support.conversation("b", "b", "c", system="y"))
    counts = counts_of(parts)
    refused = plan(parts, counts, cost(parts.leading), Budget(30, 6))
    assert isinstance(refused, Refusal)
    assert refused.text == (
        "the context holds 30 tokens; the leading system content takes 14, the newest turn "
        "(messages[3] to [3]) takes 17 and 6 are reserved for the answer: what is always kept "
        "does not fit"
    )
    assert (refused.limit_tokens, refused.needed_tokens) == (30, 37)
    refused = plan(parts, counts, 0, Budget(30, 6, Policy.ERROR))
    whole = "the context holds 30 tokens; the messages take 49 and 6 are reserved for the answer"
    assert refused == Refusal(whole, 30, 55)
    refused = plan(parts, counts, 0, Budget(30, 30))
    assert isinstance(refused, Refusal) and "reserve of 30 leaves no room" in refused.text


def test_tool_results_stay_with_the_turn_that_asked_for_them():
    tool = Message(Role.TOOL, "a", tool_call_id="c")
    messages = (*chat_support.conversation("a", "a", "b", "a"), tool, Message(Role.ASSISTANT, "a"))
    parts = Conversation.of(messages)
    assert [len(turn) for turn in parts.turns] == [2, 4]
    decided = plan(parts, counts_of(parts), 0, Budget(cost(messages) - 1, 0))
    assert isinstance(decided, Plan) and decided.messages == messages[2:]


@given(st.integers(1, 300), st.integers(0, 90), BUDGETS)
def test_a_raw_prompt_keeps_its_beginning_and_its_end(length, prefix, budget):
    ids = list(range(length))
    decided = plan_raw(length, prefix, budget)
    if isinstance(decided, Refusal):
        assert length > budget.room
        assert budget.policy is Policy.ERROR or prefix >= budget.room
        assert decided.needed_tokens > budget.limit_tokens
        return
    taken = decided.take(ids)
    assert len(taken) == decided.prompt_tokens <= budget.room
    if length <= budget.room:
        assert taken == tuple(ids)
        return
    assert budget.policy is Policy.SHIFT
    assert taken[:prefix] == tuple(ids[:prefix]) and taken[-1] == length - 1
    assert taken[prefix:] == tuple(range(length - len(taken) + prefix, length))
    if not budget.step_tokens:
        assert len(taken) == budget.room


def test_a_raw_prompt_that_fits_is_taken_as_it_is():
    assert plan_raw(5, 9, Budget(5, 0)) == RawPlan(5, 5, 5)
    assert plan_raw(6, 2, Budget(5, 0)) == RawPlan(2, 3, 5)
    refused = plan_raw(6, 5, Budget(5, 0))
    assert isinstance(refused, Refusal) and "the prefix of 5 leaves no room" in refused.text


@given(LEADING, SPOKEN, SPOKEN, st.integers(0, 6))
def test_a_conversation_goes_on_from_what_was_retained(leading, spoken, new, dropped):
    parts = Conversation.of([*leading, *spoken])
    dropped = min(dropped, max(0, len(parts.turns) - 1))
    retained = parts.without(dropped)
    incoming = (*leading, *spoken, *new)
    found = lineage(retained, incoming)
    assert found is not None
    rest = incoming[len(leading) :]
    run = retained[len(leading) :]
    assert rest[found.dropped_messages :] == (*run, *found.new_messages)
    assert len(found.new_messages) <= len(new)


@given(LEADING, SPOKEN, LEADING, SPOKEN)
def test_another_conversation_does_not(leading, spoken, other_leading, other):
    retained, incoming = (*leading, *spoken), (*other_leading, *other)
    found = lineage(retained, incoming)
    rest = tuple(other)
    users = [index for index, one in enumerate(rest) if one.role is Role.USER]
    # A greeting and the first user's message are one turn; a run does not begin inside of it.
    runs = [
        start
        for start in (0, *users[1:])
        if rest[start : start + len(spoken)] == tuple(spoken) and (spoken or not start)
    ]
    if leading != other_leading or not runs:
        assert found is None
    else:
        assert found == Lineage(runs[-1], rest[runs[-1] + len(spoken) :])


def test_system_content_alone_goes_on_with_everything():
    said = chat_support.conversation("a", "b", "c", system="x")
    assert lineage(said[:1], said) == Lineage(0, said[1:])
    assert lineage((), said[1:]) == Lineage(0, said[1:])
    assert lineage((), said) is None


def test_a_changed_word_breaks_the_line():
    said = chat_support.conversation("a", "b", "c", "a", system="x")
    retained = Conversation.of(said).without(1)
    assert lineage(retained, (*said, Message(Role.USER, "b"))) == Lineage(
        2, (Message(Role.USER, "b"),)
    )
    for changed in range(len(said)):
        other = list(said)
        other[changed] = Message(said[changed].role, "other")
        found = lineage(retained, tuple(other))
        # The dropped turn is not part of what is retained: it may be anything.
        assert (found is not None) == (changed in (1, 2))


@pytest.mark.parametrize("budget", [(0, 0), (1, -1), (5, 0, Policy.SHIFT, -1), (1 << 25, 0)])
def test_a_budget_has_bounds(budget):
    with pytest.raises(LimitError):
        Budget(*budget)
