"""Restarts of a target: what was committed serves again, what was open leaves nothing behind."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest
from node_support import HandSource, events, move, prompt, run

from node.directory_sqlite import SqliteDirectory
from node.errors import (
    DirectoryAmbiguousError,
    DirectoryError,
    JournalError,
    PeerAnswerError,
    StaleTokenError,
)


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


async def published(hand):
    """Bring a transfer to its published pack, and lose its compare-and-swap on the way."""
    directory = hand.target.sessions.directory
    writes = []

    async def late(*write):
        writes.append(write)
        raise DirectoryAmbiguousError("the reply is lost, and the write under way")

    await hand.take_cut("s", prompt(60))
    digest = await hand.boundary_digest()
    await hand.prepare()
    await hand.push()
    await hand.seal(digest)
    real, directory.transfer = directory.transfer, late
    with pytest.raises(Exception, match="under way"):
        await hand.commit()
    directory.transfer = real
    return writes[0]


def test_a_compare_and_swap_that_is_still_under_way_at_a_restart_is_finished_by_a_write(world):
    async def work():
        async with world.node("source") as (source, _):
            async with (
                world.node("target") as (target, _),
                HandSource(world, source, target) as hand,
            ):
                late = await published(hand)
            async with world.node("target") as (target, taking):
                assert (await taking.get("s")).next_index == 60
                # The first write arrives at last, and finds that it has happened.
                with contextlib.suppress(StaleTokenError):
                    await source.sessions.directory.transfer(*late)
                session = await taking.get("s")
                assert len(await events(taking, session, 60, 4)) == 4

    run(work())


def test_a_pack_whose_session_the_directory_does_not_know_is_kept_for_a_later_start(world):
    async def work():
        async with world.node("source") as (source, _):
            async with (
                world.node("target") as (target, _),
                HandSource(world, source, target) as hand,
            ):
                late = await published(hand)
            with forgotten(world, "s"):
                async with world.node("target") as (target, _):
                    assert len(target.sessions) == 0
            assert world.spool("target") == ["source.1.1.kvpack"]
            async with world.node("target") as (target, taking):
                assert (await taking.get("s")).next_index == 60
            # The same for a session that was committed long ago.
            with forgotten(world, "s"):
                async with world.node("target") as (target, _):
                    assert len(target.sessions) == 0
            async with world.node("target") as (_, taking):
                assert (await taking.get("s")).next_index == 60
            assert late

    run(work())


@contextlib.contextmanager
def forgotten(world, session_id):
    """The directory without one entry."""
    with contextlib.closing(sqlite3.connect(world.root / "directory.sqlite")) as connection:
        row = connection.execute("SELECT * FROM ownership WHERE session_id = ?", (session_id,))
        values = row.fetchone()
        connection.execute("DELETE FROM ownership WHERE session_id = ?", (session_id,))
        connection.commit()
        yield
        connection.execute("DELETE FROM ownership WHERE session_id = ?", (session_id,))
        connection.execute("INSERT INTO ownership VALUES (?, ?, ?, ?)", values)
        connection.commit()


def test_a_pack_that_the_journal_missed_survives_a_move_that_failed_since(world, monkeypatch):
    async def lose(*_):
        raise JournalError("the disk went away")

    async def work():
        async with world.node("source") as (_, giving):
            async with world.node("target") as (target, taking):
                with monkeypatch.context() as patch:
                    patch.setattr("node.migration.journal.Journal.record", lose)
                    await move(giving, target, await giving.open("s"), prompt(50))
                session = await target.sessions.find("s")
                directory = target.sessions.directory
                # It was to move on, and stayed: the nonce of its arrival is overwritten.
                session.token = await directory.transfer("s", session.token, "target", bytes(16))
                assert (await taking.get("s")).next_index == 51
            async with world.node("target") as (_, taking):
                assert (await taking.get("s")).next_index == 50

    run(work())


def test_an_id_that_is_being_handed_over_cannot_be_opened_anew(world):
    async def work():
        async with (
            world.pair() as (source, _, target, taking),
            HandSource(world, source, target) as hand,
        ):
            write = await published(hand)
            await target.sessions.directory.transfer(*write)
            # The directory says that it is this node's, and this node does not have it yet.
            with pytest.raises(PeerAnswerError) as refused:
                await taking.open("s")
            assert refused.value.peer_reason == "session_exists"
            assert (await hand.commit()).first_index == 60
            assert (await taking.get("s")).next_index == 61

    run(work())


def test_a_start_that_cannot_settle_a_transfer_fails_and_the_next_one_serves(world, monkeypatch):
    async def lose(*_):
        raise JournalError("the disk went away")

    owner, reads = SqliteDirectory.owner, []

    async def away_once(self, session_id):
        reads.append(session_id)
        if len(reads) == 1:
            raise DirectoryError("away for one read")
        return await owner(self, session_id)

    async def work():
        async with world.node("source") as (_, giving):
            async with world.node("target") as (target, _):
                with monkeypatch.context() as patch:
                    patch.setattr("node.migration.journal.Journal.record", lose)
                    await move(giving, target, await giving.open("s"), prompt(50))
            with monkeypatch.context() as patch:
                patch.setattr(SqliteDirectory, "owner", away_once)
                # Were it to start, the session would be owned here, and served by nobody.
                with pytest.raises(DirectoryError, match="away for one read"):
                    async with world.node("target"):
                        pass
            async with world.node("target") as (_, taking):
                assert (await taking.get("s")).next_index == 50

    run(work())


def test_a_raise_of_the_process_before_that_arrives_late_does_not_lose_the_session(
    world, monkeypatch
):
    owned_by = SqliteDirectory.owned_by

    async def then_a_late_write(self, node):
        owned = await owned_by(self, node)
        for entry in owned:
            await self.transfer(entry.session_id, entry.token, node, bytes(16))
        return owned

    async def work():
        async with world.node("source") as (_, giving):
            async with world.node("target") as (target, _):
                await move(giving, target, await giving.open("s"), prompt(50))
            with monkeypatch.context() as patch:
                patch.setattr(SqliteDirectory, "owned_by", then_a_late_write)
                async with world.node("target") as (_, taking):
                    assert (await taking.get("s")).next_index == 50

    run(work())


def test_an_entry_that_comes_back_while_a_start_looks_is_restored_and_not_let_go(
    world, monkeypatch
):
    async def work():
        async with world.node("source") as (_, giving):
            async with world.node("target") as (target, _):
                await move(giving, target, await giving.open("s"), prompt(50))

            async def away(*_):
                return []

            with monkeypatch.context() as patch:
                patch.setattr("node.directory_sqlite.SqliteDirectory.owned_by", away)
                async with world.node("target") as (target, taking):
                    assert (await taking.get("s")).next_index == 50
            async with world.node("target") as (_, taking):
                assert (await taking.get("s")).next_index == 50

    run(work())
