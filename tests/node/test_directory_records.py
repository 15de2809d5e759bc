"""What a directory's file remembers of its own: bounds, boots, files of before."""

from __future__ import annotations

import asyncio

import pytest
from directory_support import nonce

from node import directory_tables
from node.directory import (
    Ownership,
    OwnershipToken,
    Released,
    Whose,
    open_directory,
    whose,
)
from node.errors import LeaseLiveError

ONE, TWO = b"1" * 16, b"2" * 16


@pytest.fixture
def place(files):
    return files


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
