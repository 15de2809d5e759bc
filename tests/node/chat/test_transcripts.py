"""Exact ids of conversations that come back as text (faults 31 and 32)."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import pytest
from chat_support import by_character, conversation
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import LimitError
from kvpack.keys import EpochKey
from node.chat.compose import ChatRequest, compose, compose_next
from node.chat.messages import Message, Role
from node.chat.policy import Budget, Policy
from node.chat.render import Known
from node.chat.splice import Splice
from node.chat.tools import parse_tools
from node.chat.transcripts import MemoryTranscripts, Terms, Transcript, digests, find, keep
from node.errors import ContextLengthError

KEY = EpochKey("tenant", 1, b"k" * 32)
END = 6
ROOMY = Budget(8192, 64)


@pytest.fixture(scope="module")
def terms(trained):
    return Terms(KEY, trained.identity("tenant"))


def run(work):
    return asyncio.run(work)


def test_digests_are_of_everything_that_decides_the_ids(trained, variant, terms):
    messages = conversation("hi", "Hello", "more")
    one = digests(terms, messages)
    assert one == digests(dataclasses.replace(terms), messages)
    assert one[:2] == digests(terms, messages[:2]) and len(set(one)) == 3
    tools = parse_tools([{"type": "function", "name": "f"}, {"type": "function", "name": "g"}])
    others = [
        dataclasses.replace(terms, key=EpochKey("tenant", 1, b"l" * 32)),
        dataclasses.replace(terms, key=EpochKey("other", 1, b"k" * 32)),
        dataclasses.replace(terms, identity=variant("{{ messages }}").identity("tenant")),
        dataclasses.replace(terms, tools=tools),
        dataclasses.replace(terms, tools=tools[:1]),
        dataclasses.replace(terms, options={"enable_thinking": False}),
    ]
    # The variant shares the loaded identity; only the template's digest tells them apart.
    template = dataclasses.replace(terms.identity, chat_template_digest=b"t" * 32)
    tokenizer = dataclasses.replace(terms.identity, tokenizer_digest=b"t" * 32)
    others[2] = dataclasses.replace(terms, identity=template)
    others.append(dataclasses.replace(terms, identity=tokenizer))
    found = [digests(other, messages)[0] for other in (terms, *others)]
    assert len(set(found)) == len(found)


_said = st.lists(
    st.builds(
        Message, st.sampled_from([Role.USER, Role.ASSISTANT]), st.sampled_from(["", "a", "ab"])
    ),
    min_size=1,
    max_size=5,
)


@given(_said, _said)
def test_only_equal_messages_have_equal_digests(terms, first, second):
    same = digests(terms, first)[-1] == digests(terms, second)[-1]
    assert same == (first == second)


def test_thoughts_are_not_part_of_it(terms):
    plain = Message(Role.ASSISTANT, "x")
    thought = Message(Role.ASSISTANT, "x", reasoning="because")
    assert digests(terms, [plain]) == digests(terms, [thought])


def test_the_longest_kept_beginning_is_found(terms):
    kept = MemoryTranscripts()
    said = conversation("a", "b", "c", "d", "e", "f", "g")
    for end in (2, 4):
        run(keep(kept, terms, said[:end], Transcript(tuple(range(1, end + 1)))))
    found = run(find(kept, terms, said))
    assert found is not None and found.covered_messages == 4
    assert found.transcript.token_ids == (1, 2, 3, 4)
    edited = (*said[:2], Message(Role.USER, "other"), *said[3:])
    found = run(find(kept, terms, edited))
    assert found is not None and found.covered_messages == 2
    stranger = dataclasses.replace(terms, key=EpochKey("other", 1, b"k" * 32))
    assert run(find(kept, stranger, said)) is None
    assert run(find(kept, terms, said[:1])) is None


def test_memory_is_bounded_and_the_unused_go_first():
    kept = MemoryTranscripts(10_000)
    names = [bytes([value]) * 32 for value in range(40)]
    one = Transcript(tuple(range(100)))
    for name in names:
        run(kept.put_transcript("t", name, one))
        run(kept.put_transcript("t", name, one))
        assert run(kept.get_transcript("t", [b"?" * 32, names[0]])) == (1, one)
        assert kept.bytes_taken <= 10_000
    assert len(kept) == 9
    assert run(kept.get_transcript("t", names[1:30])) is None
    run(kept.put_transcript("t", b"!" * 32, Transcript(tuple(range(10_000)))))
    assert len(kept) == 0 and kept.bytes_taken == 0
    with pytest.raises(LimitError):
        MemoryTranscripts(0)
    with pytest.raises(LimitError):
        Transcript(())


async def chat(renderer, kept, terms, turns: int, budget: Budget, encode):
    """A stateless client's turns, each with all messages; yields what was composed for each."""
    messages = conversation("hi", system="s")
    for turn in range(turns):
        found = await find(kept, terms, messages)
        composed = compose(renderer, ChatRequest(messages), budget, found)
        yield messages, found, composed
        answer = f"answer {turn} 🙂"
        ids = (*composed.prompt.token_ids, *encode(answer), END)
        messages = (*messages, Message(Role.ASSISTANT, answer))
        await keep(kept, terms, messages, Transcript(ids, composed.dropped_messages))
        messages = (*messages, Message(Role.USER, f"question {turn}"))


def test_a_stateless_client_goes_on_from_the_exact_ids(trained, renderer, terms):
    async def work():
        before, kept = 0, MemoryTranscripts()
        encode = functools.partial(by_character, trained)
        async for _, found, composed in chat(renderer, kept, terms, 6, ROOMY, encode):
            if found is not None:
                assert composed.prompt.splice is Splice.EXACT
                assert composed.prompt.kept_tokens == len(found.transcript.token_ids) > before
                before = composed.prompt.kept_tokens
            assert not composed.shifted and composed.dropped_messages == 0

    run(work())


def test_a_shift_stays_where_it_is_for_some_turns_and_after_a_restart(trained, renderer, terms):
    """What is dropped depends on the messages alone: an empty table shortens the same way."""
    budget = Budget(150, 40, Policy.SHIFT, 40)

    async def work():
        shifts, exact = [], 0
        kept = MemoryTranscripts()
        talk = chat(renderer, kept, terms, 24, budget, trained.encode)
        async for messages, _, composed in talk:
            cold = compose(renderer, ChatRequest(messages), budget)
            assert composed.messages == cold.messages
            assert composed.dropped_messages == cold.dropped_messages
            assert len(composed.prompt.token_ids) <= budget.room
            shifts.append(composed.dropped_messages)
            exact += composed.prompt.splice is Splice.EXACT
            assert composed.shifted == (len(shifts) > 1 and shifts[-1] > shifts[-2])
        assert shifts == sorted(shifts) and shifts[-1] > 30
        # Every shift begins anew; all other turns go on from what is known.
        assert exact == 24 - len(set(shifts)) >= 12

    run(work())


def test_a_conversation_that_was_shortened_is_whole_again_where_there_is_room(renderer, terms):
    """What an earlier request with less room dropped is not lost to one with more."""
    messages = conversation("one", "two", "three", "four", "five", system="s")
    kept = MemoryTranscripts()
    shorter = renderer.prompt((messages[0], *messages[3:4]))
    ids = (*shorter.token_ids, *renderer.prompt(messages[4:5]).token_ids)
    run(keep(kept, terms, messages[:5], Transcript(ids, 2)))
    found = run(find(kept, terms, messages))
    assert found is not None and found.transcript.dropped_messages == 2
    whole = compose(renderer, ChatRequest(messages), ROOMY, found)
    assert whole.messages == messages and not whole.shifted
    assert whole.prompt.token_ids == renderer.prompt(messages).token_ids


def test_known_ids_that_do_not_fit_give_way_to_the_text(trained, renderer, terms):
    """Generated ids may be more than their text takes: the room is for the shorter form then."""
    messages = (*conversation("hi", "Hello there, my friend"), Message(Role.USER, "more"))
    fresh = renderer.prompt(messages)
    first = renderer.prompt(messages[:1])
    ids = (*first.token_ids, *by_character(trained, messages[1].content), END)
    kept = MemoryTranscripts()
    run(keep(kept, terms, messages[:2], Transcript(ids)))
    found = run(find(kept, terms, messages))
    budget = Budget(len(fresh.token_ids), 0)
    assert compose(renderer, ChatRequest(messages), ROOMY, found).prompt.splice is Splice.EXACT
    tight = compose(renderer, ChatRequest(messages), budget, found)
    assert tight.prompt.token_ids == fresh.token_ids and tight.dropped_turns == 0


def test_a_kept_conversation_shifts_from_what_it_retained(trained, renderer):
    known = Known((), ())
    budget = Budget(120, 40, Policy.SHIFT, 30)
    epochs = 0
    for turn in range(12):
        request = ChatRequest(conversation(f"question {turn}"))
        composed = compose_next(renderer, known, request, budget)
        assert composed.shifted == (composed.dropped_turns > 0)
        epochs += composed.shifted
        if not composed.shifted and turn:
            assert composed.prompt.token_ids[: len(known.token_ids)] == known.token_ids
        answer = f"answer {turn} 🙂"
        ids = (*composed.prompt.token_ids, *by_character(trained, answer), END)
        known = Known((*composed.messages, Message(Role.ASSISTANT, answer)), ids)
    assert 1 <= epochs <= 8


def test_what_does_not_fit_is_an_error_with_its_numbers(renderer):
    messages = conversation("x" * 500, system="be brief")
    for work in (
        lambda: compose(renderer, ChatRequest(messages), Budget(100, 10)),
        lambda: compose_next(renderer, Known((), ()), ChatRequest(messages), Budget(100, 10)),
    ):
        with pytest.raises(ContextLengthError) as refused:
            work()
        assert "leading system content takes" in str(refused.value)
        assert refused.value.limit_tokens == 100 < refused.value.needed_tokens
    with pytest.raises(ContextLengthError, match="the messages take"):
        compose(renderer, ChatRequest(messages), Budget(100, 10, Policy.ERROR))
