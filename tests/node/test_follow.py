"""Clients that talk while their session moves, and the commands with which people move it."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from click.testing import CliRunner
from node_support import WINDOW, events, move, prompt, run
from plane_support import offering, two

from node.cli import main
from node.config import Address
from node.dataplane import blocking
from node.dataplane.options import Plane, plane_message
from node.errors import PeerAnswerError, PeerUnavailableError
from node.follow import FollowingClient
from node.migration.feed import Feed


async def follow(world, node, session_id, index, count, on_token=lambda _: None):
    """``(index, token, node)`` of a generation through any moves."""
    found = []
    credentials = world.credentials("client")
    async with FollowingClient(credentials, node.name, node.address) as client:
        async for event in client.generate(session_id, index, count):
            found.append((event.index, event.token_id, client.node))
            on_token(event.index)
    return found


def test_a_client_that_streams_through_two_moves_gets_each_token_once(world):
    start, count = 600, 90

    async def work():
        async with world.pair() as (source, giving, target, taking):
            session = await giving.append(await giving.open("s"), prompt(start))
            twin = await giving.append(await giving.open("twin"), prompt(start))
            expected = await events(giving, twin, start, count)
            moves = []

            def on_token(index):
                if index == start + 20:
                    moves.append(asyncio.create_task(move(giving, target, session)))
                if index == start + 60:
                    moves.append(asyncio.create_task(back()))

            async def back():
                await moves[0]
                return await move(taking, source, await taking.get("s"))

            found = await follow(world, source, "s", start, count, on_token)
            return found, expected, [await one for one in moves]

    found, expected, results = run(work())
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert found[0][2] == "source"
    assert "target" in {one[2] for one in found}
    # It was live: its whole blocks left while it decoded on, and only the rest after the freeze.
    assert all(result.continuation_verdict == "exact" for result in results)
    assert results[0].first_index > start + 20


def test_the_token_that_a_hand_over_chooses_is_told_to_whoever_asks_next(world):
    async def work():
        async with world.pair() as (_, giving, target, taking):
            session = await giving.append(await giving.open("s"), prompt(60))
            twin = await giving.append(await giving.open("twin"), prompt(60))
            assert session.told_index == 60
            told = [event[1] for event in await events(giving, session, 60, 5)]
            await move(giving, target, await giving.get("s"), copy_as="c")
            await move(giving, target, await giving.get("s"))
            places = [await taking.get(name) for name in ("s", "c")]
            assert [place.told_index for place in places] == [65, 65]
            assert [place.next_index for place in places] == [67, 66]
            expected = [event[1] for event in await events(giving, twin, 60, 12)]
            for place in places:
                rest = [event[1] for event in await events(taking, place, place.told_index, 7)]
                assert told + rest == expected

    run(work())


def test_a_node_that_was_never_there_is_not_waited_for(world):
    async def work():
        async with world.node("source") as (_, _):
            credentials = world.credentials("client")
            async with FollowingClient(credentials, "source", Address("127.0.0.1", 1)) as client:
                start = time.monotonic()
                with pytest.raises(PeerUnavailableError):
                    await client.find("s")
                assert time.monotonic() - start < 10.0

    run(work())


def test_calls_during_a_hand_over_are_held_then_told_when_to_come_again(world, monkeypatch):
    monkeypatch.setattr("node.sessions.HOLD_S", 0.2)

    async def work():
        async with world.pair() as (source, giving, _, _):
            session = await giving.append(await giving.open("s"), prompt(40))
            live = await source.sessions.find("s")
            async with live.lock:
                with pytest.raises(PeerAnswerError) as refused:
                    await giving.append(session, [1])
            assert refused.value.peer_reason == "session_frozen"
            assert int(refused.value.hints["kvpack-retry-after-ms"]) > 0

    run(work())


def test_an_old_owner_says_where_the_session_went(world):
    async def work():
        async with world.pair() as (_, giving, target, _):
            session = await giving.append(await giving.open("s"), prompt(40))
            await move(giving, target, session)
            with pytest.raises(PeerAnswerError) as refused:
                await giving.get("s")
            assert refused.value.peer_reason == "session_moved"
            assert refused.value.hints == {
                "kvpack-owner": "target",
                "kvpack-owner-address": str(target.address),
            }

    run(work())


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_commands_open_move_copy_and_close_a_session(world, tmp_path):
    text = tmp_path / "text"
    text.write_text("Once upon a time. " * 40)

    async def work():
        async with world.pair() as (source, _, target, _):
            here, there = f"source@{source.address}", f"target@{target.address}"
            common = ("--credentials", world.credentials("client"))

            async def call(*arguments):
                result = await asyncio.to_thread(invoke, *arguments, *common)
                assert result.exit_code == 0, result.output
                return result.stdout

            await call("session", "open", "s", "--node", here, "--text", text)
            copied = json.loads(
                await call(
                    "migrate", "s", "--to", there, "--node", here, "--mode", "copy", "--json"
                )
            )
            assert (copied["session_id"], copied["continuation_verdict"]) == ("s-copy", "exact")
            shown = await call("migrate", "s", "--to", there, "--node", here)
            assert "exact" in shown and "s on target" in shown
            listed = [
                line.split("\t")[0]
                for line in (await call("session", "list", "--node", there)).splitlines()
            ]
            assert listed == ["session", "s", "s-copy"]
            # The old owner is asked, and the command follows.
            assert await call("session", "generate", "s", "--node", here, "--tokens", "8")
            assert (await target.sessions.find("s")).next_index >= 8
            assert (await call("session", "save", "s", "--node", there)).strip().endswith(".kvpack")
            await call("session", "close", "s", "--node", there)
            assert len(target.sessions) == 1

    run(work())


def test_texts_that_are_none_get_one_line(world, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xf6\x00\xff")
    (tmp_path / "empty").write_bytes(b"")
    for name, word in (("binary", "UTF-8"), ("empty", "empty"), ("none", "No such file")):
        options = ("--node", "source@127.0.0.1:1", "--credentials", world.credentials("client"))
        result = invoke("session", "open", "s", "--text", tmp_path / name, *options)
        assert result.exit_code == 2 and word in result.output
        assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("migrate", "s", "--to", "127.0.0.1:1", "--node", "127.0.0.1:2"), "say which node"),
        (("migrate", "../s", "--to", "a@b:1", "--node", "a@b:2"), "session_id"),
        (("migrate", "s", "--to", "a@b", "--node", "a@b:2"), "HOST:PORT"),
        (("migrate", "s", "--to", "x@127.0.0.1:1", "--node", "x@127.0.0.1:2"), "no pinned"),
        (("migrate", "s", "--to", "a@b:1", "--node", "a@b:1", "--as", "c"), "--mode copy"),
    ],
)
def test_bad_orders_get_one_line_and_an_exit_code(world, arguments, word):
    result = invoke(*arguments, "--credentials", world.credentials("client"))
    assert result.exit_code in (1, 2)
    assert word in result.output and len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize("plane", [Plane.MTLS, Plane.SOCKET])
def test_a_live_session_is_held_only_when_its_whole_blocks_have_left(world, plane, monkeypatch):
    """Also where the link takes less than is read: what is under way leaves while it serves."""
    send, put = blocking.send, Feed._put
    tokens = prompt(9 * 256 + 30)

    def send_late(*pieces):
        time.sleep(0.03)
        send(*pieces)

    async def put_late(feed, call, piece, told):
        await asyncio.sleep(0.03 if plane is Plane.MTLS else 0.0)
        await put(feed, call, piece, told)

    monkeypatch.setattr(blocking, "send", send_late)
    monkeypatch.setattr(Feed, "_put", put_late)

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, _taking):
            session = await giving.append(await giving.open("s"), tokens)
            wish = {"data_plane": plane_message(plane)}
            return await move(giving, target, session, **wish), target

    result, target = run(work())
    assert result.data_plane == plane.value
    layout = target.sessions.engine.model.layout
    rows = [WINDOW if layer.window_tokens else 29 for layer in layout.layers]
    rest = sum(count * layout.row_bytes(layer) for layer, count in enumerate(rows))
    rest += result.token_bytes + result.session_bytes
    assert result.payload_bytes - rest == 9 * (1 << 16)
    assert result.payload_bytes_after_zero == rest
