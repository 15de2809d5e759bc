"""The state tables themselves, walked whole. As a model they are checked in ``model/``."""

from __future__ import annotations

import itertools

import pytest

from node.errors import TransferStateError
from node.migration.table import (
    COPY,
    SOURCE,
    SOURCE_FROZEN,
    TARGET,
    Machine,
    SourceEffect,
    SourceEvent,
    SourceState,
    TargetEffect,
    TargetEvent,
    TargetState,
)

_SIDES = [
    pytest.param(TARGET, TargetState, TargetEvent, TargetEffect, id="target"),
    pytest.param(SOURCE, SourceState, SourceEvent, SourceEffect, id="source"),
    pytest.param(COPY, SourceState, SourceEvent, SourceEffect, id="copy"),
]


@pytest.mark.parametrize(("table", "states", "events", "effects"), _SIDES)
def test_every_pair_is_in_the_table_or_refused_without_a_change(table, states, events, effects):
    refused = 0
    for state, event in itertools.product(states, events):
        machine = Machine(table, state)
        if (state, event) in table:
            assert machine.permits(event)
            assert machine.on(event) is table[state, event].effect
            assert machine.state is table[state, event].state
            continue
        refused += 1
        assert not machine.permits(event)
        with pytest.raises(TransferStateError, match=state.value):
            machine.on(event)
        assert machine.state is state
    assert refused == len(states) * len(events) - len(table)


@pytest.mark.parametrize(
    ("tables", "states", "events", "effects"),
    [
        ((TARGET,), TargetState, TargetEvent, TargetEffect),
        ((SOURCE, COPY), SourceState, SourceEvent, SourceEffect),
    ],
)
def test_nothing_in_the_tables_is_dead(tables, states, events, effects):
    reached = set().union(*(_reachable(table, next(iter(states))) for table in tables))
    assert reached == set(states)
    assert {event for table in tables for _, event in table} == set(events)
    assert {step.effect for table in tables for step in table.values()} == set(effects)
    for table in tables:
        assert {state for state, _ in table} <= _reachable(table, next(iter(states)))


def _reachable(table, first):
    reached, edge = {first}, [first]
    while edge:
        here = edge.pop()
        for (state, _), step in table.items():
            if state is here and step.state not in reached:
                reached.add(step.state)
                edge.append(step.state)
    return reached


def test_a_copy_never_freezes_its_source_and_never_touches_its_ownership():
    owned = {SourceEffect.RAISE, SourceEffect.READ_OWNER, SourceEffect.RELEASE, SourceEffect.THAW}
    assert not {step.effect for step in COPY.values()} & owned


def test_a_frozen_source_serves_again_only_after_its_own_compare_and_swap():
    for (state, event), step in SOURCE.items():
        if state in SOURCE_FROZEN and step.state not in SOURCE_FROZEN:
            expected = {
                SourceEvent.RAISED: SourceState.RESUMED,
                SourceEvent.OWNER_OTHER: SourceState.RELEASED,
            }
            assert step.state is expected[event]


def test_the_target_changes_owner_only_after_probe_and_durable_state():
    for (state, event), step in TARGET.items():
        if step.effect is TargetEffect.TRANSFER:
            assert (state, event) == (TargetState.PUBLISHING, TargetEvent.PUBLISHED)
        if step.effect is TargetEffect.PUBLISH:
            assert (state, event) == (TargetState.PROBING, TargetEvent.PROBE_GOOD)
        if step.effect is TargetEffect.SWAP:
            assert event is TargetEvent.CAS_WON
