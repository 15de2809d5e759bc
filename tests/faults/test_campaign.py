"""A share of the campaign that is run with every test run: a few kills, and every point reached."""

from __future__ import annotations

import asyncio

from node.fault_points import POINTS

from .campaign import Campaign
from .lab import started
from .plan import Plan, plan_of

#: Together these lead past every point, on every way through both tables.
SHARE = (
    ("live", (), ("target.chunk.taken:3=kill",)),
    ("known", (), ("target.swap.before=kill",)),
    ("live", (), ("target.gate.after=raise",)),
    ("copy", (), ("target.cas.after=raise",)),
)


def plans() -> list[Plan]:
    return [
        Plan(seed, mode, "", source, target, (), False, 0.4)
        for seed, (mode, source, target) in enumerate(SHARE)
    ]


def test_ends_that_are_killed_and_paused_lose_nothing_and_own_nothing_twice(lab, nursery):
    async def work():
        runs = Campaign(lab, nursery)
        async with asyncio.timeout(240), started(*runs.nodes):
            results = [await runs.run(plan) for plan in plans()]
        return results, {point for node in runs.nodes for point in node.reached()}

    results, reached = asyncio.run(work())
    assert [(str(one.plan), one.found.all()) for one in results if one.found.all()] == []
    assert sum(one.starts for one in results) >= 2
    assert set(POINTS) - reached == set()


def test_plans_follow_from_their_seeds_and_leave_no_point_out():
    drawn = [plan_of(seed) for seed in range(20 * len(POINTS))]
    assert drawn == [plan_of(seed) for seed in range(20 * len(POINTS))]
    assert {plan.point for plan in drawn} - {""} == set(POINTS)
    orders = {order.partition("=")[2] for plan in drawn for order in plan.source + plan.target}
    assert orders == {"kill", "stop", "raise", "exit"}
    assert {plan.mode for plan in drawn} == {"live", "known", "copy"}
