"""A conversation moves by ``kvnode migrate`` and goes on under its id, with its text, there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys

import harness
import openai
import pytest
from node_support import World

from node.config import Address, child_environment
from node.http.options import HttpOptions
from node.server import running
from node.serving.options import ServingOptions

FIELDS = {"model": "default_model", "max_output_tokens": 8}


@contextlib.asynccontextmanager
async def enrolled(world, name):
    """An enrolled node with a port of each kind, and a client of its HTTP port."""
    http = HttpOptions(Address("127.0.0.1", 0), drain_s=2.0)
    config = dataclasses.replace(
        world.config(name, harness.TRAINED), http=http, serving=ServingOptions()
    )
    async with running(config) as node:
        url = f"{node.entrance.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield node, client


async def migrate(world, name, source, target):
    """The real command."""
    arguments = [
        *(sys.executable, "-P", "-m", "node", "migrate", name),
        *("--node", f"{source.name}@{source.address}", "--to", f"{target.name}@{target.address}"),
        *("--credentials", str(world.credentials("client"))),
    ]
    process = await asyncio.create_subprocess_exec(
        *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=child_environment(harness.ROOT),
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


async def say(client, name, text, **more):
    asked = {**FIELDS, **more}
    return await client.responses.create(**asked, conversation=name, input=text)


async def texts_of(client, name):
    listed = await client.conversations.items.list(name, order="asc", limit=100)
    return [(item.id, item.role, item.content[0].text) for item in listed.data]


def test_conversation_moves_there_and_back_and_knows_what_was_said(tmp_path, model_dir):
    world = World.make(tmp_path, model_dir)

    async def there_first(here, ours, made, told):
        """The way there and one turn; gives the answers before and after it."""
        first = await say(ours, made.id, "Hello there", **told)
        # Asleep or not, it is moved with its rows.
        dormancy = here.entrance.door.serving.dormancy
        assert await dormancy.sleep(await here.sessions.find(made.id))
        before = await texts_of(ours, made.id)
        async with enrolled(world, "target") as (there, theirs):
            await migrate(world, made.id, here, there)
            with pytest.raises(openai.APIStatusError) as caught:
                await say(ours, made.id, "Who are you?", **told)
            assert caught.value.status_code == 421
            assert caught.value.code == "session_moved"
            assert "owned by node target" in caught.value.message
            assert caught.value.response.headers["x-kvpack-node"] == "target"
            found = await theirs.conversations.retrieve(made.id)
            assert (found.created_at, found.metadata, found.revision) == (
                made.created_at, {"a": "b"}, 1,
            )  # fmt: skip
            assert await texts_of(theirs, made.id) == before
            second = await say(
                theirs, made.id, "Who are you?", extra_body={"expected_revision": 1}, **told
            )
        return first, second

    async def live():
        async with enrolled(world, "source") as (here, ours):
            made = await ours.conversations.create(metadata={"a": "b"})
            told = {"instructions": "Be brief."}
            first, second = await there_first(here, ours, made, told)
            details = second.usage.input_tokens_details
            assert details.cached_tokens >= first.usage.total_tokens - 1
            twin = await ours.responses.create(
                **FIELDS, previous_response_id=first.id, input="Who are you?", **told
            )
            assert twin.output_text == second.output_text
            # Restarted, the other node has the pack it came in and a newer record, which counts.
            async with enrolled(world, "target") as (there, theirs):
                assert (await theirs.conversations.retrieve(made.id)).revision == 2
                session = await there.sessions.find(made.id)
                assert session.next_index == second.usage.total_tokens
                await migrate(world, made.id, there, here)
                assert len(await texts_of(ours, made.id)) == 4
                third = await say(ours, made.id, "Go on.", **told)
                assert third.conversation.revision == 3
                assert third.to_dict()["kvpack"]["evaluated_tokens"] <= 16 + 16
                await ours.conversations.delete(made.id)
                for client in (ours, theirs):
                    with pytest.raises(openai.NotFoundError):
                        await client.conversations.retrieve(made.id)

    harness.within(live(), 120)
