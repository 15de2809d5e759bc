"""The production tables under every interleaving of a bounded number of faults.

What is shown, in every world of every scenario below: at most one node serves, and it owns, by the
current token; nothing under a stale token is accepted; the owner has, in memory or published,
every acknowledged append that the loss bound does not give up; and once faults stop, every run
ends, with exactly one node serving, nothing acknowledged missing and nothing left over.
"""

from __future__ import annotations

import pytest

from model.explore import explore
from model.values import A, B, C, Route, Scenario

#: Faults of processes, network, directory and disks.
FAULTS = frozenset(
    {"crash", "loss", "double", "timeout", "directory", "reply", "late", "bad", "journal"}
)

MOVE = (Route(A, B),)
ROUTES = {
    "move": MOVE,
    "copy": (Route(A, B, 1),),
    "there and back": (Route(A, B), Route(B, A)),
    "twice": (Route(A, B), Route(A, B)),
    "onward": (Route(A, B), Route(B, C)),
    "two targets": (Route(A, B), Route(A, C)),
}


def check(scenario: Scenario, worlds: int) -> None:
    found = explore(scenario)
    assert found.fault is None, f"\n{found.fault}"
    assert found.worlds > worlds and found.endings > 1


@pytest.mark.parametrize(
    ("routes", "faults", "worlds"),
    [
        ("move", 2, 20_000),
        ("copy", 1, 1_000),
        ("onward", 1, 20_000),
        pytest.param("copy", 2, 20_000, marks=pytest.mark.slow),
        pytest.param("there and back", 1, 10_000, marks=pytest.mark.slow),
        pytest.param("twice", 1, 30_000, marks=pytest.mark.slow),
        pytest.param("two targets", 1, 30_000, marks=pytest.mark.slow),
    ],
)
def test_every_promise_holds_in_every_world_and_every_run_ends(routes, faults, worlds):
    check(Scenario(ROUTES[routes], FAULTS, faults), worlds)


def test_a_session_that_was_never_published_is_lost_only_with_its_process():
    check(Scenario(MOVE, FAULTS, 1, packed=False), 2_000)


@pytest.mark.parametrize("kind", ["takeover", "vanish", "lie", "stray"])
def test_operators_lost_entries_and_lying_targets_break_no_promise(kind):
    check(Scenario(MOVE, FAULTS | {kind}, 1), 2_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("routes", "faults", "appends"),
    [
        ("move", 3, 2),
        ("copy", 3, 1),
        ("there and back", 2, 1),
        ("twice", 2, 1),
        ("onward", 2, 1),
        ("two targets", 2, 1),
    ],
)
def test_more_faults_at_once_break_no_promise_either(routes, faults, appends):
    check(Scenario(ROUTES[routes], FAULTS, faults, appends), 100_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("routes", ["move", "onward"])
@pytest.mark.parametrize("kind", ["takeover", "vanish", "lie", "stray"])
def test_two_faults_beside_an_operator_break_no_promise_either(routes, kind):
    kinds = frozenset({"crash", "timeout", "reply", "late", kind})
    check(Scenario(ROUTES[routes], kinds, 2 if routes == "onward" else 3), 10_000)
