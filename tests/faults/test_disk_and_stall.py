"""A target whose disk is full, and one that stops reading: both cost the move and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest

from node.directory import Ownership
from node.errors import PeerAnswerError
from node.pb.v1 import session_pb2 as pb

from .conversation import Conversation
from .lab import Lab, NodeProcess, started
from .link import Link
from .outside import Findings, check_bits, check_disks, record_of
from .twin import Twins

MIB = 1 << 20

#: A peer that does not read costs no more memory than this, whatever is to be sent.
STALL_BYTES_MAX = 64 * MIB

#: The last resort of a stalled move: a write's own deadline, then the time of trying again, then
#: one call each of Prepare and Abort; and a share for a busy machine.
STALL_S_MAX = 30.0 + 45.0 + 15.0 + 5.0 + 15.0


async def append(node: NodeProcess, talk: Conversation) -> pb.SessionReply:
    """The session of ``talk``, opened on ``node`` with its prompt computed."""
    async with node.client() as client:
        opened = await client.open(talk.session_id)
        return await client.append(opened, talk.twin.token_ids[: talk.twin.given])


async def move(giving: NodeProcess, taking: NodeProcess, session, address=None) -> str:
    """Move it; gives the error's message, empty for none."""
    request = pb.MigrateRequest(
        session_id=session.session_id, token=session.token, target_node=taking.name,
        target_address=str(address or taking.address),
    )  # fmt: skip
    try:
        async with giving.client() as client:
            request.token.CopyFrom((await client.get(session.session_id)).token)
            async for _ in client.migrate(request):
                pass
    except PeerAnswerError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def small_disk(folder: Path, size: int):
    """A volume of ``size`` bytes at ``folder``; gives why not, where that is not permitted."""
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    ran = subprocess.run(mount, capture_output=True, text=True, check=False)
    if ran.returncode:
        yield ran.stderr.strip()
        return
    try:
        yield ""
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, left: int) -> Path:
    """A file that leaves ``left`` bytes of the volume."""
    path, stat = folder / "filler", os.statvfs(folder)
    with path.open("wb") as filler:
        filler.write(bytes(max(0, stat.f_bavail * stat.f_frsize - left)))
    return path


@pytest.mark.slow
def test_a_full_disk_on_the_target_ends_the_move_and_leaves_nothing(lab: Lab, nursery, capsys):
    async def work(why: str):
        giving, taking = NodeProcess(lab, "a", nursery), NodeProcess(lab, "b", nursery)
        twins, found, said = Twins(lab.model), Findings(), []
        async with asyncio.timeout(150), started(giving, taking):
            for name, left in (("s1", 100_000), ("s2", 0)):
                talk = Conversation(name, twins.of(700, 2))
                session = await append(giving, talk)
                if why:
                    limits = (left, resource.RLIM_INFINITY)
                    resource.prlimit(taking.pid, resource.RLIMIT_FSIZE, limits)
                else:
                    filler = await asyncio.to_thread(fill, lab.data("b"), left)
                said.append(await move(giving, taking, session))
                record = await record_of(lab, name)
                assert isinstance(record, Ownership) and record.node == "a"
                await check_bits(giving, talk, found)
                if why:
                    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                    resource.prlimit(taking.pid, resource.RLIMIT_FSIZE, unlimited)
                else:
                    filler.unlink()
                await check_disks(lab, [taking], found)
                assert await move(giving, taking, session) == ""
                await check_bits(taking, talk, found)
        return said, found

    with small_disk(lab.data("b"), 8 * MIB) as why:
        said, found = asyncio.run(work(why))
    with capsys.disabled():
        print("\nmeans: " + (f"RLIMIT_FSIZE ({why})" if why else "a tmpfs of 8 MiB"), said)
    assert found.all() == []
    assert all("stays on this node" in one for one in said) and len(said) == 2


def rss(pid: int) -> int:
    """Resident bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@pytest.mark.slow
@pytest.mark.parametrize("heals", [True, False], ids=["for a while", "for ever"])
def test_a_peer_that_stops_reading_costs_bounded_memory_and_time(lab, nursery, capsys, heals):
    """A link that comes back finishes the move; after one that does not, the session serves here.

    The cache of a tiny model is a few tiles, so the queue takes them all and the session is held.
    """

    async def work():
        giving = NodeProcess(lab, "a", nursery, transfer_lease_s=60.0)
        taking = NodeProcess(lab, "b", nursery, transfer_lease_s=60.0)
        talk = Conversation("s", Twins(lab.model).of(6000, 1))
        async with asyncio.timeout(280), started(giving, taking):
            session = await append(giving, talk)
            link = Link(taking.address)
            async with link.open() as address:
                await talk.take(giving, 4)
                before, most = rss(giving.pid), 0
                start = time.monotonic()
                moving = asyncio.ensure_future(move(giving, taking, session, address))
                while link.carried < 200_000:
                    await asyncio.sleep(0.005)
                link.carries.clear()
                stalled = link.carried
                until = start + (8.0 if heals else STALL_S_MAX)
                while not moving.done() and time.monotonic() < until:
                    most = max(most, rss(giving.pid) - before)
                    await asyncio.sleep(0.25)
                assert link.carried - stalled < 4 * MIB
                link.carries.set()
                said, seconds = await moving, time.monotonic() - start
            server = taking if heals else giving
            found = Findings()
            await check_bits(server, talk, found)
            return said, seconds, most, found.all()

    said, seconds, most, found = asyncio.run(work())
    with capsys.disabled():
        print(f"\n{seconds:.1f} s, {most / MIB:.1f} MiB above before: {said or 'moved'}")
    assert found == []
    assert (said == "") if heals else ("stays on this node" in said)
    assert seconds < STALL_S_MAX and most < STALL_BYTES_MAX


@pytest.mark.slow
def test_a_link_so_slow_that_one_chunk_outlasts_the_lease_still_moves_the_session(lab, nursery):
    """15 KB/s and a lease of 2 s: the lease is there for peers that are gone, not for slow ones."""

    async def work():
        giving = NodeProcess(lab, "a", nursery, transfer_lease_s=2.0)
        taking = NodeProcess(lab, "b", nursery, transfer_lease_s=2.0)
        talk, found = Conversation("s", Twins(lab.model).of(700, 1)), Findings()
        async with asyncio.timeout(150), started(giving, taking):
            session = await append(giving, talk)
            link = Link(taking.address, bytes_per_s=15_000)
            async with link.open() as address:
                start = time.monotonic()
                said = await move(giving, taking, session, address)
                seconds = time.monotonic() - start
            await check_bits(taking, talk, found)
        return said, seconds, found.all()

    said, seconds, found = asyncio.run(work())
    assert (said, found) == ("", [])
    assert seconds > 8.0
