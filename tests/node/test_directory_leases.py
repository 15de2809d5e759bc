"""Leases of nodes, on every kind of directory. A file's clock is moved; an etcd's time goes by."""

from __future__ import annotations

import pytest
from directory_support import nonce

from kvpack.errors import LimitError
from node.errors import LeaseLiveError, LeaseLostError, SessionExistsError, StaleTokenError

ONE, TWO = b"1" * 16, b"2" * 16


def test_a_session_is_taken_over_only_when_its_owners_lease_is_over(directories):
    async def work(directory):
        running = directories.begun()
        await directory.register("a", ONE, directories.ttl_s)
        token = await directory.claim("s", "a", nonce(1))
        await directories.part(0.7)
        with running(), pytest.raises(LeaseLiveError, match=r"node a, runs for another \d"):
            await directory.takeover("s", token, "b", nonce(2))
        running = directories.begun()
        await directory.renew("a", ONE, directories.ttl_s)
        await directories.part(0.7)
        assert (await directory.owner("s")).token == token  # a renewal moves no token
        with running(), pytest.raises(LeaseLiveError):
            await directory.takeover("s", token, "b", nonce(2))
        await directories.outlast(directory, "a")
        # Never silently: that the lease is over changes nothing by itself.
        assert (await directory.owner("s")).token == token
        with pytest.raises(SessionExistsError):
            await directory.claim("s", "b", nonce(3))
        taken = await directory.takeover("s", token, "b", nonce(4))
        assert taken.newer_than(token)
        # It comes back, and may: but not to what was taken from it.
        await directory.renew("a", ONE, directories.ttl_s)
        for stale in (
            directory.transfer("s", token, "a", nonce(5)),
            directory.put("s", token, b"x"),
            directory.release("s", token),
            directory.takeover("s", token, "a", nonce(6)),
        ):
            with pytest.raises(StaleTokenError):
                await stale
        assert (await directory.owner("s")).node == "b"

    directories.run(work)


def test_an_owner_that_never_registered_is_given_one_lease_from_the_first_try(
    directories, monkeypatch
):
    monkeypatch.setattr(directories.default_lease, directories.ttl_s)

    async def work(directory):
        token = await directory.claim("s", "a", nonce(1))
        running = directories.begun()
        for _ in range(2):
            with running(), pytest.raises(LeaseLiveError):
                await directory.takeover("s", token, "b", nonce(2))
            await directories.part(0.4)
        await directories.outlast(directory, "a")
        taken = await directory.takeover("s", token, "b", nonce(2))
        assert taken.newer_than(token)
        # What was counted down for it is no process's: it may still come and register.
        await directory.renew("a", ONE, directories.ttl_s)

    directories.run(work)


def test_of_two_processes_of_one_name_the_later_one_holds_the_lease(directories):
    async def work(directory):
        await directory.register("a", ONE, 10.0)
        await directory.register("a", TWO, 10.0)
        with pytest.raises(LeaseLostError):
            await directory.renew("a", ONE, 10.0)
        await directory.expire("a", ONE)
        assert 0.0 < (await directory.lease("a")).left_s <= 10.0
        await directory.expire("a", TWO)
        assert (await directory.lease("a")).left_s == 0
        await directory.renew("a", TWO, 10.0)
        assert await directory.lease("b") is None
        for ttl_s in (0.0, 0.4, 601.0):
            with pytest.raises(LimitError, match=r"lease\.ttl"):
                await directory.register("a", ONE, ttl_s)

    directories.run(work)


def test_adopting_makes_every_earlier_token_stale_and_lets_leases_begin_again(directories):
    async def work(directory):
        await directory.register("a", ONE, directories.ttl_s)
        old = await directory.claim("s", "a", nonce(1))
        gone = await directory.claim("gone", "a", nonce(2))
        await directory.release("gone", gone)
        before = await directory.state()
        await directories.outlast(directory, "a")
        running = directories.begun()
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
        with running(), pytest.raises(LeaseLiveError):
            await directory.takeover("s", entry.token, "b", nonce(4))
        await directories.outlast(directory, "a")
        await directory.takeover("s", entry.token, "b", nonce(4))
        assert (await directory.owner("gone")).token == gone
        assert (await directory.adopt(above=7)).generation == 8

    directories.run(work)
