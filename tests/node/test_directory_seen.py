"""A directory that is older than what was seen of it: restored, and nobody adopted it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil

import pytest
from directory_support import FakeClock, nonce
from node_support import events, prompt, run

from node.directory_seen import Seen, SeenDirectory
from node.directory_sqlite import SqliteDirectory
from node.errors import DirectoryWentBackError, FencedError, PeerAnswerError
from node.lease import NodeLease
from node.server import running

ONE = b"1" * 16


class Files:
    """A directory file that can be backed up and restored, and what a node has seen of it."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / "directory.sqlite"
        self.backup = folder / "backup.sqlite"
        self.clock = FakeClock()

    def copy(self, source, destination):
        for suffix in ("", "-wal", "-shm"):
            (destination.parent / (destination.name + suffix)).unlink(missing_ok=True)
        shutil.copy(source, destination)

    @contextlib.asynccontextmanager
    async def opened(self, node="node"):
        directory = SqliteDirectory(self.path, self.clock)
        seen = Seen(self.folder / f"{node}-seen.sqlite")
        try:
            yield SeenDirectory(directory, seen), directory
        finally:
            await directory.close()
            await seen.close()

    def run(self, work):
        async def bounded():
            async with asyncio.timeout(20), self.opened() as (guarded, directory):
                return await work(guarded, directory)

        return asyncio.run(bounded())


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def test_a_restored_directory_is_refused_by_name_until_it_is_adopted(files):
    async def before(guarded, directory):
        await guarded.register("a", ONE, 10.0)
        return await guarded.claim("s", "a", nonce(1))

    async def lost(guarded, directory):
        token = (await guarded.owner("s")).token
        await guarded.transfer("s", token, "b", nonce(2))
        await guarded.renew("a", ONE, 10.0)

    async def after(guarded, directory):
        for ask in (
            guarded.register("a", ONE, 10.0),
            guarded.renew("a", ONE, 10.0),
            guarded.state(),
        ):
            with pytest.raises(DirectoryWentBackError, match=r"revision 1, but 1, 2 was seen"):
                await ask
        state = await directory.adopt()
        assert state.generation == 2
        assert await guarded.renew("a", ONE, 10.0) == state
        assert (await guarded.owner("s")).token.newer_than(token)

    token = files.run(before)
    files.copy(files.path, files.backup)
    files.run(lost)
    files.copy(files.backup, files.path)
    files.run(after)


def test_a_lower_generation_is_refused_wherever_a_token_is_received(files):
    async def before(guarded, directory):
        await guarded.claim("s", "a", nonce(1))
        await guarded.claim("gone", "a", nonce(2))

    async def adopt(guarded, directory):
        await directory.adopt()
        assert (await guarded.owner("s")).token.generation == 2

    async def after(guarded, directory):
        token = (await directory.owner("s")).token
        for ask in (
            guarded.owner("s"),
            guarded.watch("s", None, 1.0),
            guarded.owned_by("a"),
            guarded.transfer("s", token, "b", nonce(3)),
            guarded.claim("t", "b", nonce(4)),
        ):
            with pytest.raises(DirectoryWentBackError, match="generation 1 is below 2"):
                await ask
        # Adopting twice from one backup must not give a generation out twice.
        assert (await directory.adopt(above=2)).generation == 3
        assert (await guarded.owner("s")).token.generation == 3

    files.run(before)
    files.copy(files.path, files.backup)
    files.run(adopt)
    files.copy(files.backup, files.path)
    files.run(after)


def test_a_lease_is_not_renewed_by_a_directory_that_went_back(files):
    async def before(guarded, directory):
        await guarded.claim("s", "a", nonce(1))
        await guarded.state()

    async def after(guarded, directory):
        lease = NodeLease(guarded, "a", files.clock, 10.0)
        with pytest.raises(DirectoryWentBackError):
            await lease.start()
        await lease.renew()
        with pytest.raises(FencedError):
            lease.require()
        await lease.close()

    async def nothing(guarded, directory):
        return None

    files.run(nothing)
    files.copy(files.path, files.backup)
    files.run(before)
    files.copy(files.backup, files.path)
    files.run(after)


def test_tombstones_of_earlier_generations_and_replies_out_of_order_are_not_taken_for_old(files):
    async def work(guarded, directory):
        first = await guarded.claim("s", "a", nonce(1))
        await guarded.release("s", first)
        await directory.adopt()
        assert (await guarded.state()).generation == 2
        assert (await guarded.owner("s")).token == first
        tokens = [await directory.claim(f"t{number}", "a", nonce(number)) for number in range(3)]
        for number in (2, 0, 1):
            assert (await guarded.owner(f"t{number}")).token == tokens[number]

    files.run(work)


def test_another_directory_than_before_is_refused_by_name_until_it_is_adopted(files, caplog):
    """A file that was lost, or a mistyped path, is an empty directory: nothing is owned in it."""

    async def claim(guarded, directory):
        return await guarded.claim("s", "a", nonce(1))

    async def refused(guarded, directory):
        await directory.claim("s", "a", nonce(1))
        for ask in (guarded.register("a", ONE, 10.0), guarded.state(), guarded.owner("s")):
            with pytest.raises(DirectoryWentBackError, match="another directory than before"):
                await ask
        assert await guarded.owner("t") is None
        state = await directory.adopt()
        assert await guarded.state() == state
        assert (await guarded.owner("s")).node == "a"

    files.run(claim)
    for path in files.folder.glob("directory.sqlite*"):
        path.unlink()
    files.run(refused)
    assert "goes on with another directory than before" in caplog.text


# --- Nodes whose directory is adopted or restored under them. ---


def test_after_an_adoption_old_tokens_are_stale_and_live_sessions_go_on(world):
    async def work():
        async with world.node("source") as (_, client):
            old = await client.append(await client.open("s"), prompt(40))
            directory = SqliteDirectory(world.root / "directory.sqlite")
            await directory.adopt()
            await directory.close()
            for call in (client.append(old, [1]), events(client, old, 40, 2)):
                with pytest.raises(PeerAnswerError) as refused:
                    await call
                assert refused.value.peer_reason == "stale_token"
                assert "generation" in str(refused.value)
            new = await client.get("s")
            assert (new.token.generation, new.next_index) == (2, 40)
            assert len(await events(client, new, 40, 2)) == 2

    run(work())


def test_a_node_does_not_start_on_a_directory_that_was_restored_and_not_adopted(world):
    files = Files(world.root)

    async def work():
        async with world.node("source") as (_, client):
            await client.open("one")
        files.copy(files.path, files.backup)
        async with world.node("source") as (_, client):
            await client.open("two")
        files.copy(files.backup, files.path)
        with pytest.raises(DirectoryWentBackError, match="adopt"):
            async with running(world.config("source")):
                pass
        directory = SqliteDirectory(files.path)
        await directory.adopt()
        await directory.close()
        async with world.node("source") as (_, client):
            assert (await client.open("three")).token.generation == 2

    run(work())
