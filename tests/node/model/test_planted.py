"""The checker finds what it is there to find: each planted bug gives a trace."""

from __future__ import annotations

import dataclasses

import pytest

from model.explore import explore
from model.test_model import FAULTS, MOVE, ROUTES
from model.values import Rules, Scenario

LOST = "the session is lost: its owner does not have it"
STRANGER = "a node serves that does not own"


def planted(side: str, changes: dict[tuple[str, str], tuple[str, str]]) -> Rules:
    """The production tables with some pairs leading elsewhere."""
    rules = Rules()
    return dataclasses.replace(rules, **{side: {**getattr(rules, side), **changes}})


BEFORE_DURABLE = {
    ("probing", "probe_good"): ("transferring", "transfer"),
    ("transferring", "cas_won"): ("publishing", "publish"),
    ("publishing", "published"): ("committed", "swap"),
}

ASKS_FOR_EVER = {
    ("sealing", "seal_failed"): ("reopening", "prepare"),
    ("reopening", "prepare_failed"): ("reopening", "prepare"),
}

TABLES = {
    "released because Commit failed": (
        "source", {("committing", "commit_failed"): ("released", "release")}, "timeout", LOST,
    ),
    "released on an answer, without reading": (
        "source", {("committing", "commit_answered"): ("released", "release")}, "lie", LOST,
    ),
    "resumed without a raise": (
        "source", {("reading", "owner_self"): ("resumed", "thaw")}, "timeout", STRANGER,
    ),
    "resumed though the raise may be lost": (
        "source", {("raising", "directory_down"): ("resumed", "thaw")}, "timeout directory",
        STRANGER,
    ),
    "kept after the freeze": (
        "source", {("sealing", "seal_failed"): ("kept", "abort")}, "timeout",
        "the owner's session is stuck",
    ),
    "raises again and again what it read once": (
        "source", {("raising", "raise_lost"): ("raising", "raise")}, "timeout",
        "a move has not ended",
    ),
    "asks for ever": ("source", ASKS_FOR_EVER, "bad", "it may go on for ever"),
    "serves while unsettled": (
        "target", {("transferring", "cas_unknown"): ("committed", "swap")}, "directory", STRANGER,
    ),
    "given up while unsettled": (
        "target", {("unsettled", "lease_over"): ("aborted", "discard")}, "reply", LOST,
    ),
    "swapped before it is durable": ("target", BEFORE_DURABLE, "crash", LOST),
    "sealed by a restart": (
        "target", {("none", "reload"): ("sealed", "reserve")}, "crash",
        "a pack was published that lacks chunks",
    ),
    "aborted though committed": (
        "target", {("committed", "abort"): ("aborted", "discard")}, "stray crash", LOST,
    ),
    "a copy reported that nobody confirmed": (
        "copy", {("asking", "target_silent"): ("copied", "finish")}, "timeout",
        "a copy that was reported does not exist",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_bug_planted_in_a_table_is_found(name):
    side, changes, kinds, promise = TABLES[name]
    routes = ROUTES["copy"] if side == "copy" else MOVE
    found = explore(Scenario(routes, frozenset(kinds.split()), 2), planted(side, changes))
    assert found.fault is not None and found.fault.promise == promise, f"\n{found.fault}"


RULES = {
    "none_is_other": (True, "move", "vanish", 1),
    "raise_on_restart": (False, "move", "crash", 1),
    "reread_when_stale": (False, "move", "late", 1),
    "restart_settles_by_write": (False, "move", "late crash", 1),
    "keep_published": (False, "onward", "crash timeout", 0),
    "reopen_only_lost": (False, "move", "crash", 1),
    "let_go_by_pack": (False, "there and back", "crash", 0),
    "compare_token": (False, "move", "timeout", 1),
    "client_compares": (False, "move", "takeover", 2),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_driver_that_breaks_one_rule_is_found(rule):
    value, routes, kinds, appends = RULES[rule]
    scenario = Scenario(ROUTES[routes], frozenset(kinds.split()), 2, appends)
    found = explore(scenario, dataclasses.replace(Rules(), **{rule: value}))
    assert found.fault is not None


def test_every_rule_of_the_drivers_is_planted_once():
    tables = {"source", "copy", "target"}
    assert {field.name for field in dataclasses.fields(Rules)} - tables == set(RULES)


def test_a_trace_reads_from_the_first_event_to_the_broken_promise():
    changes = {("reading", "owner_self"): ("resumed", "thaw")}
    found = explore(Scenario(MOVE, FAULTS, 1), planted("source", changes))
    lines = str(found.fault).splitlines()
    assert lines[0] == STRANGER
    assert lines[1] == "  1. A: move 0 A->B begins (start), now preparing"
    assert lines[-1].endswith("B: move 0 A->B swaps: it wins, now committed")
