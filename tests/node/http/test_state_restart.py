"""What clients were told survives ``kill -9``: responses, conversations, answers to retries."""

from __future__ import annotations

import contextlib
import sqlite3

import harness
import openai
import pytest

from node.records.tables import pack_ids, unpack_ids

FIELDS = {"model": "default_model", "max_output_tokens": 8}
KEY = {"extra_headers": {"Idempotency-Key": "the-turn"}}
#: The trained model's answer to it ends with the number of tokens alone.
ENDLESS = "Tell me of the old house."
LONG = "The sea was calm and the ship went on through the night. " * 12


@contextlib.contextmanager
def process(data_dir):
    """A node that will be killed, and a client of it."""
    with (
        harness.served(data_dir) as node,
        openai.OpenAI(base_url=node.v1, api_key="none", max_retries=0) as client,
    ):
        yield node, client


@contextlib.asynccontextmanager
async def again(data_dir):
    """A node over the same files, and a client of it."""
    async with (
        harness.web_node(data_dir) as web,
        openai.AsyncOpenAI(base_url=web.v1, api_key="none", max_retries=0) as client,
    ):
        yield web, client


def say(client, conversation_id, text, **more):
    asked = {**FIELDS, **more}
    return client.responses.create(**asked, conversation=conversation_id, input=text)


def evaluated(response):
    return response.to_dict()["kvpack"]["evaluated_tokens"]


def test_all_that_was_answered_is_there_after_kill_9(tmp_path):
    with process(tmp_path / "data") as (node, client):
        name = client.conversations.create(metadata={"a": "b"}).id
        first = say(client, name, LONG)
        turn = say(client, name, "Who are you?", **KEY)
        chain = client.responses.create(**FIELDS, input=LONG + "And then?")
        empty = client.conversations.create()
        harness.settled(node)
        node.kill()

    async def after():
        async with again(tmp_path / "data") as (web, client):
            # Its session knows all of its tokens, and has no row in memory yet.
            session = await web.serving.sessions.find(name)
            assert (session.asleep, session.next_index) == (True, turn.usage.total_tokens)
            # A retry is told what was answered, and is no second turn.
            assert await say(client, name, "Who are you?", **KEY) == turn
            found = await client.conversations.retrieve(name)
            assert (found.revision, found.metadata) == (2, {"a": "b"})
            listed = (await client.conversations.items.list(name, order="asc")).data
            assert [item.content[0].text for item in listed] == [
                LONG, first.output_text, "Who are you?", turn.output_text,
            ]  # fmt: skip
            assert await client.responses.retrieve(chain.id) == chain
            third = await say(client, name, "Go on.", extra_body={"expected_revision": 2})
            new = third.usage.input_tokens - turn.usage.total_tokens
            assert third.usage.input_tokens_details.cached_tokens >= turn.usage.total_tokens - 1
            assert third.to_dict()["kvpack"]["rung"] == "durable"
            assert evaluated(third) <= new + 16
            more = await client.responses.create(
                **FIELDS, previous_response_id=chain.id, input="Go on."
            )
            assert evaluated(more) <= 16 + 16
            # A conversation in which nothing was said yet is there, too.
            assert (await say(client, empty.id, "Hello there")).conversation.revision == 1
        # A twin that nothing happened to says the same.
        async with again(tmp_path / "twin") as (_, client):
            twin = (await client.conversations.create()).id
            said = [await say(client, twin, text) for text in (LONG, "Who are you?", "Go on.")]
            assert [one.output_text for one in said] == [
                first.output_text, turn.output_text, third.output_text,
            ]  # fmt: skip

    harness.within(after(), 120)


def test_turn_that_a_kill_broke_off_never_happened(tmp_path):
    with process(tmp_path / "data") as (node, client):
        name = client.conversations.create().id
        first = say(client, name, "Hello there")
        stream = say(client, name, ENDLESS, stream=True, max_output_tokens=2000, **KEY)
        for _, event in zip(range(8), stream, strict=False):
            assert not event.type.endswith(("completed", "incomplete", "failed"))
        node.kill()
        stream.close()

    async def after():
        async with again(tmp_path / "data") as (_, client):
            assert (await client.conversations.retrieve(name)).revision == 1
            assert len((await client.conversations.items.list(name)).data) == 2
            # Its key was not used up by what did not happen.
            turn = await say(client, name, ENDLESS, **KEY)
            assert turn.conversation.revision == 2
            twin = await client.responses.create(
                **FIELDS, previous_response_id=first.id, input=ENDLESS
            )
            assert twin.output_text == turn.output_text
            await client.conversations.delete(name)
        # And what was given up stays so.
        async with again(tmp_path / "data") as (_, client):
            for call in (client.conversations.retrieve, client.conversations.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(name)

    harness.within(after(), 120)


def test_ids_that_another_model_made_are_left_and_the_text_goes_on(tmp_path):
    """Another model in the folder, with fewer tokens: only the text means the same to it."""
    data_dir = tmp_path / "data"

    async def go_on(spoil):
        async with again(data_dir) as (_, client):
            name = (await client.conversations.create()).id
            await say(client, name, "Hello there")
            chain = (await client.responses.create(**FIELDS, input="Hello there")).id
        spoil()
        async with again(data_dir) as (_, client):
            turn = await say(client, name, "Go on.")
            more = await client.responses.create(
                **FIELDS, previous_response_id=chain, input="Go on."
            )
            last = await say(client, name, "And then?")
            return [one.output_text for one in (turn, more, last)]

    def raise_ids():
        with contextlib.closing(sqlite3.connect(data_dir / "records.sqlite")) as records, records:
            for number, ids in records.execute("SELECT id, token_ids FROM contexts").fetchall():
                raised = [token + 1_000_000 for token in unpack_ids(ids)]
                records.execute(
                    "UPDATE contexts SET token_ids = ? WHERE id = ?", (pack_ids(raised), number)
                )

    said = harness.within(go_on(raise_ids), 120)
    assert said == harness.within(go_on(lambda: None), 120)
