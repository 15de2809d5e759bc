"""What the fence refuses is counted, and how long a lease still runs is told."""

from __future__ import annotations

import dataclasses

import pytest
from directory_support import Place
from node_support import prompt, run

from node.errors import FencedError, StaleTokenError
from node.lease import NodeLease

TTL_S = 10.0


def test_a_lease_tells_what_is_left_and_whom_it_refused(tmp_path):
    place = Place(tmp_path / "directory.sqlite")

    async def go():
        async with place.opened() as directory:
            lease = NodeLease(directory, "a", place.clock, TTL_S)
            assert lease.left_s() == 0.0
            await lease.start()
            # A tenth is not used.
            assert lease.left_s() == pytest.approx(9.0)
            place.clock.move(4.0)
            assert lease.left_s() == pytest.approx(5.0)
            assert (lease.require(), lease.refused) == (1, 0)
            place.clock.move(6.0)
            for _ in range(2):
                with pytest.raises(FencedError):
                    lease.require()
            assert (lease.left_s(), lease.refused) == (0.0, 2)

    run(go())


def test_stale_tokens_are_counted(world):
    async def go():
        async with world.node("source") as (node, client):
            session = await client.open("talk")
            await client.append(session, prompt(8))
            sessions = node.sessions
            token = (await sessions.find("talk")).token
            stale = dataclasses.replace(token, revision=token.revision + 1)
            for _ in range(3):
                with pytest.raises(StaleTokenError):
                    async with sessions.hold("talk", stale):
                        pass
            async with sessions.hold("talk", token):
                pass
            return sessions.stale_refused

    assert run(go()) == 3
