"""The state tables themselves: walked whole, and checked as a model against one directory key."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from node.errors import TransferStateError
from node.migration.table import (
    COPY,
    SOURCE,
    SOURCE_ENDED,
    SOURCE_FROZEN,
    TARGET,
    TARGET_ENDED,
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


# --- A model: both machines, one directory key, messages that may be lost, calls that may fail. ---
# The production tables decide every step; the model only performs effects on three values.


@dataclasses.dataclass(frozen=True)
class World:
    """``revision`` counts writes of the key; the transfer starts from revision 1 of the source."""

    source: SourceState = SourceState.IDLE
    target: TargetState = TargetState.NONE
    owner: str = "source"
    revision: int = 1
    source_revision: int = 1
    todo: SourceEffect | None = None
    target_todo: TargetEffect | None = None

    def source_serves(self):
        return self.source not in SOURCE_FROZEN and self.source is not SourceState.RELEASED

    def target_serves(self):
        return self.target is TargetState.COMMITTED and self.target_todo is None


def _source_on(world, table, event):
    step = table.get((world.source, event))
    if step is None:
        return None
    return dataclasses.replace(world, source=step.state, todo=step.effect)


def _target_on(world, table, event):
    step = table.get((world.target, event))
    if step is None:
        return world
    return dataclasses.replace(world, target=step.state, target_todo=step.effect)


def _source_moves(world, source, target):
    """Every way in which the source's pending effect can end."""
    effect, e = world.todo, SourceEvent
    sent = {  # effect -> (message to the target, event on success, event on loss)
        SourceEffect.PREPARE: (TargetEvent.PREPARE, e.PREPARED, e.PREPARE_FAILED),
        SourceEffect.STREAM: (TargetEvent.PIECE, e.PUSHED, e.PUSH_FAILED),
        SourceEffect.SEAL: (TargetEvent.SEAL, e.SEALED, e.SEAL_FAILED),
        SourceEffect.COMMIT: (TargetEvent.COMMIT, e.COMMIT_ANSWERED, e.COMMIT_FAILED),
    }
    cuts = {
        SourceEffect.PREPARE: e.PREPARE_CUT,
        SourceEffect.STREAM: e.PUSH_CUT,
        SourceEffect.SEAL: e.SEAL_CUT,
    }
    if effect is None and world.source is SourceState.IDLE:
        yield _source_on(world, source, e.START)
    elif effect in sent:
        message, good, bad = sent[effect]
        arrived = _target_on(world, target, message)
        yield _source_on(world, source, bad)  # lost
        yield _source_on(arrived, source, good)
        yield _source_on(arrived, source, bad)  # the answer was lost
        cut = cuts.get(effect)
        if (world.source, cut) in source:
            yield _source_on(world, source, cut)
            yield _source_on(arrived, source, cut)
    elif effect in (SourceEffect.READ_OWNER, SourceEffect.WAIT):
        mine = world.owner == "source"
        found = e.OWNER_SELF if mine else e.OWNER_OTHER
        yield _source_on(world, source, found)
        yield _source_on(world, source, e.DIRECTORY_DOWN)
    elif effect is SourceEffect.RAISE:
        if world.owner == "source" and world.revision == world.source_revision:
            # Beyond 3 another write changes nothing any more: the model stays finite.
            higher = min(3, world.revision + 1)
            raised = dataclasses.replace(world, revision=higher, source_revision=higher)
            yield _source_on(raised, source, e.RAISED)
            yield _source_on(raised, source, e.DIRECTORY_DOWN)  # it happened; the reply was lost
        else:
            yield _source_on(world, source, e.RAISE_LOST)
        yield _source_on(world, source, e.DIRECTORY_DOWN)
    elif effect in (SourceEffect.ABORT, SourceEffect.THAW):
        done = dataclasses.replace(world, todo=None)
        yield done
        yield _target_on(done, target, TargetEvent.ABORT)
    elif effect is SourceEffect.RELEASE:
        yield dataclasses.replace(world, todo=None)


def _target_moves(world, target):
    """Every way in which the target's pending effect can end, or its lease."""
    effect, e = world.target_todo, TargetEvent
    if effect is TargetEffect.PROBE:
        yield _target_on(world, target, e.PROBE_GOOD)
        yield _target_on(world, target, e.PROBE_BAD)
    elif effect is TargetEffect.PUBLISH:
        yield _target_on(world, target, e.PUBLISHED)
        yield _target_on(world, target, e.PUBLISH_FAILED)
    elif effect in (TargetEffect.TRANSFER, TargetEffect.SETTLE):
        if world.owner == "target":  # settled by nonce: it had happened
            yield _target_on(world, target, e.CAS_WON)
        elif world.revision == 1:
            won = dataclasses.replace(world, owner="target", revision=world.revision + 1)
            yield _target_on(won, target, e.CAS_WON)
            yield _target_on(won, target, e.CAS_UNKNOWN)
        else:
            yield _target_on(world, target, e.CAS_LOST)
        yield _target_on(world, target, e.CAS_UNKNOWN)
    else:
        if effect is not None:
            yield dataclasses.replace(world, target_todo=None)
        yield _target_on(world, target, e.LEASE_OVER)


def explore(source=SOURCE, target=TARGET):
    """All worlds that can be reached; a read of the owner also learns the present revision."""
    start = World()
    seen, edge = {start}, [start]
    while edge:
        world = edge.pop()
        # A driver performs its effect before it takes the next message: that is the lock.
        busy = world.target_todo in (
            TargetEffect.PROBE, TargetEffect.PUBLISH, TargetEffect.TRANSFER, TargetEffect.SETTLE,
        )  # fmt: skip
        following = list(_target_moves(world, target))
        reached = list(_source_moves(world, source, {} if busy else target))
        for one in (*following, *reached):
            if one is None:
                raise AssertionError(f"no step from {world}")
            if one.source is SourceState.RAISING and one.owner == "source":
                one = dataclasses.replace(one, source_revision=one.revision)
            if one not in seen:
                seen.add(one)
                edge.append(one)
    return seen


def violations(worlds):
    """Worlds in which two serve, or the one that serves does not own."""
    return [
        world
        for world in worlds
        if (world.source_serves() and world.target_serves())
        or (world.source_serves() and world.owner != "source")
        or (world.target_serves() and world.owner != "target")
    ]


def test_no_reachable_world_has_two_owners_or_a_server_that_does_not_own():
    worlds = explore()
    assert len(worlds) > 100
    assert violations(worlds) == []


def test_every_world_can_end_with_exactly_one_server():
    def ended(world):
        one = world.source_serves() != world.target_serves()
        return world.source in SOURCE_ENDED and world.target in TARGET_ENDED and one

    worlds = explore()
    steps = {
        world: {*_target_moves(world, TARGET), *filter(None, _source_moves(world, SOURCE, TARGET))}
        for world in worlds
    }
    good = {world for world in worlds if ended(world)}
    while True:
        more = {world for world in worlds - good if steps[world] & good}
        if not more:
            break
        good |= more
    never_prepared = {w for w in worlds if w.target is TargetState.NONE}
    assert worlds - good <= {w for w in never_prepared if w.source is SourceState.KEPT}


@pytest.mark.parametrize(
    ("pair", "event"),
    [
        ((SourceState.COMMITTING, SourceEvent.COMMIT_FAILED), SourceState.RESUMED),
        ((SourceState.READING, SourceEvent.OWNER_SELF), SourceState.KEPT),
    ],
)
def test_the_model_finds_a_planted_fault(pair, event):
    planted = dict(SOURCE)
    planted[pair] = dataclasses.replace(planted[pair], state=event, effect=SourceEffect.THAW)
    assert violations(explore(source=planted))


def test_the_model_finds_a_target_that_serves_without_knowing():
    planted = dict(TARGET)
    pair = (TargetState.TRANSFERRING, TargetEvent.CAS_UNKNOWN)
    planted[pair] = dataclasses.replace(
        planted[pair], state=TargetState.COMMITTED, effect=TargetEffect.SWAP
    )
    assert violations(explore(target=planted))
