"""The world of the model: values only. Small integers and strings, so that states hash fast.

Nodes, transfers and sessions are numbers. A *session content* is a bit mask: bit 0 says that the
session was not begun anew, the others are the client's acknowledged appends. What is volatile and
what is durable is said at each field; a crash (:mod:`model.nodes`) keeps exactly the latter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from node.migration.table import COPY, SOURCE, SOURCE_ENDED, TARGET, TARGET_ENDED

A, B, C = 0, 1, 2
NAMES = ("A", "B", "C")
NOBODY = -1

#: Phases of a node.
UP, DOWN, RECOVERING = 0, 1, 2

#: What a journal remembers of a transfer.
UNKNOWN, OPEN, COMMITTED, ABORTED = 0, 1, 2, 3

#: The pack in which node A holds session 0 from the beginning, if the scenario says so.
FIRST_PACK = -1

SOURCE_DONE = frozenset(state.value for state in SOURCE_ENDED) | {"idle", "gone"}
TARGET_DONE = frozenset(state.value for state in TARGET_ENDED) | {"none"}


class Key(NamedTuple):
    """One entry of the directory. ``nonce`` is 1 + the transfer whose write it was, or 0."""

    owner: int
    revision: int
    nonce: int
    vanished: bool = False  # the directory lost it; it comes back as it was


class Live(NamedTuple):
    """A session in the memory of a node: volatile."""

    revision: int
    content: int
    frozen: bool = False
    armed: bool = False  # an operation passed its check and was paused before it acted
    mover: int = NOBODY  # the transfer that moves it away


class Node(NamedTuple):
    """One node. ``held`` is durable, the rest volatile."""

    phase: int
    live: tuple[Live | None, ...]  # by session
    held: tuple[int, ...]  # by session: 1 + transfer whose pack the journal holds it in; 0: none
    lost: bool = False  # recovery found session 0 owned, but not durable
    blind: bool = False  # recovery found session 0 durable, but not in the directory
    claiming: int = 0  # an open() read this revision as "ours, but lost", and was paused
    dropping: int = 0  # 1 + pack whose file is gone, but not yet its row in the journal


class Transfer(NamedTuple):
    """One transfer, both ends. Durable at the target: ``journal``, ``pack``, and the spool."""

    source: str = "idle"
    effect: str = ""  # of the source, on the directory: not yet performed
    call: str = ""  # the request whose answer the source awaits
    answer: str = ""
    held: bool = False  # the source heard that the target holds everything
    token: int = 0  # the revision it was prepared under
    read: int = 0  # the revision the source read or wrote last
    content: int = 0  # of the cut
    target: str = "none"
    todo: str = ""  # effect of the target, not yet performed: its lock is held
    caller: bool = False  # somebody awaits the answer to what the target does
    received: bool = False  # every chunk; the spool has them too, if it was written back in time
    journal: int = UNKNOWN
    pack: bool = False  # published: durable under its name
    claim: int = 0  # a copy: revision of the target's own claim


class World(NamedTuple):
    """Everything. ``must`` are the appends that may not be lost any more."""

    keys: tuple[Key, ...]
    nodes: tuple[Node, ...]
    transfers: tuple[Transfer, ...]
    net: tuple[tuple[str, int, bool], ...] = ()  # (request, transfer, somebody waits)
    late: tuple[tuple[int, int, int, int, int], ...] = ()  # directory writes under way
    faults: int = 0  # that may still happen
    appends: int = 0  # that the client may still make
    acknowledged: int = 0  # how many were
    must: int = 1
    cut: int = 1  # what the last published cut of session 0 holds: the loss bound
    seen: int = 0  # the highest revision that the client saw
    forced: bool = False  # an operator took the session over
    wrong: str = ""  # what a step saw that must never be


@dataclasses.dataclass(frozen=True)
class Route:
    """From where to where; ``session`` 1 is a copy, which the target claims."""

    source: int
    target: int
    session: int = 0


def flat(table) -> Mapping[tuple[str, str], tuple[str, str]]:
    """A production table by the words of its states, events and effects."""
    return {
        (state.value, event.value): (step.state.value, step.effect.value)
        for (state, event), step in table.items()
    }


@dataclasses.dataclass(frozen=True)
class Rules:
    """The tables, and what the drivers promise beside them. A planted bug changes one of these."""

    source: Mapping[tuple[str, str], tuple[str, str]] = dataclasses.field(
        default_factory=lambda: flat(SOURCE)
    )
    copy: Mapping[tuple[str, str], tuple[str, str]] = dataclasses.field(
        default_factory=lambda: flat(COPY)
    )
    target: Mapping[tuple[str, str], tuple[str, str]] = dataclasses.field(
        default_factory=lambda: flat(TARGET)
    )
    none_is_other: bool = False  # an entry that vanished counts as owned by another
    raise_on_restart: bool = True  # a restarted owner raises the revision before it serves
    reread_when_stale: bool = True  # settling looks once more where its write was stale
    restart_settles_by_write: bool = True  # not only by reading
    keep_published: bool = True  # a restart keeps the pack of a session that it owns
    reopen_only_lost: bool = True  # open() claims anew only what recovery said is lost
    let_go_by_pack: bool = True  # releasing forgets its own pack, not the session's newest
    compare_token: bool = True  # the directory compares before it writes
    client_compares: bool = True  # the client drops output under a token below the highest seen


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What may happen: routes, faults by kind and in all, appends of the client."""

    routes: tuple[Route, ...]
    kinds: frozenset[str]
    faults: int
    appends: int = 1
    packed: bool = True  # A holds session 0 in a pack from the beginning

    def start(self) -> World:
        sessions = 1 + max(route.session for route in self.routes)
        owner = Node(UP, (Live(1, 1), None)[:sessions], (0, 0)[:sessions])
        if self.packed:
            owner = owner._replace(held=(FIRST_PACK, 0)[:sessions])
        other = Node(UP, (None,) * sessions, (0,) * sessions)
        nodes = 1 + max(max(route.source, route.target) for route in self.routes)
        nodes = max(nodes, 3 if "takeover" in self.kinds else 2)
        return World(
            keys=(Key(A, 1, 0), Key(NOBODY, 0, 0))[:sessions],
            nodes=(owner, *(other for _ in range(nodes - 1))),
            transfers=tuple(Transfer() for _ in self.routes),
            faults=self.faults,
            appends=self.appends,
            seen=1,
            cut=int(self.packed),
        )


class Step(NamedTuple):
    """One step: what happened, whether it was a fault, and the world after it."""

    label: str
    fault: bool
    world: World


Steps = Iterator[Step]


@dataclasses.dataclass(frozen=True)
class Model:
    """A scenario under rules."""

    scenario: Scenario
    rules: Rules

    def spend(self, world: World, kind: str) -> World | None:
        """One fault less, where this kind may happen."""
        if not world.faults or kind not in self.scenario.kinds:
            return None
        return world._replace(faults=world.faults - 1)

    def name(self, number: int) -> str:
        """What a transfer is called in a trace."""
        route = self.scenario.routes[number]
        word = "copy" if route.session else "move"
        return f"{word} {number} {NAMES[route.source]}->{NAMES[route.target]}"


def set_node(world: World, number: int, **changes) -> World:
    nodes = list(world.nodes)
    nodes[number] = nodes[number]._replace(**changes)
    return world._replace(nodes=tuple(nodes))


def set_transfer(world: World, number: int, **changes) -> World:
    transfers = list(world.transfers)
    transfers[number] = transfers[number]._replace(**changes)
    return world._replace(transfers=tuple(transfers))


def set_at(values: tuple, place: int, value) -> tuple:
    return (*values[:place], value, *values[place + 1 :])


def set_live(world: World, node: int, session: int, live: Live | None) -> World:
    return set_node(world, node, live=set_at(world.nodes[node].live, session, live))


def pack_content(world: World, pack: int) -> int:
    """What a pack holds."""
    if pack == FIRST_PACK:
        return 1
    return world.transfers[pack - 1].content if pack else 0
