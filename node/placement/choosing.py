"""Which node takes a session: pure functions, deterministic, and they say why where none can.

The rule is: of the nodes that can take it, those where it goes on exactly before those where it
only can compatibly; among these the one with the most free KV memory; among equals the first by
name. The most free one is chosen and not the fullest that still fits, since sessions grow: room
that is left spread out is room for all of them, and no choice has to be taken back soon.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

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


def why_not(
    node: NodeState, session: SessionLoad, source: str, kind: Kind, *, accept_compatible: bool
) -> Why | None:
    """Why ``node`` cannot take ``session`` of ``kind`` from ``source``; None: it can."""
    if node.name == source:
        return Why.ITSELF
    if node.is_away:
        return Why.AWAY
    if node.leaving:
        return Why.LEAVING
    if node.kind.identity != kind.identity:
        return Why.MODEL
    if node.kind.numerics != kind.numerics and not accept_compatible:
        return Why.NUMERICS
    if node.sessions >= node.sessions_max:
        return Why.SESSIONS
    if node.free_bytes < session.row_bytes:
        return Why.MEMORY
    return None


def choose(
    session: SessionLoad,
    source: str,
    kind: Kind,
    nodes: Iterable[NodeState],
    *,
    accept_compatible: bool = False,
) -> Step | Unplaced:
    """Where one session goes. Looks at each node once."""
    best: tuple[_Rank, NodeState] | None = None
    reasons: Counter[Why] = Counter()
    room: int | None = None
    for node in nodes:
        why = why_not(node, session, source, kind, accept_compatible=accept_compatible)
        if why is None:
            ranked = (_rank(node, kind), node)
            best = ranked if best is None else min(best, ranked, key=lambda one: one[0])
        elif why is not Why.ITSELF:
            reasons[why] += 1
            if why is Why.MEMORY:
                room = max(room or 0, node.free_bytes)
    if best is None:
        return Unplaced(session, _ordered(reasons), room)
    return Step(session, source, best[1].name, _continuation(best[1], kind))


def plan_drain(
    source: str,
    kind: Kind,
    sessions: Iterable[SessionLoad],
    nodes: Sequence[NodeState],
    *,
    accept_compatible: bool = False,
) -> Plan:
    """Where every session of ``source`` goes, the largest first: small ones fill what is left.

    What each choice takes is counted before the next one, as if it had arrived. Takes time in
    proportion to nodes, and for each session to the logarithm of their number.
    """
    room = Room.over(nodes, source, kind, accept_compatible=accept_compatible)
    steps: list[Step] = []
    unplaced: list[Unplaced] = []
    for session in sorted(sessions, key=lambda one: (-one.row_bytes, one.session_id)):
        found = room.place(session)
        if isinstance(found, Step):
            steps.append(found)
        else:
            unplaced.append(found)
    return Plan(tuple(steps), tuple(unplaced))


@dataclass(slots=True)
class Room:
    """What is left on the nodes that can take sessions of one node, while they are placed.

    One heap for exact and one for compatible continuations, the most free node first. If that one
    has too little room, no other one of its heap has enough.
    """

    source: str
    kind: Kind
    nodes: Sequence[NodeState]
    accept_compatible: bool
    heaps: dict[Continuation, list[_Entry]] = field(default_factory=dict)

    @classmethod
    def over(
        cls, nodes: Sequence[NodeState], source: str, kind: Kind, *, accept_compatible: bool
    ) -> Room:
        """All room that ``nodes`` have for sessions of ``source``."""
        room = cls(source, kind, nodes, accept_compatible)
        room.heaps = {one: [] for one in Continuation}
        empty = SessionLoad("", 0)
        for node in nodes:
            if why_not(node, empty, source, kind, accept_compatible=accept_compatible) is None:
                places = node.sessions_max - node.sessions
                entry = (-node.free_bytes, node.name, places)
                room.heaps[_continuation(node, kind)].append(entry)
        for heap in room.heaps.values():
            heapq.heapify(heap)
        return room

    def place(self, session: SessionLoad) -> Step | Unplaced:
        """Take room for ``session``."""
        for continuation, heap in self.heaps.items():
            if heap and -heap[0][0] >= session.row_bytes:
                free, name, places = heap[0]
                if places > 1:
                    heapq.heapreplace(heap, (free + session.row_bytes, name, places - 1))
                else:
                    heapq.heappop(heap)
                return Step(session, self.source, name, continuation)
        return self._unplaced(session)

    def _unplaced(self, session: SessionLoad) -> Unplaced:
        """Why not: of nodes with room the memory, of filled ones the places, of others as ever."""
        left = {name: -free for heap in self.heaps.values() for free, name, _ in heap}
        reasons: Counter[Why] = Counter()
        empty = SessionLoad("", 0)
        for node in self.nodes:
            why = why_not(
                node, empty, self.source, self.kind, accept_compatible=self.accept_compatible
            )
            if why is None:
                why = Why.MEMORY if node.name in left else Why.SESSIONS
            if why is not Why.ITSELF:
                reasons[why] += 1
        return Unplaced(session, _ordered(reasons), max(left.values(), default=None))


_Rank: TypeAlias = tuple[bool, int, str]
_Entry: TypeAlias = tuple[int, str, int]


def _rank(node: NodeState, kind: Kind) -> _Rank:
    """Ascending from the best."""
    return (node.kind.numerics != kind.numerics, -node.free_bytes, node.name)


def _continuation(node: NodeState, kind: Kind) -> Continuation:
    same = node.kind.numerics == kind.numerics
    return Continuation.EXACT if same else Continuation.COMPATIBLE


def _ordered(reasons: Counter[Why]) -> dict[Why, int]:
    """In the order in which they are asked, so that equal states give equal sentences."""
    return {why: reasons[why] for why in Why if reasons[why]}
