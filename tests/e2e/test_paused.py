"""A node that is stopped past its lease, loses its session to another, and wakes up."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from e2e_support import command
from test_processes import prompt, run, stage, steps  # noqa: F401 - stage is a fixture

from node.client import NodeClient
from node.demo.processes import serving
from node.demo.stage import CLIENT, SOURCE, TARGET
from node.errors import PeerAnswerError

#: Short, so that the test is; long enough that a busy machine renews in time.
LEASE_S = 3.0


async def takeover(stage, session_id):  # noqa: F811
    """``kvnode directory takeover`` until the lease is over; gives its answer and its refusals."""
    where = f"sqlite:{stage.work / 'directory.sqlite'}"
    arguments = ("directory", "takeover", session_id, "--directory", where, "--node", TARGET)
    refusals = []
    async with asyncio.timeout(60):
        while True:
            ran = await asyncio.to_thread(command, "node", *arguments, "--json")
            if ran.returncode == 0:
                return json.loads(ran.stdout), refusals
            refusals.append(ran.stderr)
            await asyncio.sleep(0.2)


def test_a_node_that_slept_past_its_lease_gives_out_no_token_of_a_session_taken_over(stage):  # noqa: F811
    async def work():
        arguments = [*stage.serve_arguments(SOURCE, "127.0.0.1:0"), "--lease", str(LEASE_S)]
        async with (
            serving(arguments, stage.log(SOURCE)) as process,
            NodeClient(stage.credentials(CLIENT), SOURCE, process.address) as client,
        ):
            session = await client.append(await client.open("s"), prompt(300))
            assert len(await steps(client, session, 300, 3)) == 3
            os.kill(process.pid, signal.SIGSTOP)
            try:
                taken, refusals = await takeover(stage, "s")
                # Asked while it sleeps: answered the moment that it wakes.
                asked = asyncio.create_task(steps(client, session, 303, 50))
                await asyncio.sleep(0.3)
            finally:
                os.kill(process.pid, signal.SIGCONT)
            with pytest.raises(PeerAnswerError) as refused:
                await asked
            with pytest.raises(PeerAnswerError):
                await client.append(session, [1])
            return session.token.revision, taken, refusals, refused.value.peer_reason

    before, taken, refusals, reason = run(work())
    assert all("runs for another" in refusal for refusal in refusals) and refusals
    assert taken["node"] == TARGET and taken["revision"] > before
    assert reason in ("fenced", "stale_token")
