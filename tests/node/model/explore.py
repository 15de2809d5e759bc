"""Breadth first through every world; the shortest way to a broken promise; does it always end?"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator

from model.checks import broken, unfinished
from model.keys import directory_steps, late_steps
from model.nodes import node_steps
from model.sources import source_steps
from model.targets import target_steps
from model.values import Model, Rules, Scenario, Step, World
from model.wires import lying_steps

#: A scenario that grows beyond this is not exhaustive any more, and says so by failing.
WORLDS_MAX = 3_000_000


@dataclasses.dataclass(frozen=True)
class Fault:
    """A broken promise and the shortest way there."""

    promise: str
    events: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{number:3}. {event}" for number, event in enumerate(self.events, 1)]
        return "\n".join((self.promise, *lines))


@dataclasses.dataclass(frozen=True)
class Explored:
    """What an exploration came to."""

    worlds: int
    steps: int
    endings: int
    fault: Fault | None


def steps(model: Model, world: World) -> Iterator[Step]:
    """Everything that can happen next."""
    yield from source_steps(model, world)
    yield from target_steps(model, world)
    yield from node_steps(model, world)
    yield from late_steps(model, world)
    yield from directory_steps(model, world)
    yield from lying_steps(model, world)


def explore(scenario: Scenario, rules: Rules | None = None) -> Explored:
    """Visit every world of a scenario; stop at the first broken promise."""
    # Worlds are tuples without cycles: looking for some would take half of the time.
    gc.disable()
    try:
        return _explore(Model(scenario, rules or Rules()))
    finally:
        gc.enable()


def _explore(model: Model) -> Explored:
    scenario = model.scenario
    start = scenario.start()
    number = {start: 0}
    worlds, came = [start], [(-1, "")]
    good: list[list[int]] = []  # by world: where steps that are no faults lead
    taken = endings = 0
    for here, world in enumerate(worlds):
        onward: list[int] = []
        natural = False
        for label, fault, after in steps(model, world):
            taken += 1
            if after == world:
                continue
            place = number.get(after)
            if place is None:
                place = number[after] = len(worlds)
                worlds.append(after)
                came.append((here, label))
                if promise := broken(model, after):
                    return Explored(len(worlds), taken, endings, _trace(promise, came, place))
            if not fault:
                natural = True
                onward.append(place)
        good.append(onward)
        if not natural:
            endings += 1
            if promise := unfinished(model, world):
                return Explored(len(worlds), taken, endings, _trace(promise, came, here))
        if len(worlds) > WORLDS_MAX:
            raise RuntimeError(f"more than {WORLDS_MAX} worlds")
    stuck = _cycle(good)
    fault_found = None if stuck is None else _trace("it may go on for ever", came, stuck)
    return Explored(len(worlds), taken, endings, fault_found)


def _trace(promise: str, came: list[tuple[int, str]], place: int) -> Fault:
    events = []
    while place > 0:
        place, label = came[place]
        events.append(label)
    return Fault(promise, tuple(reversed(events)))


def _cycle(good: list[list[int]]) -> int | None:
    """A world from which steps without a fault lead back to it, or None.

    Worlds are taken away once nothing is left that they lead to (Kahn). Where faults stop, what
    remains is where a run need not end, however fairly its parts take turns.
    """
    left = [len(set(onward)) for onward in good]
    before: list[list[int]] = [[] for _ in good]
    for here, onward in enumerate(good):
        for there in set(onward):
            before[there].append(here)
    ended = [here for here, count in enumerate(left) if count == 0]
    gone = 0
    while ended:
        gone += 1
        for here in before[ended.pop()]:
            left[here] -= 1
            if left[here] == 0:
                ended.append(here)
    if gone == len(good):
        return None
    return next(here for here, count in enumerate(left) if count)
