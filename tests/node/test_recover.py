"""Restarts of a target: what was committed serves again, what was open leaves nothing behind."""

from __future__ import annotations

import contextlib

import pytest
from node_support import HandSource, events, move, prompt, run

from node.errors import JournalError, PeerAnswerError


def test_a_moved_session_serves_again_after_a_restart_of_its_node(world):
    async def work():
        async with world.node("source") as (_, giving):
            async with world.node("target") as (target, taking):
                await move(giving, target, await giving.open("s"), prompt(140))
                before = await events(taking, await taking.get("s"), 140, 12)
            async with world.node("target") as (_, taking):
                restored = await taking.get("s")
                # The loss bound: its last published cut, here the one it moved with.
                assert (restored.position, restored.next_index) == (139, 140)
                after = await events(taking, restored, 140, 12)
            twin = await giving.append(await giving.open("twin"), prompt(140))
            return before, after, await events(giving, twin, 140, 12)

    before, after, twin = run(work())
    assert before == after == twin


def test_an_open_transfer_whose_source_resumed_is_aborted_by_a_restart_and_leaves_no_file(world):
    async def work():
        async with world.node("source") as (source, giving):
            async with (
                world.node("target") as (target, _),
                HandSource(world, source, target) as hand,
            ):
                await hand.take_cut("s", prompt(60))
                await hand.prepare()
                await hand.push()
                # Not a clean stop: the node must find its leftovers itself.
                spool = world.root / "target-data" / "spool"
                (spool / ".kvpack-00.tmp").write_bytes(b"left by a crash")
                (spool / "third.1.9.kvpack").write_bytes(b"published, never committed")
                token = hand.session.token
                hand.session.token = await source.sessions.directory.transfer(
                    "s", token, "source", bytes(16)
                )
            async with world.node("target") as (target, _):
                assert world.spool("target") == []
                async with HandSource(world, source, target) as again:
                    again.session, again.cut, again.chunks = hand.session, hand.cut, hand.chunks
                    with pytest.raises(Exception, match="number 1: ended as aborted"):
                        await again.prepare()
            assert (await giving.get("s")).next_index == 60

    run(work())


def test_a_commit_that_the_journal_missed_is_found_by_its_nonce(world, monkeypatch):
    async def lose(*_):
        raise JournalError("the disk went away")

    async def work():
        async with world.node("source") as (_, giving):
            async with world.node("target") as (target, _):
                with monkeypatch.context() as patch:
                    patch.setattr("node.migration.journal.Journal.record", lose)
                    await move(giving, target, await giving.open("s"), prompt(50))
            async with world.node("target") as (_, taking):
                assert (await taking.get("s")).next_index == 50

    run(work())


def test_a_session_that_was_never_published_is_lost_and_its_id_can_be_opened_again(world):
    async def work():
        async with world.node("source") as (_, client):
            old = await client.append(await client.open("s"), prompt(30))
        async with world.node("source") as (_, client):
            with pytest.raises(PeerAnswerError, match="not on this node"):
                await client.get("s")
            new = await client.open("s")
            assert new.token.revision > old.token.revision
            with pytest.raises(PeerAnswerError) as stale:
                await client.append(old, [1])
            assert stale.value.peer_reason == "stale_token"

    run(work())


def test_a_pack_that_was_damaged_on_disk_is_not_served(world):
    async def work():
        async with world.node("source") as (_, giving), contextlib.AsyncExitStack() as stack:
            target, _ = await stack.enter_async_context(world.node("target"))
            await move(giving, target, await giving.open("s"), prompt(50))
            await stack.aclose()
            path = world.root / "target-data" / "spool" / "source.1.1.kvpack"
            content = bytearray(path.read_bytes())
            content[len(content) // 3] ^= 1
            path.write_bytes(content)
            async with world.node("target") as (target, taking):
                assert len(target.sessions) == 0
                with pytest.raises(PeerAnswerError, match="not on this node"):
                    await taking.get("s")

    run(work())
