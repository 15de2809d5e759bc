"""Which sessions move so that nodes are about equally full: a pure function, bounded, that settles.

Only nodes of one kind (model, numerics) are compared with each other, unless there is consent to
compatible continuations: then those of one model. A step goes from the fullest node to the least
full one, and only if the source is still at least as full as the target after it: so no step can
call for the opposite one, and a plan over its own result is empty.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvpack import limits
from node.placement.values import Continuation, Kind, NodeState, Plan, SessionLoad, Step

#: Moves of one plan at most. Who wants more asks again, with what nodes then say of themselves.
STEPS_MAX: Final = 256

#: Nodes whose fill differs by less are left alone: 5 parts of 100. A move costs more than it helps.
SPREAD: Final = 0.05

#: What is said of a part is compared in whole parts of this many: floats would differ by machine.
_PARTS: Final = 1_000_000


@dataclass(slots=True)
class _Filling:
    """One node while steps are chosen; ``loads`` ascend by size, then by name."""

    node: NodeState
    free_bytes: int
    places: int
    loads: list[tuple[int, str]]

    @property
    def fill(self) -> int:
        """How full it is, in millionths of what it gives."""
        taken = self.node.capacity_bytes - self.free_bytes
        return taken * _PARTS // max(1, self.node.capacity_bytes)

    @property
    def order(self) -> tuple[int, str]:
        return self.fill, self.node.name


def plan_rebalance(
    nodes: Sequence[NodeState],
    sessions: Mapping[str, Sequence[SessionLoad]],
    *,
    accept_compatible: bool = False,
    steps_max: int = STEPS_MAX,
    spread: float = SPREAD,
) -> Plan:
    """Moves that make nodes about equally full.

    Args:
        nodes: All of them. Those that are away or are being drained are left out.
        sessions: What each has, by its name.
        accept_compatible: Nodes of one model are compared whatever they compute on.
        steps_max: How many moves at most, 1 to 256.
        spread: How much the fullest node may be fuller than the least full one, as a part.

    Raises:
        LimitError: ``steps_max`` is outside its range.
    """
    limits.check_range("rebalance.steps_max", steps_max, 1, STEPS_MAX, "moves")
    groups: dict[bytes, list[_Filling]] = {}
    for node in nodes:
        if not node.is_away and not node.leaving and node.capacity_bytes:
            loads = sorted((one.row_bytes, one.session_id) for one in sessions.get(node.name, ()))
            key = node.kind.identity + (b"" if accept_compatible else node.kind.numerics)
            places = node.sessions_max - node.sessions
            groups.setdefault(key, []).append(_Filling(node, node.free_bytes, places, loads))
    steps: list[Step] = []
    for key in sorted(groups):
        steps += _level(groups[key], steps_max - len(steps), int(spread * _PARTS))
    return Plan(tuple(steps))


def _level(group: list[_Filling], steps_max: int, spread: int) -> list[Step]:
    """Steps within one group, while one helps."""
    steps: list[Step] = []
    moved: set[str] = set()
    waiting = sorted(group, key=lambda one: one.order)
    while len(waiting) > 1 and len(steps) < steps_max:
        source, target = waiting[-1], _least(waiting)
        if target is None or source.fill - target.fill <= spread:
            break
        load = _best(source, target, moved)
        if load is None:
            # Nothing of it is small enough to help: the next fullest one may have something.
            waiting.pop()
            continue
        waiting.remove(source)
        waiting.remove(target)
        steps.append(_step(source, target, load))
        moved.add(load[1])
        for one in (source, target):
            insort(waiting, one, key=lambda filling: filling.order)
    return steps


def _least(waiting: list[_Filling]) -> _Filling | None:
    """The least full one that may take a session more."""
    return next((one for one in waiting[:-1] if one.places > 0), None)


def _best(source: _Filling, target: _Filling, moved: set[str]) -> tuple[int, str] | None:
    """The largest session after which ``source`` is still at least as full as ``target``."""
    a, b = source.node.capacity_bytes, target.node.capacity_bytes
    taken, other = a - source.free_bytes, b - target.free_bytes
    # (taken - x) / a >= (other + x) / b, for x.
    at_most = min((taken * b - other * a) // (a + b), target.free_bytes)
    end = bisect_right(source.loads, (at_most, "\U0010ffff"))
    for load in reversed(source.loads[:end]):
        if load[0] > 0 and load[1] not in moved:
            return load
    return None


def _step(source: _Filling, target: _Filling, load: tuple[int, str]) -> Step:
    size, name = load
    source.loads.remove(load)
    source.free_bytes += size
    source.places += 1
    insort(target.loads, load)
    target.free_bytes -= size
    target.places -= 1
    continuation = _continuation(source.node.kind, target.node.kind)
    return Step(SessionLoad(name, size), source.node.name, target.node.name, continuation)


def _continuation(ours: Kind, theirs: Kind) -> Continuation:
    same = ours.numerics == theirs.numerics
    return Continuation.EXACT if same else Continuation.COMPATIBLE
