"""A node is killed or paused at each point of a session's way into a store and out of it."""

from __future__ import annotations

import asyncio

import pytest

from node.fault_points import PARK_POINTS
from node.parked import identity_of

from .lab import started
from .parking import Parking

#: From this point on the directory names the store; before it the session is still its source's.
FIRST_IN_STORE = PARK_POINTS.index("park.cas.after")


def carry_out(lab, nursery, orders):
    """Where the session was after each order, what did not hold, and every point reached."""

    async def work():
        parking, stood = Parking(lab, nursery), {}
        async with asyncio.timeout(60 + 40 * len(orders)), started(*parking.runs.nodes):
            for order in orders:
                stood[order], found = await parking.run(order)
                assert found.all() == [], (order, found.all())
        reached = {point for node in parking.runs.nodes for point in node.reached()}
        return stood, reached, sum(node.starts for node in parking.runs.nodes) - 2

    return asyncio.run(work())


def test_a_node_that_is_killed_right_after_its_commit_leaves_the_session_in_the_store(lab, nursery):
    stood, _, starts = carry_out(lab, nursery, ["park.cas.after=kill"])
    assert [bool(identity_of(one)) for one in stood.values()] == [True]
    assert starts == 1


@pytest.mark.slow
def test_a_node_may_be_killed_at_every_point_of_the_way_in_and_out(lab, nursery):
    orders = [f"{point}=kill" for point in PARK_POINTS]
    orders += ["park.chunk.added:4=kill", "restore.piece.read:4=kill"]
    orders += ["target.spool.flushed=kill", "target.cas.before=kill", "target.swap.before=kill"]
    stood, reached, starts = carry_out(lab, nursery, orders)
    assert set(PARK_POINTS) <= reached
    assert starts >= len(PARK_POINTS)
    for place, point in enumerate(PARK_POINTS):
        assert bool(identity_of(stood[f"{point}=kill"])) is (place >= FIRST_IN_STORE), point
