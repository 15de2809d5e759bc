"""Any node answers for any conversation: on three real nodes, over HTTP, through moves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json

import grpc
import harness
import openai
import pytest
from node_support import World, move

from node.client import NodeClient
from node.config import Address
from node.credentials import Role, pin
from node.http.options import HttpOptions
from node.pb.v1 import relay_pb2 as pb
from node.placement.publishing import read_node
from node.relay.messages import SERVICE, Passed
from node.server import running
from node.serving.options import ServingOptions
from node.trust import load_credentials, open_channel

FIELDS = {"model": "default_model", "max_output_tokens": 24, "temperature": 0}


@contextlib.asynccontextmanager
async def enrolled(world, name, **http):
    """A node with both ports, a client of each."""
    options = HttpOptions(Address("127.0.0.1", 0), **{"drain_s": 2.0, **http})
    config = dataclasses.replace(
        world.config(name, harness.TRAINED), http=options, serving=ServingOptions()
    )
    async with running(config) as node:
        url = f"{node.entrance.url}/v1"
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
            NodeClient(world.credentials("client"), name, node.address) as grpc_client,
        ):
            while await read_node(node.sessions.directory, name) is None:
                await asyncio.sleep(0.01)
            yield node, client, grpc_client


def befriended(tmp_path, model_dir):
    """A world whose nodes may ask each other as clients do."""
    world = World.make(tmp_path, model_dir)
    for name in world.NODES:
        for other in world.NODES:
            if other != name:
                pin(world.credentials(name), world.certificate(other), Role.CLIENT)
    return world


async def streamed(client, name, text, **more):
    """The pieces of one streamed answer, its whole text, and the last event."""
    pieces, last = [], None
    stream = await client.responses.create(
        **{**FIELDS, **more}, conversation=name, input=text, stream=True
    )
    async for event in stream:
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
        last = event
    return pieces, last


def owner_of(answer):
    return answer.headers.get("x-kvpack-node")


def test_a_node_that_does_not_own_a_conversation_answers_for_it(tmp_path, model_dir):
    world = befriended(tmp_path, model_dir)

    async def live():
        async with (
            enrolled(world, "source") as (here, ours, _),
            enrolled(world, "target") as (there, theirs, _),
        ):
            made = await ours.conversations.create(metadata={"a": "b"})
            twin = await ours.conversations.create()
            # Whole, and as a stream, by the node that does not own it: the same as by the owner.
            raw = await theirs.responses.with_raw_response.create(
                **FIELDS, conversation=made.id, input="Hello there"
            )
            assert owner_of(raw) == "source"
            assert len(raw.headers.get_list("x-request-id")) == 1
            own = await ours.responses.with_raw_response.create(
                **FIELDS, conversation=twin.id, input="Hello there"
            )
            assert owner_of(own) is None
            assert raw.parse().output_text == own.parse().output_text
            pieces, last = await streamed(theirs, made.id, "Who are you?")
            same, _ = await streamed(ours, twin.id, "Who are you?")
            assert pieces == same
            assert len(pieces) > 3
            assert last.type in ("response.completed", "response.incomplete")
            assert last.response.conversation.id == made.id
            # Looking, changing, deleting; also what the owner refuses comes back as it is.
            found = await theirs.conversations.retrieve(made.id)
            assert (found.metadata, found.revision) == ({"a": "b"}, 2)
            changed = await theirs.conversations.update(made.id, metadata={"c": "d"})
            assert changed.metadata == {"c": "d"}
            listed = await theirs.conversations.items.list(made.id, limit=3, order="asc")
            assert len(listed.data) == 3
            with pytest.raises(openai.ConflictError) as caught:
                await theirs.responses.create(
                    **FIELDS, conversation=made.id, input="x", extra_body={"expected_revision": 1}
                )
            assert caught.value.code == "conflict"
            url = f"{there.entrance.url}/kvpack/sessions/{made.id}"
            status, headers, body = await asyncio.to_thread(harness.ask, url)
            assert (status, headers["x-kvpack-node"]) == (200, "source")
            assert json.loads(body)["node"] == "source"
            # What was passed on once is not passed on again, though this node could.
            assert await relayed(world, "client", there, made.id, here_tenant(there)) == 421
            # Asked twice by one key it is done once, by whichever node.
            key = {"Idempotency-Key": "only-once"}
            first = await theirs.responses.create(
                **FIELDS, conversation=made.id, input="Once.", extra_headers=key
            )
            again = await ours.responses.create(
                **FIELDS, conversation=made.id, input="Once.", extra_headers=key
            )
            assert first.id == again.id
            await theirs.conversations.delete(made.id)
            for client in (ours, theirs):
                with pytest.raises(openai.NotFoundError):
                    await client.conversations.retrieve(made.id)
            # A body of more than a message goes in pieces: what is wrong with it the owner says.
            refused = []
            for client in (ours, theirs):
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.responses.create(
                        **FIELDS, conversation=twin.id, input="word " * 300_000
                    )
                refused.append((caught.value.code, caught.value.message))
            assert refused[0] == refused[1]
            assert there.entrance.door.relay.passed >= 8
            assert here.entrance.door.relay.passed == 0

    harness.within(live(), 90)


def test_a_stream_through_moves_has_each_token_once(tmp_path, model_dir):
    world = befriended(tmp_path, model_dir)

    async def live():
        async with (
            enrolled(world, "source") as (here, ours, giving),
            enrolled(world, "target") as (there, _, taking),
            enrolled(world, "third") as (_, front, _),
        ):
            made = await ours.conversations.create()
            twin = await ours.conversations.create()
            texts = ["Hello there", "Who are you?"]
            expected = []
            for text in texts:
                expected.append((await streamed(ours, twin.id, text, max_output_tokens=32))[0])
            places = [(here, giving, there), (there, taking, here)]
            for text, pieces, (source, client, target) in zip(texts, expected, places, strict=True):
                asking = asyncio.create_task(streamed(front, made.id, text, max_output_tokens=32))
                session = await source.sessions.find(made.id)
                while not session.writers and not asking.done():
                    await asyncio.sleep(0.001)
                before = session.next_index
                while session.next_index <= before + 2 and not asking.done():
                    await asyncio.sleep(0.001)
                result = await move(client, target, await client.get(made.id))
                assert result.continuation_verdict == "exact"
                told, last = await asking
                assert told == pieces
                assert last.type in ("response.completed", "response.incomplete")
                assert made.id in target.sessions
            assert (await front.conversations.retrieve(made.id)).revision == 2

    harness.within(live(), 90)


def test_a_request_in_the_middle_of_a_move_waits_and_is_answered_there(tmp_path, model_dir):
    world = befriended(tmp_path, model_dir)

    async def live():
        async with (
            enrolled(world, "source") as (here, ours, giving),
            enrolled(world, "target") as (there, theirs, _),
        ):
            made = await ours.conversations.create()
            await streamed(ours, made.id, "Hello there")
            session = await here.sessions.find(made.id)
            async with here.sessions.hold(made.id, session.token):
                # Held as a move holds it: whoever asks meanwhile waits, and is not sent away.
                asking = asyncio.create_task(streamed(theirs, made.id, "Who are you?"))
                await asyncio.sleep(0.3)
                assert not asking.done()
            assert (await asking)[0]
            await move(giving, there, await giving.get(made.id))
            for client in (ours, theirs):
                pieces, _ = await streamed(client, made.id, "Go on.")
                assert pieces
            assert (await theirs.conversations.retrieve(made.id)).revision == 4
            assert here.entrance.door.relay.passed == 1

    harness.within(live(), 90)


def test_who_is_not_pinned_as_a_client_is_told_where_it_is_as_before(tmp_path, model_dir):
    world = World.make(tmp_path, model_dir)

    async def live():
        async with (
            enrolled(world, "source") as (here, ours, _),
            enrolled(world, "target") as (there, theirs, _),
        ):
            made = await ours.conversations.create()
            with pytest.raises(openai.APIStatusError) as caught:
                await theirs.conversations.retrieve(made.id)
            assert (caught.value.status_code, caught.value.code) == (421, "session_moved")
            assert caught.value.response.headers["x-kvpack-node"] == "source"
            # One that only is a node of it may not ask, whatever it says.
            status = await relayed(world, "target", here, made.id, here_tenant(here))
            assert status is grpc.StatusCode.PERMISSION_DENIED
            # A client may, for the tenant whose key it has, and for no other.
            assert await relayed(world, "client", here, made.id, here_tenant(here)) == 200
            assert await relayed(world, "client", here, made.id, "other") is (
                grpc.StatusCode.PERMISSION_DENIED
            )
            # Nobody speaks for an administrator, and nothing is passed on twice.
            for path, expected in (("/metrics", 403), ("/slots", 403), ("/v1/nothing", 404)):
                got = await relayed(world, "client", here, "", here_tenant(here), path=path)
                assert got == expected
            mine = await theirs.conversations.create()
            assert await relayed(world, "client", here, mine.id, here_tenant(here)) == 421
            assert here.entrance.door.relay.passed == there.entrance.door.relay.passed == 0

    harness.within(live(), 60)


def here_tenant(node):
    return node.entrance.door.serving.tenants.default


async def relayed(world, caller, node, name, tenant, path=None):
    """The status of one request that ``caller`` passes on by hand; gRPC's where it is refused."""
    credentials = load_credentials(world.credentials(caller))
    channel = open_channel(credentials, credentials.peer(node.name, Role.NODE), node.address)
    raw = (path or f"/v1/conversations/{name}").encode()
    passed = Passed("GET", raw, b"", (), tenant, b"")
    method = channel.stream_stream(
        f"/{SERVICE}/Call",
        request_serializer=pb.RelayPiece.SerializeToString,
        response_deserializer=pb.RelayPart.FromString,
    )
    async with channel:
        try:
            return (await method(passed.pieces(), timeout=20).read()).start.status
        except grpc.aio.AioRpcError as error:
            return error.code()


def test_an_owner_that_is_away_is_named_and_not_waited_for(tmp_path, model_dir):
    world = befriended(tmp_path, model_dir)

    async def live():
        async with enrolled(world, "target") as (there, theirs, _):
            async with enrolled(world, "source") as (here, ours, _):
                made = await ours.conversations.create()
                state = await read_node(here.sessions.directory, "source")
            loop = asyncio.get_running_loop()
            begun = loop.time()
            with pytest.raises(openai.APIStatusError) as caught:
                await theirs.conversations.retrieve(made.id)
            # It stopped and took its notice along: only its name is known.
            assert caught.value.code == "session_moved"
            # One that died left its notice behind, and its lease runs or is over.
            relay = there.entrance.door.relay

            async def haunted(moved):
                return "source", Address.parse(state.address)

            relay._where = haunted
            for ask in (
                theirs.conversations.retrieve(made.id),
                theirs.responses.create(**FIELDS, conversation=made.id, input="x"),
            ):
                with pytest.raises(openai.InternalServerError) as caught:
                    await ask
                assert (caught.value.status_code, caught.value.code) == (503, "owner_away")
                assert caught.value.response.headers["x-kvpack-node"] == "source"
                assert int(caught.value.response.headers["retry-after"]) >= 1
            assert loop.time() - begun < 40

    from node.relay import passing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passing, "FOLLOW_S", 0.5)
        patch.setattr(passing, "CONNECT_S", 0.5)
        harness.within(live(), 60)


def test_a_client_that_hangs_up_ends_the_answer_at_the_owner(tmp_path, model_dir):
    world = befriended(tmp_path, model_dir)

    async def live():
        async with (
            enrolled(world, "source") as (here, ours, _),
            enrolled(world, "target") as (_, theirs, _),
        ):
            made = await ours.conversations.create()
            stream = await theirs.responses.create(
                **{**FIELDS, "max_output_tokens": 2000}, conversation=made.id, input="Hello",
                stream=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            session = await here.sessions.find(made.id)
            assert session.writers == 1
            await stream.close()
            async with asyncio.timeout(20):
                while session.writers:
                    await asyncio.sleep(0.01)
            assert (await ours.conversations.retrieve(made.id)).revision == 0

    harness.within(live(), 60)
