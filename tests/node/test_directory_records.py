"""What a directory remembers: tombstones, guarded values, changes, leases, the generation."""

from __future__ import annotations

import asyncio

import pytest
from directory_support import nonce

from kvpack.errors import LimitError
from node import directory_tables
from node.config import LEASE_S
from node.directory import (
    Ownership,
    OwnershipToken,
    Published,
    Released,
    Whose,
    open_directory,
    whose,
)
from node.errors import LeaseLiveError, LeaseLostError, SessionExistsError, StaleTokenError

ONE, TWO = b"1" * 16, b"2" * 16


@pytest.fixture
def place(directories):
    return directories


def test_a_released_session_is_told_from_one_that_was_never_there(place):
    async def work(directory):
        assert await directory.owner("s") is None
        first = await directory.claim("s", "a", nonce(1))
        second = await directory.transfer("s", first, "b", nonce(2))
        with pytest.raises(StaleTokenError):
            await directory.release("s", first)
        await directory.release("s", second)
        tombstone = await directory.owner("s")
        assert tombstone == Released("s", "b", second, second.revision + 1)
        await directory.release("s", second)  # a repeat whose first reply was lost
        assert await directory.owner("s") == tombstone
        for token in (first, second):
            with pytest.raises(StaleTokenError):
                await directory.transfer("s", token, "a", nonce(3))
        third = await directory.claim("s", "c", nonce(4))
        assert third.newer_than(second) and third.revision > tombstone.released_revision
        assert (await directory.owner("s")).node == "c"

    place.run(work)


def test_tombstones_survive_a_restart_and_are_bounded(place, monkeypatch):
    monkeypatch.setattr(directory_tables, "TOMBSTONE_SPAN", 20)

    async def fill(directory):
        tokens = {}
        for number in range(30):
            tokens[number] = await directory.claim(f"s{number}", "a", nonce(number))
            await directory.release(f"s{number}", tokens[number])
        return tokens, (await directory.state()).revision

    async def look(directory):
        return [await directory.owner(f"s{number}") for number in range(30)]

    tokens, revision = place.run(fill)
    records = place.run(look)
    kept = [number for number, record in enumerate(records) if record is not None]
    assert kept == list(range(20, 30))
    # Whoever holds a token of the last 20 revisions still learns that it was released.
    assert all(number in kept for number in tokens if tokens[number].revision > revision - 20)
    assert whose(records[0], "b", tokens[0]) is Whose.UNKNOWN


def test_only_what_is_not_older_than_our_token_says_anything_about_the_owner():
    def token(generation, revision, directory=ONE):
        return OwnershipToken(directory, generation, revision)

    ours = token(2, 5)
    for record, expected in (
        (None, Whose.UNKNOWN),
        (Ownership("s", "me", token(2, 5), ONE), Whose.OURS),
        (Ownership("s", "me", token(2, 6), ONE), Whose.OURS),
        (Ownership("s", "me", token(2, 4), ONE), Whose.UNKNOWN),
        (Ownership("s", "other", token(2, 6), ONE), Whose.OTHERS),
        (Ownership("s", "other", token(3, 1), ONE), Whose.OTHERS),
        (Ownership("s", "other", token(2, 4), ONE), Whose.UNKNOWN),
        (Ownership("s", "other", token(1, 9), ONE), Whose.UNKNOWN),
        (Ownership("s", "other", token(9, 9, TWO), ONE), Whose.UNKNOWN),
        (Released("s", "other", token(2, 6), 7), Whose.OTHERS),
        (Released("s", "me", token(2, 5), 7), Whose.OTHERS),
        (Released("s", "other", token(2, 4), 7), Whose.UNKNOWN),
        (Released("s", "other", token(1, 9), 10), Whose.UNKNOWN),
    ):
        assert whose(record, "me", ours) is expected, record


def test_a_value_is_written_only_under_the_current_token(place):
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

    place.run(work)


def test_a_watch_ends_with_the_change_or_with_its_time(place):
    async def work(directory):
        token = await directory.claim("s", "a", nonce(1))
        seen = await directory.owner("s")
        assert await directory.watch("s", None, 5.0) == seen
        assert await directory.watch("s", seen, 0.15) == seen
        watching = asyncio.create_task(directory.watch("s", seen, 20.0))
        await asyncio.sleep(0.05)
        async with place.opened() as other:
            await other.transfer("s", token, "b", nonce(2))
        found = await asyncio.wait_for(watching, 5.0)
        assert found.node == "b"
        await directory.release("s", found.token)
        assert isinstance(await directory.watch("s", found, 20.0), Released)

    place.run(work)


def test_a_repeated_write_is_done_once(place):
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

    place.run(work)


def test_a_session_is_taken_over_only_when_its_owners_lease_is_over(place):
    async def work(directory):
        await directory.register("a", ONE, 10.0)
        token = await directory.claim("s", "a", nonce(1))
        place.clock.move(9.9)
        with pytest.raises(LeaseLiveError, match=r"node a.*0\.1 s"):
            await directory.takeover("s", token, "b", nonce(2))
        await directory.renew("a", ONE, 10.0)
        place.clock.move(9.9)
        assert (await directory.owner("s")).token == token  # a renewal moves no token
        with pytest.raises(LeaseLiveError):
            await directory.takeover("s", token, "b", nonce(2))
        place.clock.move(0.2)
        assert (await directory.lease("a")).left_s == 0
        # Never silently: that the lease is over changes nothing by itself.
        assert (await directory.owner("s")).token == token
        with pytest.raises(SessionExistsError):
            await directory.claim("s", "b", nonce(3))
        taken = await directory.takeover("s", token, "b", nonce(4))
        assert taken.newer_than(token)
        await directory.renew("a", ONE, 10.0)
        for stale in (
            directory.transfer("s", token, "a", nonce(5)),
            directory.put("s", token, b"x"),
            directory.release("s", token),
            directory.takeover("s", token, "a", nonce(6)),
        ):
            with pytest.raises(StaleTokenError):
                await stale
        assert (await directory.owner("s")).node == "b"

    place.run(work)


def test_an_owner_that_never_registered_is_given_one_lease_from_the_first_try(place):
    async def work(directory):
        token = await directory.claim("s", "a", nonce(1))
        for _ in range(2):
            with pytest.raises(LeaseLiveError):
                await directory.takeover("s", token, "b", nonce(2))
            place.clock.move(LEASE_S / 2 + 0.1)
        taken = await directory.takeover("s", token, "b", nonce(2))
        assert taken.newer_than(token)
        # What was counted down for it is no process's: it may still come and register.
        await directory.renew("a", ONE, 10.0)

    place.run(work)


def test_a_lease_of_an_earlier_boot_counts_from_when_it_is_looked_at(place):
    async def work(directory):
        place.clock.restart(1_000_000.0)
        await directory.register("a", ONE, 10.0)
        token = await directory.claim("s", "a", nonce(1))
        place.clock.restart(5.0)
        with pytest.raises(LeaseLiveError):
            await directory.takeover("s", token, "b", nonce(2))
        place.clock.move(9.0)
        with pytest.raises(LeaseLiveError):
            await directory.takeover("s", token, "b", nonce(2))
        place.clock.move(1.1)
        await directory.takeover("s", token, "b", nonce(2))

    place.run(work)


def test_of_two_processes_of_one_name_the_later_one_holds_the_lease(place):
    async def work(directory):
        await directory.register("a", ONE, 10.0)
        await directory.register("a", TWO, 10.0)
        with pytest.raises(LeaseLostError):
            await directory.renew("a", ONE, 10.0)
        await directory.expire("a", ONE)
        assert (await directory.lease("a")).left_s == 10.0
        await directory.expire("a", TWO)
        assert (await directory.lease("a")).left_s == 0
        await directory.renew("a", TWO, 10.0)
        assert await directory.lease("b") is None
        for ttl_s in (0.0, 0.4, 601.0):
            with pytest.raises(LimitError, match=r"lease\.ttl"):
                await directory.register("a", ONE, ttl_s)

    place.run(work)


def test_adopting_makes_every_earlier_token_stale_and_lets_leases_begin_again(place):
    async def work(directory):
        await directory.register("a", ONE, 10.0)
        old = await directory.claim("s", "a", nonce(1))
        gone = await directory.claim("gone", "a", nonce(2))
        await directory.release("gone", gone)
        before = await directory.state()
        place.clock.move(100.0)
        after = await directory.adopt()
        assert (after.directory_id, after.generation) == (before.directory_id, 2)
        for stale in (
            directory.transfer("s", old, "b", nonce(3)),
            directory.takeover("s", old, "b", nonce(3)),
            directory.put("s", old, b"x"),
            directory.release("s", old),
        ):
            with pytest.raises(StaleTokenError, match="generation 1"):
                await stale
        entry = await directory.owner("s")
        assert entry.node == "a" and entry.token.newer_than(old)
        with pytest.raises(LeaseLiveError):
            await directory.takeover("s", entry.token, "b", nonce(4))
        place.clock.move(10.1)
        await directory.takeover("s", entry.token, "b", nonce(4))
        assert (await directory.owner("gone")).token == gone
        assert (await directory.adopt(above=7)).generation == 8

    place.run(work)


def test_a_file_of_the_first_schema_is_taken_over_as_it_is(place, tmp_path):
    """Entries made before there were tombstones and leases keep their tokens."""
    import sqlite3

    old = tmp_path / "old.sqlite"
    connection = sqlite3.connect(old)
    connection.execute(f"PRAGMA application_id={directory_tables.APPLICATION_ID:d}")
    for statement in directory_tables.SCHEMA[:2]:
        connection.execute(statement)
    connection.execute("INSERT INTO directory VALUES (1, ?, 1, 7)", (ONE,))
    connection.execute("INSERT INTO ownership VALUES ('s', 'a', 7, ?)", (nonce(1),))
    connection.commit()
    connection.close()

    async def work():
        directory = open_directory(f"sqlite:{old}")
        try:
            entry = await directory.owner("s")
            assert entry == Ownership("s", "a", OwnershipToken(ONE, 1, 7), nonce(1))
            await directory.release("s", entry.token)
            return await directory.owner("s")
        finally:
            await directory.close()

    assert asyncio.run(work()) == Released("s", "a", OwnershipToken(ONE, 1, 7), 8)


def test_entries_of_a_node_are_listed_whole_by_id(place, monkeypatch):
    monkeypatch.setattr("node.directory_sqlite.PAGE_MAX", 3)
    monkeypatch.setattr("node.directory_remote.PAGE", 3)

    async def work(directory):
        for number in range(10):
            await directory.claim(f"s{number}", "ab"[number % 2], nonce(number))
        return [entry.session_id for entry in await directory.owned_by("a")]

    assert place.run(work) == ["s0", "s2", "s4", "s6", "s8"]
