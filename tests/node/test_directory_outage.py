"""An etcd that is away for a part of a lease, one, or three: while nodes idle, save and move.

Nodes are real, the etcd is real and stands still (SIGSTOP) or is killed and started again.
Whatever the length: the node comes back by itself under its name and incarnation, of each session
there is one owner, and a fenced node gives nothing out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

import pytest
from etcd_support import EtcdPlace
from node_support import World, events, move, prompt, run

from kvpack.errors import KvpackError
from node import etcd_cluster
from node.clock import BootClock
from node.directory import Ownership
from node.directory_etcd_keys import end_of, key_values
from node.errors import FencedError, PeerAnswerError
from node.etcd import get
from node.lease import NodeLease

LEASE_S = 2.0


@dataclasses.dataclass(frozen=True)
class EtcdWorld(World):
    """As :class:`World`, with an etcd for a directory."""

    url: str = ""
    lease_s: float = LEASE_S

    def config(self, name, model_dir=None):
        config = super().config(name, model_dir)
        return dataclasses.replace(config, directory_url=self.url, lease_s=self.lease_s)


@pytest.fixture
def fleet(world, etcds, monkeypatch):
    for name, seconds in (("LOOK_S", 0.8), ("TRY_S", 0.4), ("WRITE_S", 0.8)):
        monkeypatch.setattr(etcd_cluster, name, seconds)
    url = etcds.url(prefix=f"tests/{world.root.name}")
    return EtcdWorld(world.root, world.model_dir, url)


@contextlib.contextmanager
def away(etcds, how):
    """The etcd is away: it stands still, or it is gone and is started again."""
    if how == "frozen":
        with etcds.frozen():
            yield
        return
    (member,) = etcds.members
    member.kill()
    try:
        yield
    finally:
        member.start(etcds.members)


async def served(client, session_id, index, count, seconds):
    """What a session gives as soon as it is served again; within a bound."""
    async with asyncio.timeout(seconds):
        while True:
            with contextlib.suppress(KvpackError):
                return await events(client, await client.get(session_id), index, count)
            await asyncio.sleep(0.05)


async def outlasted(node, seconds):
    """Let an outage go by; gives how long the node's fence was down in it."""
    end_s, fenced_s = time.monotonic() + seconds, 0.0
    while time.monotonic() < end_s:
        await asyncio.sleep(0.02)
        with contextlib.suppress(FencedError):
            node.sessions.lease.require()
            continue
        fenced_s += 0.02
    return fenced_s


async def idle(fleet, etcds, how, leases):
    async with fleet.node("source") as (node, client):
        twin = await client.append(await client.open("twin"), prompt(40))
        expected = await events(client, twin, 40, 4)
        session = await client.append(await client.open("s"), prompt(40))
        before = await node.sessions.directory.lease("source")
        owned = await node.sessions.directory.owner("s")
        with away(etcds, how):
            fenced_s = await outlasted(node, leases * fleet.lease_s)
            if leases >= 1:
                # It counts from when its last renewal was sent: no later than the outage began.
                assert fenced_s > 0
                begun_s = time.monotonic()
                with pytest.raises(PeerAnswerError) as refused:
                    await client.append(session, [1])
                assert refused.value.peer_reason == "fenced"
                assert time.monotonic() - begun_s < 10.0
            if leases <= 0.5:
                assert fenced_s == 0
        given = await served(client, "s", 40, 4, fleet.lease_s + 10.0)
        assert given == expected
        after = await node.sessions.directory.lease("source")
        assert after.incarnation == before.incarnation and after.left_s > 0
        # It took nothing over again: what clients know of the session is still right.
        assert await node.sessions.directory.owner("s") == owned


def test_a_node_that_idles_through_an_outage_serves_again_by_itself(fleet, etcds):
    run(idle(dataclasses.replace(fleet, lease_s=1.0), etcds, "frozen", 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["frozen", "killed"])
@pytest.mark.parametrize("leases", [0.5, 1.0, 3.0])
def test_every_outage_while_a_node_idles(fleet, etcds, how, leases):
    run(idle(fleet, etcds, how, leases), 90.0)


@pytest.mark.slow
@pytest.mark.parametrize("leases", [0.5, 1.0, 3.0])
def test_every_outage_while_a_session_is_saved(fleet, etcds, leases):
    """A save that was begun under the lease is written or refused; the session goes on."""

    async def work():
        async with fleet.node("source") as (_, client):
            twin = await client.append(await client.open("twin"), prompt(600))
            expected = await events(client, twin, 600, 4)
            session = await client.append(await client.open("s"), prompt(600))
            with away(etcds, "frozen"):
                saving = asyncio.create_task(client.save(session))
                await asyncio.sleep(leases * fleet.lease_s)
                done, _ = await asyncio.wait({saving}, timeout=5.0)
                assert done
                if saving.exception() is not None:
                    assert saving.exception().peer_reason in ("fenced", "directory_unavailable")
            assert await served(client, "s", 600, 4, fleet.lease_s + 10.0) == expected
            saved = await client.save(await client.get("s"))
            assert saved.position >= 599

    run(work(), 90.0)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("leases", [0.5, 1.0, 3.0])
def test_every_outage_while_a_session_moves(fleet, etcds, leases, when):
    """The etcd stands still around the one write that decides, before it or after it is done."""

    async def work():
        async with fleet.pair() as (source, giving, target, taking):
            twin = await giving.append(await giving.open("twin"), prompt(60))
            expected = await events(giving, twin, 60, 6)
            session = await giving.append(await giving.open("s"), prompt(60))
            outage = contextlib.ExitStack()
            directory = target.sessions.directory
            real = directory.transfer

            async def transfer(*args):
                directory.transfer = real
                if when == "before":
                    outage.enter_context(away(etcds, "frozen"))
                    return await real(*args)
                token = await real(*args)
                outage.enter_context(away(etcds, "frozen"))
                return token

            directory.transfer = transfer
            moving = asyncio.create_task(move(giving, target, session))
            while directory.transfer is not real:
                await asyncio.sleep(0.01)
            await asyncio.sleep(leases * fleet.lease_s)
            outage.close()
            await asyncio.wait({moving}, timeout=30.0)
            assert moving.done()
            async with asyncio.timeout(30.0):
                given = await one_serves(source, giving, target, taking)
            assert given == expected

    async def one_serves(source, giving, target, taking):
        while True:
            for node, client, other in ((source, giving, taking), (target, taking, giving)):
                try:
                    given = await events(client, await client.get("s"), 60, 6)
                except KvpackError:
                    continue
                record = await node.sessions.directory.owner("s")
                assert isinstance(record, Ownership) and record.node == node.name
                with pytest.raises(KvpackError):
                    await events(other, await other.get("s"), 60, 1)
                return given
            await asyncio.sleep(0.1)

    run(work(), 120.0)


def test_a_node_that_died_is_gone_within_its_lease_and_leaves_one_name(etcds, parties, tmp_path):
    """Started again ten times in a row, each time without saying goodbye."""
    place = EtcdPlace(etcds, parties, f"tests/{tmp_path.name}")

    async def work(directory):
        granted, grant = [], directory.cluster.grant

        async def noted(ttl_s):
            granted.append(await grant(ttl_s))
            return granted[-1]

        directory.cluster.grant = noted
        leases = [NodeLease(directory, "ghost", BootClock(), 1.0) for _ in range(10)]
        for lease in leases:
            died_s = time.monotonic()
            await lease.start()
        # Each start ended the lease of the one before it.
        left_s = [await directory.cluster.left_s(lease) for lease in granted]
        assert len(left_s) == 10 and max(left_s[:-1]) < 0 <= left_s[-1]
        await place.outlast(directory, "ghost")
        # Not before its second is over. How soon after it an etcd says so, which looks for what is
        # over twice in a second, depends on how busy the machine is.
        assert 0.8 < time.monotonic() - died_s < 10.0
        keys = directory.keys
        found = await directory.cluster.look([get(keys.all, end_of(keys.all), keys_only=True)])
        left = [one.key.decode().removeprefix(keys.all) for one in key_values(found.responses)[0]]
        assert left == ["directory", "node/ghost"]

    place.run(work)
