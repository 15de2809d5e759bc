"""Several things in turns, and the ratios between them.

A machine that does other work slows all alike when they take turns, so ratios hold where times do
not. Processor time is kept too: it counts what a thing costs, whoever else is at work.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Thing:
    """What is measured.

    Attributes:
        name: In the table.
        work: Does it once.
        before: Done before each time, and not counted.
    """

    name: str
    work: Callable[[], object]
    before: Callable[[], object] | None = None


@dataclass
class Times:
    """Seconds of one thing, round by round: by the clock, and of this process's processors."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def in_turns(things: list[Thing], rounds: int) -> dict[str, Times]:
    """Do each thing once a round, in an order that moves by one from round to round."""
    found = {thing.name: Times() for thing in things}
    gc.disable()
    try:
        for index in range(rounds + 1):
            start = index % len(things)
            for thing in things[start:] + things[:start]:
                wall_s, cpu_s = _once(thing)
                if index:  # The first round warms up.
                    found[thing.name].wall_s.append(wall_s)
                    found[thing.name].cpu_s.append(cpu_s)
            gc.collect()
    finally:
        gc.enable()
    return found


def _once(thing: Thing) -> tuple[float, float]:
    if thing.before is not None:
        thing.before()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    thing.work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


@dataclass(frozen=True)
class Row:
    """One thing against another. Ratios are of speeds: above 1 is faster than the other.

    Attributes:
        name: What.
        against: Against what.
        wanted: The least ratio that is asked for, or None.
        median: Over rounds.
        quickest: The quickest round of each.
        cpu: Least processor time of each.
        gb_s: Ours and theirs, quickest, in 1e9 bytes a second.
    """

    name: str
    against: str
    wanted: float | None
    median: float
    quickest: float
    cpu: float
    gb_s: tuple[float, float]

    @classmethod
    def of(
        cls,
        found: Mapping[str, Times],
        name: str,
        against: str,
        wanted: float | None,
        byte_count: int,
    ) -> Row:
        """The row of ``name`` against ``against``, which took turns over ``byte_count`` bytes."""
        ours, theirs = found[name], found[against]
        pairs = zip(ours.wall_s, theirs.wall_s, strict=True)
        return cls(
            name,
            against,
            wanted,
            median=statistics.median(b / a for a, b in pairs),
            quickest=min(theirs.wall_s) / min(ours.wall_s),
            cpu=min(theirs.cpu_s) / min(ours.cpu_s),
            gb_s=(byte_count / min(ours.wall_s) / 1e9, byte_count / min(theirs.wall_s) / 1e9),
        )

    def markdown(self) -> str:
        """A line of the table."""
        wanted = "" if self.wanted is None else f">= {self.wanted:.2f}"
        return (
            f"| {self.name} | {self.against} | {self.median:.2f} | {self.quickest:.2f} | "
            f"{self.cpu:.2f} | {self.gb_s[0]:.2f} / {self.gb_s[1]:.2f} | {wanted} | "
            f"{self.verdict} |"
        )

    @property
    def verdict(self) -> str:
        """Whether the median is what is asked for."""
        if self.wanted is None:
            return ""
        return "met" if self.median >= self.wanted else "not met"
