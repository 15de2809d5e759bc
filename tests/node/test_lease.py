"""A node's lease: renewed in time or fenced, by a clock that nobody can set."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import time

import pytest
from directory_support import FakeClock, Place, nonce
from node_support import events, move, prompt, run

from node.clock import BootClock
from node.directory_sqlite import SqliteDirectory
from node.errors import (
    DirectoryError,
    FencedError,
    NodeBusyError,
    PeerAnswerError,
    UsageError,
)
from node.lease import NodeLease

TTL_S = 10.0


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "directory.sqlite")


class Away:
    """A directory that can be away, or answer late."""

    def __init__(self, directory):
        self._directory = directory
        self.away = False
        self.before = None

    def __getattr__(self, name):
        return getattr(self._directory, name)

    async def renew(self, *args):
        if self.away:
            raise DirectoryError("away")
        state = await self._directory.renew(*args)
        if self.before is not None:
            self.before()
        return state


def with_lease(place, work):
    async def bounded(directory):
        lease = NodeLease(directory, "a", place.clock, TTL_S)
        await lease.start()
        try:
            await work(lease, directory)
        finally:
            await lease.close()

    async def opened():
        async with asyncio.timeout(30), place.opened() as directory:
            await bounded(Away(directory))

    asyncio.run(opened())


def test_the_node_fences_itself_before_the_directory_would_let_another_begin(place):
    async def work(lease, directory):
        token = await directory.claim("s", "a", nonce(1))
        mark = lease.require()
        place.clock.move(TTL_S * 0.9 - 0.01)
        assert lease.require(mark) == mark
        place.clock.move(0.02)
        with pytest.raises(FencedError):
            lease.require()
        with pytest.raises(Exception, match="runs for another"):
            await directory.takeover("s", token, "b", nonce(2))

    with_lease(place, work)


def test_a_renewal_counts_from_when_it_was_sent_and_moves_nothing(place):
    async def work(lease, directory):
        token = await directory.claim("s", "a", nonce(1))
        mark = lease.require()
        place.clock.move(5.0)
        directory.before = lambda: place.clock.move(3.0)  # the answer took three seconds
        await lease.renew()
        assert lease.require() == mark
        place.clock.move(TTL_S * 0.9 - 3.0 - 0.01)
        lease.require(mark)
        place.clock.move(0.02)
        with pytest.raises(FencedError):
            lease.require()
        assert (await directory.owner("s")).token == token

    with_lease(place, work)


def test_a_lease_that_was_over_in_between_is_another_one(place):
    async def work(lease, directory):
        mark = lease.require()
        directory.away = True
        for _ in range(4):
            place.clock.move(2.5)
            await lease.renew()
        with pytest.raises(FencedError, match="is over"):
            lease.require()
        directory.away = False
        await lease.renew()
        assert lease.require() == mark + 1
        with pytest.raises(FencedError, match="in between"):
            lease.require(mark)

    with_lease(place, work)


@pytest.mark.parametrize("error", [NodeBusyError("busy"), UsageError("odd"), DirectoryError("x")])
def test_whatever_ends_a_renewal_the_next_one_is_tried(place, error, caplog):
    async def work(lease, directory):
        def refuse():
            raise error

        mark = lease.require()
        directory.before = refuse
        place.clock.move(6.0)
        await lease.renew()
        assert lease._asking.exception() is None
        directory.before = None
        await lease.renew()
        place.clock.move(6.0)
        assert lease.require() == mark

    with_lease(place, work)
    assert "lease not renewed, 3.0 s left" in caplog.text


def test_a_process_whose_name_was_taken_is_fenced_for_good(place):
    async def work(lease, directory):
        await directory.register("a", b"2" * 16, TTL_S)
        await lease.renew()
        with pytest.raises(FencedError, match="another process"):
            lease.require()
        await asyncio.wait_for(lease.run(), 20.0)  # it does not try for ever
        await lease.close()
        assert (await directory.lease("a")).left_s == TTL_S

    with_lease(place, work)


def test_a_renewal_that_hangs_is_waited_for_a_bounded_time_and_never_doubled(place):
    async def opened():
        async with place.opened() as directory:
            calls = []

            async def hang(*_):
                calls.append(1)
                await asyncio.sleep(60)

            lease = NodeLease(directory, "a", place.clock, 0.6)
            await lease.start()
            directory.renew = hang
            start_s = time.monotonic()
            for _ in range(3):
                await lease.renew()
            assert time.monotonic() - start_s < 20.0
            assert len(calls) == 1
            await lease.close()

    asyncio.run(opened())


@pytest.mark.parametrize("away_s", [0.85, 1.0])
def test_a_directory_that_is_back_is_asked_again_before_what_it_granted_late_is_over(
    tmp_path, away_s
):
    """The answer to a renewal that waited for it leaves next to nothing of the lease."""
    path, ttl_s = tmp_path / "directory.sqlite", 1.2

    async def work():
        directory = SqliteDirectory(path)
        lease = NodeLease(directory, "a", BootClock(), ttl_s)
        await lease.start()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as writer:
            writer.execute("BEGIN EXCLUSIVE")
            renewing = asyncio.create_task(lease.run())
            # The first renewal waits for the file from a third of the lease on.
            await asyncio.sleep(ttl_s / 3 + away_s)
            writer.execute("ROLLBACK")
        end_s = time.monotonic() + 2 * ttl_s
        while not lease.left_s() and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        left_s = []
        for _ in range(80):
            left_s.append(lease.left_s())
            await asyncio.sleep(0.01)
        renewing.cancel()
        await asyncio.wait({renewing})
        await lease.close()
        await directory.close()
        return left_s

    assert min(asyncio.run(work())) > 0


def test_a_directory_that_refuses_at_once_is_not_asked_without_a_pause(place):
    async def work():
        async with place.opened() as directory:
            calls = []

            async def refuse(*_):
                calls.append(1)
                raise DirectoryError("away")

            lease = NodeLease(directory, "a", BootClock(), 0.6)
            await lease.start()
            directory.renew = refuse
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lease.run(), 0.7)
            await lease.close()
            return len(calls)

    assert 1 <= asyncio.run(work()) <= 4


def test_a_stopped_node_gives_its_lease_back(place):
    async def work(lease, directory):
        token = await directory.claim("s", "a", nonce(1))
        await lease.close()
        with pytest.raises(FencedError):
            lease.require()
        await directory.takeover("s", token, "b", nonce(2))

    with_lease(place, work)


def test_the_clock_runs_during_sleep_and_does_not_know_the_wall_clock(monkeypatch):
    clock = BootClock()
    if sys.platform == "linux":
        with open("/proc/uptime") as uptime:
            assert abs(float(uptime.read().split()[0]) - clock.now_s()) < 5.0
    before_s = clock.now_s()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    assert before_s <= clock.now_s() < before_s + 5.0


def test_jumps_of_the_wall_clock_change_no_lease(tmp_path, monkeypatch):
    async def work():
        directory = SqliteDirectory(tmp_path / "directory.sqlite")
        lease = NodeLease(directory, "a", BootClock(), TTL_S)
        await lease.start()
        mark = lease.require()
        token = await directory.claim("s", "a", nonce(1))
        for jump_s in (1e9, -1e9, 0.0):
            monkeypatch.setattr(time, "time", lambda jump_s=jump_s: 1.7e9 + jump_s)
            assert lease.require(mark) == mark
            assert 5.0 < (await directory.lease("a")).left_s <= TTL_S
            with pytest.raises(Exception, match="runs for another"):
                await directory.takeover("s", token, "b", nonce(2))
            await lease.renew()
        await lease.close()
        await directory.close()

    asyncio.run(work())


def test_other_systems_are_refused_by_name(monkeypatch):
    code = "import sys; sys.platform = 'plan9'; import node.clock as c; c.BootClock()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "no clock that runs during sleep is known on plan9" in done.stderr


# --- A node under a lease: what it serves, and what it does not any more. ---


async def take_over(world, session_id="s"):
    """Another node takes the session, by another way to the file, as an operator would."""
    directory = SqliteDirectory(world.root / "directory.sqlite")
    try:
        entry = await directory.owner(session_id)
        await directory.transfer(session_id, entry.token, "third", nonce(99))
    finally:
        await directory.close()


async def refused_as(work):
    with pytest.raises(PeerAnswerError) as refused:
        await work
    return refused.value.peer_reason


@contextlib.asynccontextmanager
async def fenceable(world):
    """A node whose lease is measured by a clock of ours and renewed only when we say so."""
    async with world.node("source") as (node, client):
        lease, clock = node.sessions.lease, FakeClock()
        lease._clock = clock
        lease._end_s = clock.now_s() + TTL_S
        lease.run_again, lease._ask = lease._ask, lambda: asyncio.sleep(0)
        session = await client.append(await client.open("s"), prompt(30))
        yield node, client, session, clock


def test_a_fenced_node_refuses_every_call_to_its_sessions_and_changes_nothing(world):
    async def work():
        async with fenceable(world) as (node, client, session, clock):
            clock.move(TTL_S + 1)
            for call in (
                client.append(session, [1]),
                client.save(session),
                client.close_session(session),
                events(client, session, 30, 2),
                client.open("new"),
            ):
                assert await refused_as(call) == "fenced"
            live = await node.sessions.find("s")
            assert (live.next_index, live.position) == (30, 29)
            await node.sessions.lease.run_again()
            assert len(await events(client, session, 30, 2)) == 2

    run(work())


def test_a_node_that_was_paused_past_its_lease_gives_out_no_token_of_before(world):
    """It is stopped in mid-decode, loses the session, wakes, and renews before it goes on."""

    async def work():
        async with fenceable(world) as (node, client, session, clock):
            call = node.sessions.engine.call

            async def paused(*args, **kwargs):
                result = await call(*args, **kwargs)
                if args[0].__name__ == "decode_next":
                    clock.move(TTL_S + 1)
                    await take_over(world)
                    await node.sessions.lease.run_again()
                    node.sessions.lease.require()
                return result

            node.sessions.engine.call = paused
            assert await refused_as(events(client, session, 30, 5)) == "fenced"
            node.sessions.engine.call = call
            assert await refused_as(events(client, session, 30, 5)) == "stale_token"
            assert await refused_as(client.get("s")) in ("session_not_found", "session_moved")

    run(work())


def test_a_pause_between_the_directorys_answer_and_the_work_is_seen(world):
    async def work():
        async with fenceable(world) as (node, client, session, clock):
            owner = node.sessions.directory.owner

            async def slow(session_id):
                entry = await owner(session_id)
                clock.move(TTL_S + 1)
                await take_over(world)
                await node.sessions.lease.run_again()
                return entry

            node.sessions.directory.owner = slow
            assert await refused_as(client.append(session, [1])) == "fenced"
            assert (await node.sessions.find("s")).next_index == 30

    run(work())


def test_a_fenced_node_takes_no_session_over_and_the_source_goes_on(world):
    """Else the first token, which travels in the answer, could be of a session taken over since."""

    async def work():
        async with world.pair() as (source, giving, target, taking):
            lease = target.sessions.lease
            end_s, ask = lease._end_s, lease._ask
            lease._ask = lambda: asyncio.sleep(0)
            lease._end_s = float("-inf")
            here = await giving.append(await giving.open("s"), prompt(40))
            with pytest.raises(PeerAnswerError, match=r"fenced.*stays on this node"):
                await move(giving, target, here)
            assert len(await events(giving, await giving.get("s"), 40, 2)) == 2
            # The same where the lease ends while the transfer is under way.
            lease._end_s = end_s
            commit = target.transfers.commit

            async def asleep(key):
                lease._end_s = float("-inf")
                return await commit(key)

            target.transfers.commit = asleep
            with pytest.raises(PeerAnswerError, match=r"fenced.*stays on this node"):
                await move(giving, target, await giving.get("s"))
            here = await giving.get("s")
            assert (await source.sessions.directory.owner("s")).node == "source"
            lease._ask, target.transfers.commit = ask, commit
            await lease.renew()
            await move(giving, target, here)
            assert len(await events(taking, await taking.get("s"), 43, 2)) == 2

    run(work())
