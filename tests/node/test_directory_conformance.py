"""What every directory does: one suite, on a file, on the same file over gRPC, and on a real etcd.

Leases are in ``test_directory_leases.py``; what only one kind has is in files of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from directory_support import nonce

from kvpack.errors import LimitError
from node import directory_remote, etcd_cluster
from node.directory import (
    OwnershipToken,
    Published,
    Released,
    settle,
    transfer_settled,
)
from node.errors import (
    DirectoryAmbiguousError,
    DirectoryError,
    LeaseLiveError,
    SessionExistsError,
    StaleTokenError,
)
from node.parked import store_owner


@pytest.fixture(autouse=True)
def roomy(monkeypatch):
    """Fifty writes at once may take a busy machine longer than one may take anywhere else."""
    for module in (etcd_cluster, directory_remote):
        for name in ("LOOK_S", "TRY_S", "WRITE_S"):
            monkeypatch.setattr(module, name, 50.0, raising=False)


def test_claim_transfer_resume_and_release_each_compare_the_whole_token(directories):
    async def work(directory):
        first = await directory.claim("s", "a", nonce(1))
        with pytest.raises(SessionExistsError):
            await directory.claim("s", "b", nonce(2))
        second = await directory.transfer("s", first, "b", nonce(3))
        entry = await directory.owner("s")
        assert (entry.node, entry.token, entry.nonce) == ("b", second, nonce(3))
        for stale in (first, OwnershipToken(bytes(16), 1, second.revision)):
            with pytest.raises(StaleTokenError):
                await directory.transfer("s", stale, "a", nonce(4))
            with pytest.raises(StaleTokenError):
                await directory.release("s", stale)
        third = await directory.transfer("s", second, "b", nonce(5))
        assert third.newer_than(second) and second.newer_than(first)
        assert [one.session_id for one in await directory.owned_by("b")] == ["s"]
        await directory.release("s", third)
        with pytest.raises(StaleTokenError):
            await directory.transfer("s", third, "b", nonce(6))
        again = await directory.claim("s", "a", nonce(7))
        assert again.newer_than(third)

    directories.run(work)


def test_of_fifty_contenders_one_claims_and_one_takes_over(directories):
    async def winners(writes, lost):
        done = await asyncio.gather(*writes, return_exceptions=True)
        assert all(isinstance(one, OwnershipToken | lost) for one in done)
        return [(number, one) for number, one in enumerate(done) if not isinstance(one, lost)]

    async def work(directory):
        claims = [directory.claim("s", "abc"[n % 3], nonce(n)) for n in range(50)]
        ((number, token),) = await winners(claims, SessionExistsError)
        entry = await directory.owner("s")
        assert (entry.token, entry.nonce) == (token, nonce(number))
        moves = [directory.transfer("s", token, "abc"[n % 3], nonce(100 + n)) for n in range(50)]
        ((number, taken),) = await winners(moves, StaleTokenError)
        entry = await directory.owner("s")
        assert (entry.token, entry.nonce) == (taken, nonce(100 + number))
        # Nobody else is said to own it, neither.
        owned = [one for node in "abc" for one in await directory.owned_by(node)]
        assert owned == [entry]

    directories.run(work)


def test_entries_and_identity_survive_a_restart(directories):
    async def claim(directory):
        return await directory.claim("s", "a", nonce(1))

    async def look(directory):
        return await directory.owner("s")

    token = directories.run(claim)
    assert directories.run(look).token == token


class Flaky:
    """A directory whose next transfer loses its reply: before or after it happened."""

    def __init__(self, directory, *, happened: bool, reachable: bool = True):
        self._directory = directory
        self._happened = happened
        self._reachable = reachable

    async def owner(self, session_id):
        if not self._reachable:
            raise DirectoryError("away")
        return await self._directory.owner(session_id)

    async def transfer(self, *args):
        if self._happened is None:
            return await self._directory.transfer(*args)
        happened, self._happened = self._happened, None
        if happened:
            await self._directory.transfer(*args)
        raise DirectoryAmbiguousError("reply lost")


@pytest.mark.parametrize("happened", [True, False])
def test_a_lost_reply_is_settled_by_nonce_and_happens_exactly_once(directories, happened):
    async def work(directory):
        token = await directory.claim("s", "a", nonce(1))
        flaky = Flaky(directory, happened=happened)
        new = await transfer_settled(flaky, "s", token, "b", nonce(2))
        entry = await directory.owner("s")
        assert (entry.node, entry.token) == ("b", new)
        assert new.newer_than(token)
        # Once: nothing stands between the two, and nothing comes after.
        assert await directory.transfer("s", token, "b", nonce(2)) == new
        assert (await directory.state()).revision == new.revision

    directories.run(work)


def test_a_lost_reply_is_not_taken_for_success_where_another_write_came_in_between(directories):
    async def work(directory):
        token = await directory.claim("s", "a", nonce(1))
        await directory.transfer("s", token, "a", nonce(3))
        with pytest.raises(StaleTokenError):
            await settle(directory, "s", token, "b", nonce(2))

    directories.run(work)


@pytest.mark.parametrize("lost", ["entry", "writes"])
def test_a_directory_that_lost_the_entry_or_the_last_writes_settles_nothing(directories, lost):
    async def work(directory):
        token = await directory.claim("s", "a", nonce(1))
        entry = await directory.owner("s")
        if lost == "writes":
            token = dataclasses.replace(token, revision=token.revision + 5)

        class Back(Flaky):
            async def owner(self, session_id):
                return None if lost == "entry" else entry

        flaky = Back(directory, happened=None)
        with pytest.raises(DirectoryAmbiguousError):
            await settle(flaky, "s", token, "b", nonce(2))
        assert (await directory.owner("s")).node == "a"

    directories.run(work)


def test_a_directory_that_stays_away_leaves_the_question_open(directories):
    async def work(directory):
        token = await directory.claim("s", "a", nonce(1))
        flaky = Flaky(directory, happened=True, reachable=False)
        with pytest.raises(DirectoryAmbiguousError):
            await transfer_settled(flaky, "s", token, "b", nonce(2))

    directories.run(work)


def test_a_session_that_its_owner_gave_to_a_store_is_taken_from_it_and_never_taken_over(
    directories,
):
    store = store_owner(b"i" * 16)

    async def work(directory):
        first = await directory.claim("s", "a", nonce(1))
        await directory.put("s", first, b"which cut")
        second = await directory.transfer("s", first, store, nonce(2))
        assert (await directory.owner("s")).node == store
        assert await directory.transfer("s", first, store, nonce(2)) == second
        with pytest.raises(StaleTokenError):
            await directory.transfer("s", first, "a", nonce(3))
        with pytest.raises(LeaseLiveError, match="kvnode session restore"):
            await directory.takeover("s", second, "b", nonce(4))
        assert await directory.lease(store) is None
        assert await directory.published("s") == Published(first, b"which cut")
        third = await directory.transfer("s", second, "b", nonce(5))
        assert third.newer_than(second) and (await directory.owner("s")).node == "b"

    directories.run(work)


def test_a_released_session_is_told_from_one_that_was_never_there(directories):
    async def work(directory):
        assert await directory.owner("s") is None
        first = await directory.claim("s", "a", nonce(1))
        second = await directory.transfer("s", first, "b", nonce(2))
        with pytest.raises(StaleTokenError):
            await directory.release("s", first)
        await directory.release("s", second)
        tombstone = await directory.owner("s")
        assert tombstone == Released("s", "b", second, tombstone.released_revision)
        assert tombstone.released_revision > second.revision
        await directory.release("s", second)  # a repeat whose first reply was lost
        assert await directory.owner("s") == tombstone
        for token in (first, second):
            with pytest.raises(StaleTokenError):
                await directory.transfer("s", token, "a", nonce(3))
        third = await directory.claim("s", "c", nonce(4))
        assert third.newer_than(second) and third.revision > tombstone.released_revision
        assert (await directory.owner("s")).node == "c"

    directories.run(work)


def test_a_value_is_written_only_under_the_current_token(directories):
    async def work(directory):
        first = await directory.claim("s", "a", nonce(1))
        assert await directory.published("s") is None
        await directory.put("s", first, b"cut 100")
        second = await directory.transfer("s", first, "b", nonce(2))
        with pytest.raises(StaleTokenError):
            await directory.put("s", first, b"cut 200")
        # The last published cut is what the next owner can go on from.
        assert await directory.published("s") == Published(first, b"cut 100")
        await directory.put("s", second, b"")
        assert (await directory.published("s")).token == second
        with pytest.raises(LimitError, match=r"directory\.value"):
            await directory.put("s", second, bytes(4097))
        await directory.put("s", second, bytes(4096))
        assert (await directory.owner("s")).token == second
        await directory.release("s", second)
        assert await directory.published("s") is None
        with pytest.raises(StaleTokenError):
            await directory.put("s", second, b"late")
        await directory.claim("s", "c", nonce(3))
        assert await directory.published("s") is None

    directories.run(work)


def test_a_watch_ends_with_the_change_or_with_its_time(directories):
    async def work(directory):
        token = await directory.claim("s", "a", nonce(1))
        seen = await directory.owner("s")
        assert await directory.watch("s", None, 5.0) == seen
        assert await directory.watch("s", seen, 0.15) == seen
        watching = asyncio.create_task(directory.watch("s", seen, 40.0))
        await asyncio.sleep(0.05)
        async with directories.opened() as other:
            await other.transfer("s", token, "b", nonce(2))
        found = await asyncio.wait_for(watching, 20.0)
        assert found.node == "b"
        await directory.release("s", found.token)
        assert isinstance(await directory.watch("s", found, 20.0), Released)

    directories.run(work)


def test_a_repeated_write_is_done_once(directories):
    async def work(directory):
        first = await directory.claim("s", "a", nonce(1))
        assert await directory.claim("s", "a", nonce(1)) == first
        with pytest.raises(SessionExistsError):
            await directory.claim("s", "b", nonce(1))
        second = await directory.transfer("s", first, "b", nonce(2))
        assert await directory.transfer("s", first, "b", nonce(2)) == second
        with pytest.raises(StaleTokenError):
            await directory.transfer("s", first, "c", nonce(2))
        assert (await directory.state()).revision == second.revision

    directories.run(work)


def test_entries_of_a_node_are_listed_whole_by_id(directories, monkeypatch):
    monkeypatch.setattr("node.directory_sqlite.PAGE_MAX", 3)
    monkeypatch.setattr("node.directory_remote.PAGE", 3)

    async def work(directory):
        for number in range(10):
            await directory.claim(f"s{number}", "ab"[number % 2], nonce(number))
        return [entry.session_id for entry in await directory.owned_by("a")]

    assert directories.run(work) == ["s0", "s2", "s4", "s6", "s8"]
