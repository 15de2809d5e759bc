"""Placement: who takes a session, who cannot and why; the order of what is known is nothing."""

from __future__ import annotations

import dataclasses
import random

import pytest

from kvpack.errors import FormatError, LimitError
from node.placement.balancing import plan_rebalance
from node.placement.choosing import choose, plan_drain
from node.placement.notice import decode_notice, encode_notice, notice_name
from node.placement.values import (
    Continuation,
    Kind,
    NodeState,
    Plan,
    SessionLoad,
    Step,
    Unplaced,
    Why,
)
from node.session import check_session_id
from node.transient import is_transient

OURS = Kind(b"i" * 32, b"n" * 32)
OTHER_BUILD = Kind(b"i" * 32, b"m" * 32)
OTHER_MODEL = Kind(b"j" * 32, b"n" * 32)


def node(name, free=100, kind=OURS, **more):
    return NodeState(name, kind, more.pop("capacity", 1000), free, **more)


def load(size, name="s"):
    return SessionLoad(name, size)


def test_the_most_free_of_the_exact_ones_is_chosen():
    nodes = [
        node("a", 1000), node("b", 100), node("c", 300), node("d", 300),
        node("e", 999, OTHER_BUILD), node("f", 999, OTHER_MODEL),
        node("g", 999, leaving=True), node("h", 999, lease_left_s=0.0),
        node("i", 999, sessions=64),
    ]  # fmt: skip
    for seed in range(20):
        mixed = random.Random(seed).sample(nodes, len(nodes))
        found = choose(load(50), "a", OURS, mixed, accept_compatible=True)
        assert found == Step(load(50), "a", "c", Continuation.EXACT)
    found = choose(load(400), "a", OURS, nodes, accept_compatible=True)
    assert found == Step(load(400), "a", "e", Continuation.COMPATIBLE)


def test_a_refusal_says_why_of_every_node():
    nodes = [
        node("a", 1000), node("b", 10), node("c", 30), node("e", 999, OTHER_BUILD),
        node("f", 999, OTHER_MODEL), node("g", 999, leaving=True),
        node("h", 999, lease_left_s=0.0), node("i", 999, sessions=64),
    ]  # fmt: skip
    found = choose(load(50, "talk"), "a", OURS, nodes)
    assert isinstance(found, Unplaced)
    assert found.reasons == {
        Why.AWAY: 1, Why.LEAVING: 1, Why.MODEL: 1, Why.NUMERICS: 1, Why.SESSIONS: 1, Why.MEMORY: 2,
    }  # fmt: skip
    assert found.room_bytes == 30
    said = found.sentence()
    assert "session talk (50 B)" in said
    assert all(why.value in said for why in found.reasons)
    assert "at most 30 free" in said
    assert "no other node is known" in choose(load(1), "a", OURS, [node("a")]).sentence()
    # A drain says the same of the same state.
    assert plan_drain("a", OURS, [load(50, "talk")], nodes).unplaced == (found,)


def test_a_drain_places_all_that_fits_and_counts_what_it_places():
    nodes = [node("a", 0), node("b", 100), node("c", 90), node("d", 95, OTHER_BUILD)]
    sessions = [load(60, "s1"), load(50, "s2"), load(40, "s3"), load(30, "s4"), load(30, "s5")]
    plan = plan_drain("a", OURS, sessions, nodes, accept_compatible=True)
    assert not plan.unplaced
    placed = {step.session.session_id: (step.target, step.continuation) for step in plan.steps}
    assert placed == {
        "s1": ("b", Continuation.EXACT), "s2": ("c", Continuation.EXACT),
        "s3": ("b", Continuation.EXACT), "s4": ("c", Continuation.EXACT),
        "s5": ("d", Continuation.COMPATIBLE),
    }  # fmt: skip
    strict = plan_drain("a", OURS, sessions, nodes)
    assert [one.session.session_id for one in strict.unplaced] == ["s5"]
    assert strict.unplaced[0].reasons == {Why.NUMERICS: 1, Why.MEMORY: 2}


def test_a_drain_fills_no_node_with_more_sessions_than_it_may_have():
    nodes = [node("a"), node("b", 1000, sessions=62), node("c", 10, sessions=63)]
    plan = plan_drain("a", OURS, [load(1, f"s{i}") for i in range(5)], nodes)
    assert [step.target for step in plan.steps] == ["b", "b", "c"]
    assert plan.unplaced[0].reasons == {Why.SESSIONS: 2}


def test_no_plan_takes_more_than_there_is():
    for seed in range(200):
        draw = random.Random(seed)
        nodes = [
            node(f"n{i}", draw.randrange(0, 500), draw.choice([OURS, OTHER_BUILD]),
                 sessions_max=draw.randrange(0, 6))
            for i in range(draw.randrange(1, 8))
        ]  # fmt: skip
        sessions = [load(draw.randrange(0, 300), f"s{i}") for i in range(draw.randrange(0, 20))]
        consent = draw.random() < 0.5
        plan = plan_drain("n0", OURS, sessions, nodes, accept_compatible=consent)
        mixed = plan_drain(
            "n0", OURS, sessions[::-1], nodes[::-1], accept_compatible=consent
        )  # fmt: skip
        assert plan == mixed, seed
        assert len(plan.steps) + len(plan.unplaced) == len(sessions), seed
        for one in nodes:
            taken = [s for s in plan.steps if s.target == one.name]
            assert sum(s.session.row_bytes for s in taken) <= one.free_bytes, seed
            assert len(taken) <= one.sessions_max, seed
            assert not taken or one.name != "n0"
            exact = one.kind == OURS
            assert all((s.continuation is Continuation.EXACT) == exact for s in taken)
            assert exact or consent or not taken


def applied(nodes, sessions, plan):
    """What stands after ``plan``."""
    where = {name: list(found) for name, found in sessions.items()}
    free = {one.name: one.free_bytes for one in nodes}
    for step in plan.steps:
        where[step.source].remove(step.session)
        where[step.target].append(step.session)
        free[step.source] += step.session.row_bytes
        free[step.target] -= step.session.row_bytes
    after = [
        dataclasses.replace(one, free_bytes=free[one.name], sessions=len(where[one.name]))
        for one in nodes
    ]
    return after, where


def test_a_rebalance_levels_settles_and_is_bounded():
    for seed in range(100):
        draw = random.Random(seed)
        nodes, sessions = [], {}
        for i in range(draw.randrange(2, 9)):
            name = f"n{i}"
            sessions[name] = [
                load(draw.randrange(1, 40), f"{name}.{j}") for j in range(draw.randrange(0, 30))
            ]
            taken = sum(one.row_bytes for one in sessions[name])
            capacity = draw.choice([1000, 2000])
            nodes.append(node(name, max(0, capacity - taken), capacity=capacity,
                              sessions=len(sessions[name])))  # fmt: skip
        plan = plan_rebalance(nodes, sessions)
        after, where = applied(nodes, sessions, plan)
        fills = [1 - one.free_bytes / one.capacity_bytes for one in after]
        before = [1 - one.free_bytes / one.capacity_bytes for one in nodes]
        assert max(fills) <= max(before) + 1e-6, seed
        # No session is above 40, so nodes of 1,000 can always be levelled to 5 parts of 100.
        assert max(fills) - min(fills) <= 0.05 + 0.001, seed
        assert plan_rebalance(after, where) == Plan(()), seed
        short = plan_rebalance(nodes, sessions, steps_max=2)
        assert short.steps == plan.steps[:2], seed
        ids = [step.session.session_id for step in plan.steps]
        assert len(ids) == len(set(ids)), seed


def test_a_rebalance_mixes_no_numerics_without_consent_and_no_models_ever():
    full = [load(100, f"s{i}") for i in range(9)]
    for kind, consent, moves in (
        (OTHER_BUILD, False, 0), (OTHER_BUILD, True, 4), (OTHER_MODEL, True, 0),
    ):  # fmt: skip
        nodes = [node("a", 100), node("b", 1000, kind)]
        plan = plan_rebalance(nodes, {"a": full}, accept_compatible=consent)
        assert len(plan.steps) == moves
        assert all(step.continuation is Continuation.COMPATIBLE for step in plan.steps)
    for gone in ({"leaving": True}, {"lease_left_s": 0.0}, {"sessions": 64}):
        assert not plan_rebalance([node("a", 100), node("b", 1000, **gone)], {"a": full}).steps
    with pytest.raises(LimitError, match="steps_max"):
        plan_rebalance([], {}, steps_max=257)


def test_a_notice_comes_back_as_it_was_and_a_wrong_one_is_refused_by_name():
    state = node("mac mini", 7, sessions=3, address="mac:7411", http="https://mac:8080")
    encoded = encode_notice(state)
    assert decode_notice("mac mini", encoded, 12.5) == dataclasses.replace(state, lease_left_s=12.5)
    assert check_session_id(notice_name("mac mini \N{SNOWMAN}"))
    assert is_transient(notice_name("x"))
    assert notice_name("x") != notice_name("y")
    for wrong in (b"", b"{}", encoded[:-1], encoded.replace(b"mac:7411", b"nowhere!")):
        with pytest.raises(FormatError, match="notice"):
            decode_notice("mac mini", wrong, 1.0)
    with pytest.raises(FormatError, match="of node box"):
        decode_notice("box", encoded, 1.0)
    with pytest.raises(LimitError, match="notice"):
        decode_notice("mac mini", b" " * 4097 + encoded, 1.0)
    with pytest.raises(LimitError, match="free_bytes"):
        decode_notice("mac mini", encoded.replace(b'"free_bytes":7', b'"free_bytes":1001'), 1.0)
