"""``/v1/conversations`` with the real SDK against a real node in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import harness
import openai
import pytest

from node.errors import SessionNotFoundError
from node.http.auth import add_key
from node.serving.options import ServingOptions

FIELDS = {"model": "default_model", "max_output_tokens": 8}


@contextlib.asynccontextmanager
async def talking(folder, serving=None, **http):
    """A node, and a client of it."""
    async with (
        harness.web_node(folder / "data", serving=serving, **http) as web,
        openai.AsyncOpenAI(base_url=web.v1, api_key="none", max_retries=0) as client,
    ):
        yield web, client


async def refused(call, status):
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    assert caught.value.status_code == status, caught.value.message
    return caught.value


async def say(client, conversation, text, **more):
    asked = {**FIELDS, **more}
    return await client.responses.create(**asked, conversation=conversation.id, input=text)


async def texts_of(client, conversation):
    listed = await client.conversations.items.list(conversation.id, order="asc", limit=100)
    return [(item.role, item.content[0].text) for item in listed.data]


def test_conversation_is_made_changed_and_given_up(tmp_path):
    async def live():
        async with talking(tmp_path) as (web, client):
            items = [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": "Hello there"},
            ]
            made = await client.conversations.create(items=items, metadata={"for": "tests"})
            assert made.metadata == {"for": "tests"}
            assert (made.revision, made.context_epoch) == (0, 0)
            changed = await client.conversations.update(made.id, metadata={"a": "b"})
            assert (changed.metadata, changed.revision) == ({"a": "b"}, 1)
            more = await client.conversations.items.create(
                made.id, items=[{"role": "assistant", "content": "Good day."}]
            )
            assert more.data[0].role == "assistant"
            assert [role for role, _ in await texts_of(client, made)] == [
                "developer", "user", "assistant",
            ]  # fmt: skip
            page = await client.conversations.items.list(made.id, limit=2)
            assert [item.role for item in page.data] == ["assistant", "user"]
            assert page.has_more
            every = [item.role async for item in client.conversations.items.list(made.id, limit=1)]
            assert every == ["assistant", "user", "developer"]
            one = await client.conversations.items.retrieve(
                more.data[0].id, conversation_id=made.id
            )
            assert one.content[0].text == "Good day."
            assert len(web.serving.sessions) == 1
            # What no prompt could be written of is not kept: the conversation goes on being one.
            for item, param in (
                ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "no"}, "[0]"),
                ({"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}, "name"),
                ({"role": "tool", "content": "x"}, "[0]"),
            ):
                bad = client.conversations.items.create(made.id, items=[item])
                assert param in (await refused(bad, 400)).message
            assert (await say(client, made, "And now?")).conversation.revision == 3
            gone = await client.conversations.delete(made.id)
            assert gone.deleted
            assert len(web.serving.sessions) == 0
            for call in (
                client.conversations.retrieve(made.id),
                client.conversations.delete(made.id),
                say(client, made, "Hello"),
                client.conversations.retrieve("conv_unknown"),
                client.conversations.retrieve("something else"),
            ):
                await refused(call, 404)

    harness.within(live(), 80)


def test_turns_go_on_in_one_session_and_count_revisions(tmp_path):
    async def live():
        async with talking(tmp_path) as (_, client):
            made = await client.conversations.create()
            first = await say(client, made, "Hello there")
            assert first.conversation.id == made.id
            second = await say(client, made, "Who are you?", extra_body={"expected_revision": 1})
            assert second.conversation.revision == 2
            details = second.usage.input_tokens_details
            assert details.cached_tokens >= first.usage.total_tokens - 1
            # The same chat without a conversation is the same text.
            chain = await client.responses.create(**FIELDS, input="Hello there")
            chain = await client.responses.create(
                **FIELDS, previous_response_id=chain.id, input="Who are you?"
            )
            assert chain.output_text == second.output_text
            # An answer in a conversation is a point to begin from, too.
            fork = await client.responses.create(
                **FIELDS, previous_response_id=first.id, input="Who are you?"
            )
            assert fork.output_text == second.output_text
            assert len(await texts_of(client, made)) == 4
            error = await refused(say(client, made, "x", extra_body={"expected_revision": 1}), 409)
            assert error.code == "conflict"
            assert "found 2" in error.message
            assert (await client.conversations.retrieve(made.id)).context_epoch == 0

    harness.within(live(), 80)


def test_one_request_writes_at_a_time_and_one_that_hangs_up_changed_nothing(tmp_path):
    async def live():
        async with talking(tmp_path) as (_, client):
            made = await client.conversations.create()
            first = await say(client, made, "Hello there")
            stream = await say(client, made, "Tell all.", stream=True, max_output_tokens=500)
            await anext(aiter(stream))
            for call in (
                say(client, made, "Who are you?"),
                client.conversations.items.create(
                    made.id, items=[{"role": "user", "content": "x"}]
                ),
                client.conversations.delete(made.id),
            ):
                assert (await refused(call, 409)).code == "busy"
            # Reading goes on meanwhile.
            assert (await client.conversations.retrieve(made.id)).revision == 1
            await stream.close()
            patient = client.with_options(max_retries=6)
            second = await say(patient, made, "Who are you?")
            assert second.conversation.revision == 2
            said = [text for _, text in await texts_of(client, made)]
            assert said == [
                "Hello there", first.output_text, "Who are you?", second.output_text
            ]  # fmt: skip
            twin = await client.responses.create(
                **FIELDS, previous_response_id=first.id, input="Who are you?"
            )
            assert twin.output_text == second.output_text

    harness.within(live(), 80)


def test_retried_turn_is_one_turn(tmp_path):
    async def live():
        async with talking(tmp_path) as (_, client):
            made = await client.conversations.create()
            key = {"extra_headers": {"Idempotency-Key": "turn-1"}}
            first = await say(client, made, "Hello there", **key)
            again = await say(client, made, "Hello there", **key)
            assert again == first
            assert len(await texts_of(client, made)) == 2
            await refused(say(client, made, "Hello here", **key), 409)
            kept = await client.conversations.create(
                metadata={"a": "b"}, extra_headers={"Idempotency-Key": "make"}
            )
            same = await client.conversations.create(
                metadata={"a": "b"}, extra_headers={"Idempotency-Key": "make"}
            )
            assert kept.id == same.id
            # What is given up is not told again.
            await client.conversations.delete(kept.id)
            other = await client.conversations.create(
                metadata={"a": "b"}, extra_headers={"Idempotency-Key": "make"}
            )
            assert other.id != kept.id

    harness.within(live(), 80)


def test_item_that_is_taken_back_was_never_said(tmp_path):
    async def live():
        async with talking(tmp_path) as (web, client):
            made = await client.conversations.create()
            await say(client, made, "Hello there")
            await say(client, made, "Tell me of the sea.")
            await web.serving.ladder.settled()
            listed = await client.conversations.items.list(made.id, order="asc")
            for item in listed.data[2:]:
                await client.conversations.items.delete(item.id, conversation_id=made.id)
            answer = await say(client, made, "Who are you?")
            items = [
                {"role": role, "content": text} for role, text in (await texts_of(client, made))[:3]
            ]
            twin = await client.responses.create(**FIELDS, input=items)
            assert twin.output_text == answer.output_text
            assert twin.usage.input_tokens == answer.usage.input_tokens
            assert (await client.conversations.retrieve(made.id)).context_epoch == 1
            assert answer.usage.input_tokens_details.cached_tokens > 0
            # Nothing was dropped: it is the client that changed the text.
            assert answer.to_dict()["kvpack"]["miss"] == "input_changed"

    harness.within(live(), 80)


def test_conversation_that_outgrows_its_context_shifts_or_is_refused(tmp_path):
    async def live():
        options = ServingOptions(max_context=112)
        async with talking(tmp_path, options) as (web, client):
            made = await client.conversations.create()
            texts = [f"Tell me of the sea, the ship and day {number}." for number in range(6)]
            misses = set()
            for text in texts:
                answer = await say(client, made, text)
                misses.add(answer.to_dict()["kvpack"].get("miss"))
            assert misses == {"cold", None, "context_shifted"}
            # A chain shifts as well, and says so.
            forks = [None]
            for text in texts:
                forks.append(
                    await client.responses.create(
                        **FIELDS,
                        input=f"Else: {text}",
                        previous_response_id=forks[-1] and forks[-1].id,
                    )
                )
            assert "context_shifted" in {one.to_dict()["kvpack"].get("miss") for one in forks[1:]}
            now = await client.conversations.retrieve(made.id)
            assert now.context_epoch >= 1
            assert now.revision == len(texts)
            # All of it is still listed; the context, and what moves, are whole newest turns of it.
            assert len(await texts_of(client, made)) == 2 * len(texts)
            kept = (await web.serving.records.conversation(made.id)).context.kept
            assert len(kept) < 2 * len(texts) and b"day 5" in kept[-2]
            assert (await web.serving.sessions.find(made.id)).messages[1:] == kept
            assert answer.usage.input_tokens < 112
            assert answer.truncation == "auto"
            with pytest.raises(openai.BadRequestError) as caught:
                for text in texts:
                    await say(client, made, text, truncation="disabled")
            assert caught.value.code == "context_length_exceeded"
            assert "the context holds 112 tokens" in caught.value.message
            too_long = await refused(say(client, made, "the sea " * 300), 400)
            assert too_long.code == "context_length_exceeded"
            after = await client.conversations.retrieve(made.id)
            answer = await say(client, made, "And now?")
            assert answer.conversation.revision == after.revision + 1

    harness.within(live(), 80)


def test_idle_conversation_gives_its_rows_back_and_answers_as_if_it_had_not(tmp_path):
    async def live():
        async with talking(tmp_path) as (web, client):
            dormancy, sessions = web.serving.dormancy, web.serving.sessions
            made, twin = [await client.conversations.create() for _ in "ab"]
            for one in (made, twin):
                first = await say(client, one, "Tell me of the sea and the ship. " * 6)
            session = await sessions.find(made.id)
            assert await dormancy.sleep(session)
            assert (session.asleep, session.position) == (True, 0)
            assert session.next_index == first.usage.total_tokens
            # Whoever looks does not wake it.
            assert (await client.conversations.retrieve(made.id)).revision == 1
            assert session.asleep
            slept, live = [await say(client, one, "And then?") for one in (made, twin)]
            assert slept.output_text == live.output_text
            assert (dormancy.fell_asleep, dormancy.woke) == (1, 1)
            told = slept.to_dict()["kvpack"]
            assert told["rung"] in ("resident", "durable")
            assert told["evaluated_tokens"] <= 16 + 8
            assert not session.asleep
            # One that somebody works in stays awake.
            session.pinned += 1
            assert not await dormancy.sleep(session)
            session.pinned -= 1
            # Beyond the bound the longest unused sleeps first, and one that is written never.
            dormancy._awake_bytes = dormancy.used_bytes - 1
            async with web.serving.conversations.writing("local", made.id):
                await dormancy.settle()
                assert not session.asleep
                assert (await sessions.find(twin.id)).asleep

    harness.within(live(), 80)


def test_tenants_see_their_own_and_may_have_so_many(tmp_path):
    keys = tmp_path / "keys"
    first, second = add_key(keys, "one"), add_key(keys, "two")

    async def live():
        async with talking(tmp_path, api_key_file=keys) as (web, nobody):
            records = web.serving.records
            records.bounds = dataclasses.replace(records.bounds, conversations=2)
            one, two = (nobody.with_options(api_key=key) for key in (first, second))
            await refused(nobody.conversations.create(), 401)
            made = await one.conversations.create()
            answer = await say(one, made, "Hello there")
            for call in (
                two.conversations.retrieve(made.id),
                two.conversations.items.list(made.id),
                two.conversations.delete(made.id),
                say(two, made, "x"),
                two.responses.retrieve(answer.id),
                two.responses.delete(answer.id),
                two.responses.create(**FIELDS, previous_response_id=answer.id, input="x"),
            ):
                await refused(call, 404)
            # A node's own tenant is another one: its doors do not show these sessions.
            assert web.serving.sessions.page("", 10) == ([], "")
            with pytest.raises(SessionNotFoundError):
                await web.serving.sessions.find(made.id)
            await one.conversations.create()
            error = await refused(one.conversations.create(), 429)
            assert error.code == "records_full"
            await two.conversations.create()
            # The same key of another tenant is another key.
            header = {"Idempotency-Key": "same"}
            asked = {**FIELDS, "input": "Hello there", "extra_headers": header}
            ours = await one.responses.create(**asked)
            theirs = await two.responses.create(**asked)
            assert ours.id != theirs.id
            assert theirs.usage.input_tokens_details.cached_tokens == 0

    harness.within(live(), 80)


def test_many_conversations_at_once_do_not_mix(tmp_path):
    async def live():
        async with talking(tmp_path) as (_, client):
            topics = ["the sea", "a castle", "the king", "a letter"]
            made = [await client.conversations.create() for _ in topics]
            together = await asyncio.gather(
                *(say(client, one, f"Tell me of {t}.") for one, t in zip(made, topics, strict=True))
            )
            for topic, found in zip(topics, together, strict=True):
                alone = await client.responses.create(**FIELDS, input=f"Tell me of {topic}.")
                assert alone.output_text == found.output_text

    harness.within(live(), 80)
