"""Clocks that jump, on real processes.

The wall clock is jumped while a node runs, by libfaketime, which reads the jump from a file each
time. The clock that leases are counted by can be set by nobody; that of a node that is started in a
time namespace is another one than its peer's, as on another machine, or after a reboot.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from kvpack.errors import KvpackError
from node.directory import Ownership

from .campaign import Campaign
from .lab import NODE_LEASE_S, NodeProcess, started
from .outside import Findings, check_bits, check_disks, check_one_owner, record_of
from .parking import ARRIVES, Parking

pytestmark = pytest.mark.slow

DAY_S = 86_400

#: How often a process looks how far its wall clock is to be off; each time for every reading of it
#: would take most of its time.
READ_S = 1

#: Long enough for processes of which each reading of a clock costs more; far below any jump.
LEASE_S = 10.0

#: Backwards; a certificate that was made just now is valid from ten minutes before.
BACK_S = -300
#: Beyond what a certificate of ours is valid for.
YEARS_S = 30 * 365 * DAY_S


class FakedNode(NodeProcess):
    """A node whose wall clock is what ``jump`` says. It is executed: a library is loaded first."""

    def fake(self, library: Path) -> None:
        self.nursery, self.lease_s = None, LEASE_S
        self.jumped = self.lab.root / f"{self.name}.clock"
        self.write(0)
        self.prefix = (
            "env", f"LD_PRELOAD={library}", f"FAKETIME_TIMESTAMP_FILE={self.jumped}",
            f"FAKETIME_CACHE_DURATION={READ_S}", "FAKETIME_DONT_FAKE_MONOTONIC=1",
        )  # fmt: skip

    def write(self, seconds: int) -> None:
        # In one step: it is read while it is written.
        new = self.jumped.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self.jumped)

    async def jump(self, seconds: int) -> None:
        """Be so far from the time of the machine from now on."""
        self.write(seconds)
        await asyncio.sleep(READ_S + 0.2)


def faketime() -> Path:
    for folder in Path("/usr/lib").glob("*/faketime"):
        if (folder / "libfaketimeMT.so.1").exists():
            return folder / "libfaketimeMT.so.1"
    pytest.skip("no libfaketime on this machine: apt-get install faketime")


def time_namespace(offset_s: int) -> tuple[str, ...]:
    """What starts a command whose boot and monotonic clocks are so far from the machine's."""
    prefix = ("unshare", "-T", "--boottime", str(offset_s), "--monotonic", str(offset_s))
    if shutil.which("unshare") is None or subprocess.run(
        [*prefix, "true"], capture_output=True, check=False
    ).returncode:  # fmt: skip
        pytest.skip("no time namespaces here: they need Linux and root")
    return prefix


async def check(runs: Campaign, server: NodeProcess) -> None:
    found = Findings()
    await check_one_owner(runs.lab, runs.nodes, runs.talk, found)
    await check_bits(server, runs.talk, found)
    await check_disks(runs.lab, runs.nodes, found)
    assert found.all() == []


async def moves_once(runs: Campaign) -> NodeProcess:
    """Move the session to the other node while a client follows it; its new home."""
    home = runs.home
    other = next(node for node in runs.nodes if node is not home)
    follower = asyncio.ensure_future(runs.talk.follow([home, other]))
    try:
        assert await runs.try_move(ARRIVES, home, other, other.address) == "done", runs._said
    finally:
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower
    runs.home = other
    return other


def test_jumps_of_the_wall_clock_move_no_lease_no_owner_and_no_bits(lab, nursery):
    """By a day forth and back on either end, around moves and a stay in a store."""
    library = faketime()

    async def work():
        parking = Parking(lab, nursery)
        runs = parking.runs
        faked = []
        for place, node in enumerate(runs.nodes):
            one = FakedNode(lab, node.name, more=node.more)
            one.fake(library)
            runs.nodes[place] = one
            faked.append(one)
        a, b = faked
        async with asyncio.timeout(400), started(a, b):
            await runs.new_session(ARRIVES)
            for of_a, of_b in ((DAY_S, 0), (BACK_S, DAY_S), (DAY_S, BACK_S), (0, 0)):
                a.write(of_a)
                await b.jump(of_b)
                await moves_once(runs)
                assert await runs._let_renew() == []
                await check(runs, runs.home)
            # A stay in a store: its intents and holds carry the wall clock's time.
            home = runs.home
            other = b if home is a else a
            await home.jump(DAY_S)
            await parking._park(home)
            await other.jump(BACK_S)
            await parking._restore(other)
            runs.home = other
            await check(runs, other)
            return a.starts + b.starts

    assert asyncio.run(work()) == 2


@pytest.mark.parametrize("jump_s", [YEARS_S, -DAY_S])
def test_a_clock_beyond_its_certificates_refuses_peers_and_loses_nothing(lab, nursery, jump_s):
    library = faketime()

    async def work():
        runs = Campaign(lab, nursery)
        a, b = (FakedNode(lab, node.name) for node in runs.nodes)
        runs.nodes = [a, b]
        for node in (a, b):
            node.fake(library)
        async with asyncio.timeout(400), started(a, b):
            await runs.new_session(ARRIVES)
            home = runs.home
            other = b if home is a else a
            before = await record_of(lab, runs.talk.session_id)
            await other.jump(jump_s)
            # It believes that nobody's certificate holds.
            said = await runs.try_move(ARRIVES, home, other, other.address)
            assert said != "done"
            with pytest.raises(KvpackError):
                async with other.client() as client:
                    await client.describe()
            record = await record_of(lab, runs.talk.session_id)
            assert isinstance(record, Ownership) and record.node == before.node == home.name
            await runs.talk.take(home, 3)
            await other.jump(0)
            await runs._wait_served(other)
            assert await moves_once(runs) is other
            await check(runs, other)
            log = other.log.read_text()
            assert "expired" in log or "not valid" in log or "not yet valid" in log
            return a.starts + b.starts

    assert asyncio.run(work()) == 2


@pytest.mark.parametrize("offset_s", [400_000, -500])
def test_nodes_whose_boot_clocks_differ_share_one_directory(lab, nursery, offset_s):
    """As on two machines: one keeps the directory, the other asks it; each counts by its own."""
    prefix = time_namespace(offset_s)

    async def work():
        runs = Campaign(lab, nursery)
        a, b = runs.nodes
        a.more = ("--share-directory",)
        b.nursery, b.prefix = None, prefix
        b.more = ("--directory", f"grpc://a@{a.address}")
        # In this order: the other one registers at its start.
        async with asyncio.timeout(240), started(a), started(b):
            await runs.new_session(ARRIVES)
            for _ in range(2):
                await moves_once(runs)
                await check(runs, runs.home)
            # Longer than the lease: both went on renewing it.
            await asyncio.sleep(NODE_LEASE_S + 1.0)
            assert await runs._let_renew() == []
            await check(runs, runs.home)

    asyncio.run(work())


def test_a_directory_whose_machine_was_restarted_lets_its_nodes_serve_again(lab, nursery):
    """Its clock begins at less than what stands in the file: ends of leases lie far ahead."""
    ahead = time_namespace(400_000)

    async def work():
        runs = Campaign(lab, nursery)
        for node in runs.nodes:
            node.nursery, node.prefix = None, ahead
        async with asyncio.timeout(240):
            async with started(*runs.nodes):
                await runs.new_session(ARRIVES)
                for node in runs.nodes:
                    await node.kill()
            for node in runs.nodes:
                node.prefix = ()
            async with started(*runs.nodes):
                assert await runs._let_renew() == []
                await runs.talk.take(runs.home, 3)
                await moves_once(runs)
                await check(runs, runs.home)

    asyncio.run(work())
