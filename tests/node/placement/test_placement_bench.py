"""The simulation of a fleet, short: it is the same each time, and what it shows holds."""

from __future__ import annotations

import pytest

from bench.placement.churn import Churn, Hours
from bench.placement.world import GIB, MIB, Shape

SHAPE = Shape(nodes=40, sessions=2_000, capacity_bytes=64 * GIB, seed=3)
CHURN = Churn(hours=0.25, drains_per_hour=40, crashes_per_hour=8)


def told(shape, churn):
    """What a run tells, without wall time."""
    found = Hours(shape, churn).run()
    del found["decisions"]
    return found


def test_equal_seeds_give_equal_fleets_and_other_seeds_other_ones():
    first = told(SHAPE, CHURN)
    assert first == told(SHAPE, CHURN)
    assert first != told(Shape(nodes=40, sessions=2_000, capacity_bytes=64 * GIB, seed=4), CHURN)


@pytest.mark.parametrize("seed", range(4))
def test_drains_empty_nodes_nothing_is_overfilled_and_nothing_is_lost(seed):
    shape = Shape(nodes=40, sessions=2_000, capacity_bytes=64 * GIB, seed=seed)
    run = Hours(shape, CHURN)
    found = run.run()
    assert found["drains"]["nodes"] >= 9
    assert found["drains"]["sessions_that_stayed"] == 0
    assert found["arrivals_over_capacity"] == 0
    assert found["openings_refused"] == 0
    assert found["moves"]["drain"] > 300
    world = run.world
    assert sorted(world.where) == sorted(world.order)
    for machine in world.machines:
        assert machine.taken_bytes == sum(world.size[one] for one in machine.sessions)
        assert all(world.where[one] is machine for one in machine.sessions)
    # Every move is one write to the directory; sessions begin and end by one each.
    writes = found["directory_writes"]
    assert writes["transfers"] == found["moves"]["made"]
    ends_per_s = shape.sessions / shape.life_s
    assert writes["per_s"] < 2 * ends_per_s + found["moves"]["per_s"] + shape.nodes / 5


def test_a_fleet_without_room_names_what_stays():
    tight = Shape(nodes=10, sessions=900, capacity_bytes=48 * GIB, mean_bytes=400 * MIB, seed=1)
    found = Hours(tight, CHURN).run()
    assert found["drains"]["sessions_that_stayed"] > 0
    assert found["fill"]["max"] < 1.2
