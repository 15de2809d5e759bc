"""The replay ledger: what it refuses, what it survives, what it forgets."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import JournalError, NodeBusyError, ReplayError
from node.migration.journal import (
    OPEN_PER_SOURCE_MAX,
    REPLAY_SPAN,
    Entry,
    Journal,
    TransferKey,
    Verdict,
    judge,
)
from node.migration.table import TARGET_ENDED, TargetState

A, B = b"a" * 32, b"b" * 32


def key(number: int, source: str = "source", epoch: int = 1) -> TransferKey:
    return TransferKey(epoch, source, number)


@pytest.mark.parametrize("state", TargetState)
def test_a_known_number_is_open_for_its_own_prepare_only(state):
    entry = Entry(key(7), A, "s", state)
    if state in TARGET_ENDED:
        for digest in (A, B):
            with pytest.raises(ReplayError, match="ended"):
                judge(0, entry, 1, 7, digest)
        return
    assert judge(0, entry, 1, 7, A) is Verdict.AGAIN
    with pytest.raises(ReplayError, match="another"):
        judge(0, entry, 1, 7, B)


@given(st.integers(0, 50), st.integers(1, 100), st.integers(0, OPEN_PER_SOURCE_MAX))
def test_an_unknown_number_is_new_above_the_floor_and_below_the_bound(floor, number, open_count):
    if number <= floor:
        with pytest.raises(ReplayError, match="floor"):
            judge(floor, None, open_count, number, A)
    elif open_count >= OPEN_PER_SOURCE_MAX:
        with pytest.raises(NodeBusyError):
            judge(floor, None, open_count, number, A)
    else:
        assert judge(floor, None, open_count, number, A) is Verdict.NEW


def with_journal(path, work):
    async def run():
        journal = Journal(path)
        try:
            return await work(journal)
        finally:
            await journal.close()

    return asyncio.run(run())


def test_what_was_reserved_and_given_out_survives_a_restart(tmp_path):
    path = tmp_path / "journal.sqlite"

    async def first(journal):
        assert await journal.reserve(key(1), A, "s") is Verdict.NEW
        assert await journal.reserve(key(1), A, "s") is Verdict.AGAIN
        # Another source, or another epoch, counts by itself.
        assert await journal.reserve(key(1, "other"), A, "s") is Verdict.NEW
        assert await journal.reserve(key(1, epoch=2), A, "s") is Verdict.NEW
        await journal.record(key(1), TargetState.COMMITTED, "p.kvpack")
        return [await journal.next_number("t", 1) for _ in range(3)]

    async def second(journal):
        with pytest.raises(ReplayError):
            await journal.reserve(key(1), A, "s")
        assert (await journal.find(key(1))).state is TargetState.COMMITTED
        assert {one.key for one in await journal.open_entries()} == {
            key(1, "other"),
            key(1, epoch=2),
        }
        assert await journal.held_packs() == {"s": "p.kvpack"}
        # A pack that came since is not let go with the one before it.
        await journal.let_go("s", "older.kvpack")
        assert await journal.held_packs() == {"s": "p.kvpack"}
        await journal.let_go("s", "p.kvpack")
        assert await journal.held_packs() == {}
        return await journal.next_number("t", 1), await journal.next_number("u", 1)

    assert with_journal(path, first) == [1, 2, 3]
    assert with_journal(path, second) == (4, 1)


def test_numbers_may_come_in_any_order_but_none_twice_and_none_from_below_the_floor(tmp_path):
    async def work(journal):
        for number in (5, 3, 9, 4):
            assert await journal.reserve(key(number), A, "s") is Verdict.NEW
            await journal.record(key(number), TargetState.ABORTED)
        for number in (3, 4, 5, 9):
            with pytest.raises(ReplayError):
                await journal.reserve(key(number), A, "s")
        far = 9 + REPLAY_SPAN
        await journal.reserve(key(far), A, "s")
        # The floor followed to 9: what ended below is forgotten, and refused all the same.
        assert await journal.find(key(3)) is None
        for number in (1, 3, 9):
            with pytest.raises(ReplayError, match="floor"):
                await journal.reserve(key(number), A, "s")
        assert await journal.reserve(key(10), A, "s") is Verdict.NEW

    with_journal(tmp_path / "journal.sqlite", work)


def test_an_open_transfer_below_the_floor_is_kept(tmp_path):
    async def work(journal):
        await journal.reserve(key(1), A, "s")
        await journal.reserve(key(5000), A, "s")
        assert await journal.reserve(key(1), A, "s") is Verdict.AGAIN
        assert (await journal.find(key(1))).state is TargetState.OPEN

    with_journal(tmp_path / "journal.sqlite", work)


def test_open_transfers_of_one_source_are_bounded(tmp_path):
    async def work(journal):
        for number in range(1, OPEN_PER_SOURCE_MAX + 1):
            await journal.reserve(key(number), A, "s")
        with pytest.raises(NodeBusyError):
            await journal.reserve(key(99), A, "s")
        await journal.reserve(key(99, "other"), A, "s")

    with_journal(tmp_path / "journal.sqlite", work)


def test_a_journal_that_cannot_be_opened_says_so(tmp_path):
    with pytest.raises(JournalError):
        Journal(tmp_path / "missing" / "journal.sqlite")
