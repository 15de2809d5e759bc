"""A process that was paused for longer than its lease: what it believes is not true any more."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time

import pytest

from kvpack.errors import KvpackError
from node.directory import NONCE_BYTES, Ownership, OwnershipToken, open_directory
from node.errors import LeaseLiveError, PeerAnswerError
from node.migration.wire import token_value

from .conversation import Conversation
from .lab import NODE_LEASE_S, NodeProcess, started
from .nursery import ROOT
from .outside import record_of
from .twin import prompt

#: Words by which a node refuses who comes with what was true once.
STALE = {"stale_token", "fenced", "session_moved", "session_not_found"}


async def take_over(lab, session_id: str, token: OwnershipToken) -> Ownership:
    """Give the session to node b as soon as the directory lets go of its owner's lease."""
    directory = open_directory(f"sqlite:{lab.directory}")
    try:
        async with asyncio.timeout(5 * NODE_LEASE_S):
            while True:
                try:
                    nonce = secrets.token_bytes(NONCE_BYTES)
                    await directory.takeover(session_id, token, "b", nonce)
                    break
                except LeaseLiveError:
                    await asyncio.sleep(0.1)
    finally:
        await directory.close()
    record = await record_of(lab, session_id)
    assert isinstance(record, Ownership) and record.node == "b"
    return record


@pytest.mark.slow
def test_a_node_that_was_paused_past_its_lease_serves_nothing_under_its_old_token(lab, nursery):
    async def work():
        node = NodeProcess(lab, "a", nursery)
        events: list[tuple[float, int, int]] = []
        async with asyncio.timeout(120), started(node), node.client() as client:
            session = await client.append(await client.open("s"), prompt(60, 1))
            token = token_value(session.token)

            async def stream() -> str:
                try:
                    async for event in client.generate(session, 60, 4000):
                        revision = event.token.revision
                        events.append((time.monotonic(), event.index, revision))
                except PeerAnswerError as error:
                    return error.peer_reason
                return ""

            streaming = asyncio.ensure_future(stream())
            while len(events) < 5:
                await asyncio.sleep(0.02)
            paused_s = time.monotonic()
            node.signal(signal.SIGSTOP)
            record = await take_over(lab, "s", token)
            assert time.monotonic() - paused_s > 0.5 * NODE_LEASE_S
            await asyncio.sleep(0.3)
            before = len(events)
            node.signal(signal.SIGCONT)
            word = await streaming
            late = events[before:]
            refused = []
            async with node.client() as again:
                for call in (again.append(session, [1]), again.save(session)):
                    try:
                        await call
                        refused.append("")
                    except PeerAnswerError as error:
                        refused.append(error.peer_reason)
            return token, record, word, late, refused

    token, record, word, late, refused = asyncio.run(work())
    assert record.token.newer_than(token)
    assert word in STALE and set(refused) <= STALE
    # What it had computed before may still be on its way: one token, under the old revision, so
    # that whoever saw the new one drops it.
    assert len(late) <= 1 and all(revision == token.revision for _, _, revision in late)


def test_a_target_that_is_paused_before_its_swap_finds_that_its_source_resumed(lab, nursery):
    """The source dies and comes back meanwhile: its raise of the revision wins the race."""

    async def work():
        giving, taking = NodeProcess(lab, "a", nursery), NodeProcess(lab, "b", nursery)
        async with asyncio.timeout(120), started(giving, taking):
            from .campaign import Campaign
            from .plan import Plan

            runs = Campaign(lab, nursery)
            runs.nodes = [giving, taking]
            plan = Plan(0, "live", "", (), (), (), False, 0.3)
            await runs.new_session(plan)
            talk, home = runs.talk, runs.home
            assert isinstance(talk, Conversation)
            other = taking if home is giving else giving
            other.order("target.cas.before=stop")
            moving = asyncio.ensure_future(runs.try_move(plan, home, other, other.address))
            while not other.is_paused():
                await asyncio.sleep(0.02)
            await home.kill()
            home.order("")
            assert await home.start()
            await moving
            other.order("")
            other.signal(signal.SIGCONT)
            record = await record_of(lab, talk.session_id)
            assert isinstance(record, Ownership) and record.node == home.name
            await talk.take(home, 4)
            words = []
            for _ in range(20):
                try:
                    words.append(await talk.refused(other, record.token))
                    break
                except KvpackError:
                    await asyncio.sleep(0.1)
            return words

    (word,) = asyncio.run(work())
    assert word in STALE


def test_the_clock_of_a_lease_runs_on_while_a_process_is_paused():
    """The premise of the tests above, and of self-fencing: pausing is no pause for the lease."""
    code = (
        "import os, signal\n"
        "from node.clock import BootClock\n"
        "before = BootClock().now_s()\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print(BootClock().now_s() - before)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    time.sleep(0.4)
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate(timeout=20)
    assert float(said) >= 0.4
