"""Directories: one owner, one winner, tokens that only grow, replies that get lost.

Each test runs against the file and against the same file on another node.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import stat
from pathlib import Path

import pytest
from directory_support import Place, nonce

from node.directory import (
    OwnershipToken,
    Published,
    open_directory,
    settle,
    transfer_settled,
)
from node.errors import (
    DirectoryAmbiguousError,
    DirectoryError,
    LeaseLiveError,
    SessionExistsError,
    StaleTokenError,
    UsageError,
)
from node.parked import store_owner


@pytest.fixture
def url(tmp_path):
    return f"sqlite:{tmp_path / 'directory.sqlite'}"


def with_directory(url, work):
    return Place(Path(url.removeprefix("sqlite:"))).run(work)


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


def test_entries_and_identity_survive_a_restart(directories):
    async def claim(directory):
        return await directory.claim("s", "a", nonce(1))

    async def look(directory):
        return await directory.owner("s")

    token = directories.run(claim)
    assert directories.run(look).token == token


def _contend(path: str, node: str, rounds: int, start, results) -> None:
    """Take the session over from each token that is seen; tell which takeovers succeeded."""

    async def work():
        directory = open_directory(f"sqlite:{path}")
        won = []
        while True:
            entry = await directory.owner("s")
            number = int.from_bytes(entry.nonce, "big")
            if number == rounds:
                await directory.close()
                return won
            try:
                token = await directory.transfer("s", entry.token, node, nonce(number + 1))
            except StaleTokenError:
                continue
            won.append((number, token.revision))

    start.wait(20)
    results.put((node, asyncio.run(work())))


def test_of_contenders_in_four_processes_exactly_one_takes_over_from_each_token(tmp_path, url):
    rounds = 200

    async def claim(directory):
        return await directory.claim("s", "nobody", nonce(0))

    with_directory(url, claim)
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    path = str(tmp_path / "directory.sqlite")
    workers = [
        context.Process(target=_contend, args=(path, f"n{i}", rounds, start, results))
        for i in range(4)
    ]
    for worker in workers:
        worker.start()
    start.set()
    won = [entry for _ in workers for entry in results.get(timeout=60)[1]]
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0
    assert sorted(number for number, _ in won) == list(range(rounds))
    revisions = [revision for _, revision in sorted(won)]
    assert revisions == sorted(set(revisions))


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
        assert new.revision == token.revision + 1

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


def test_the_file_is_private_and_neither_a_link_nor_another_programs_file(tmp_path, url):
    async def nothing(directory):
        return None

    old = os.umask(0)
    try:
        with_directory(url, nothing)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "directory.sqlite").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "directory.sqlite")
    (tmp_path / "text").write_text("not a database, but long enough to look like a file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "text", "pipe", "missing/folder"):
        with pytest.raises(DirectoryError):
            open_directory(f"sqlite:{tmp_path / name}")


@pytest.mark.parametrize(
    "url",
    [
        *("sqlite:", "sqlite", "etcd://a", "/tmp/x", "", "grpc:a@h:1", "grpc://h:1", "grpc://@h:1"),
        *("grpc://a@h", "grpc://a@:1", "grpc://a@h:99999", "grpc://a@127.0.0.1:1"),
    ],
)
def test_other_addresses_are_a_usage_error(url):
    with pytest.raises(UsageError):
        open_directory(url)


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
