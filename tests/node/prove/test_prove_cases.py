"""The case list as data: what it holds for which model, and what it says it leaves out."""

from __future__ import annotations

import pytest

from node.prove.cases import (
    BLOCKS,
    CALL_TOKENS_MAX,
    Continuation,
    Group,
    History,
    ModelShape,
    Route,
    make_plan,
)

CONTEXT = 131_072


def plan_of(*windows: int, context: int = CONTEXT, quick: bool = False):
    return make_plan(ModelShape(windows, context), quick=quick)


def positions(plan) -> set[int]:
    return {station.history.position for station in plan.stations}


@pytest.mark.parametrize("window", [8, 16, 64, 2048])
def test_every_position_of_the_matrix_is_there(window: int) -> None:
    edges = {1, window - 2, window - 1, window, window + 1, window + 2}
    edges |= {2 * window - 1, 2 * window, 2 * window + 1, 5 * window + 3, 255, 256, 257}
    assert positions(plan_of(window)) == edges


@pytest.mark.parametrize("window", [8, 64, 2048])
def test_positions_are_reached_in_every_way(window: int) -> None:
    plan = plan_of(window)
    for position in positions(plan):
        ways = {
            station.history.runs
            for station in plan.stations
            if station.history.position == position
        }
        assert ((1, position),) in ways
        assert ((position, 1),) in ways or position > CALL_TOKENS_MAX
        for steps in (1, 40, 300):
            if steps < position <= CALL_TOKENS_MAX:
                # Equal calls are one run: a prefill of one token is a single call, too.
                prefill = ((position - steps, 1), (1, steps))
                assert prefill in ways or position - steps == 1


def test_chunks_cross_the_seam_of_the_ring() -> None:
    chunks = [s.history for s in plan_of(64).stations if s.history.label.startswith("chunks")]
    edges, done = set(), 0
    for size in max(chunks, key=lambda history: history.position).calls:
        edges.add(done % 64)
        done += size
    assert len(edges) > 2 and edges != {0}


def test_every_cut_comes_back_in_every_way() -> None:
    for station in plan_of(64).stations:
        assert {route for route, _ in station.restores} == set(Route)
        for route in Route:
            kinds = {kind for r, kind in station.restores if r is route}
            assert kinds == set(Continuation)


def test_every_k_of_n_is_there() -> None:
    """Also of blocks that are wider than the ring."""
    for window in (8, 16, 64):
        plan = plan_of(window)
        assert plan.rollbacks and not any("wider" in sentence for sentence in plan.left_out)
        for station in plan.rollbacks:
            assert set(station.blocks) == {(n, k) for n in BLOCKS for k in range(n + 1)}


def test_quick_is_shorter_and_has_every_route_and_continuation() -> None:
    quick, full = plan_of(64, quick=True), plan_of(64)
    assert len(quick.stations) < len(full.stations) / 5
    restores = {restore for station in quick.stations for restore in station.restores}
    assert restores == {(route, kind) for route in Route for kind in Continuation}
    assert quick.rollbacks and any("--quick" in sentence for sentence in quick.left_out)


def test_what_is_essential_comes_first_and_is_little() -> None:
    plan = plan_of(2048)
    essential = [station.essential for station in plan.stations]
    assert essential == sorted(essential, reverse=True) and 0 < sum(essential) < 5
    assert plan.rollbacks[0].essential


def test_two_windows_are_both_tested() -> None:
    found = positions(plan_of(128, 512, 1024))
    assert {127, 128, 129, 1023, 1024, 1025} <= found and 513 not in found


def test_a_model_without_windows_has_growth_steps_only() -> None:
    plan = plan_of()
    assert {255, 256, 257} <= positions(plan)
    assert any("no layer of this model has one" in sentence for sentence in plan.left_out)


@pytest.mark.parametrize("context", [192, 256, 512])
def test_a_short_context_is_never_overrun(context: int) -> None:
    plan = plan_of(16, context=context)
    for station in plan.stations:
        for _, kind in station.restores:
            assert station.history.position + kind.tokens <= context
    for pair in plan.shapes:
        assert pair.left.position == pair.right.position <= context - 64


def test_names_are_unique_and_runs_are_compact() -> None:
    for quick in (False, True):
        plan = plan_of(2048, quick=quick)
        names = [item.name for item in (*plan.stations, *plan.rollbacks)]
        assert len(set(names)) == len(names)
        ways = [(s.history.position, s.history.runs) for s in plan.stations]
        assert len(set(ways)) == len(ways)
        assert all(len(station.history.runs) <= 4 for station in plan.stations)


def test_unequal_shapes_are_not_promised() -> None:
    groups = [pair.group for pair in plan_of(64).shapes]
    assert groups == [group for group in Group if not group.is_promised]
    for pair in plan_of(64).shapes:
        assert pair.left.runs != pair.right.runs or pair.block_tokens


def test_a_history_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="must have tokens"):
        History("none", ((0, 3),))
