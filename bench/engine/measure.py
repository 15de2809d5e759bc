"""Two things in turns, and the median of their ratios.

A machine that does other work slows both alike when they take turns, so the ratio holds where the
times do not. Each round runs A and B once, in an order that changes from round to round.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Timed:
    """Seconds of two things, round by round.

    Attributes:
        ours_s: The engine's.
        theirs_s: What it is measured against.
        ours_cpu_s: Processor seconds of the engine's whole rounds, all threads.
        theirs_cpu_s: Likewise.
    """

    ours_s: tuple[float, ...]
    theirs_s: tuple[float, ...]
    ours_cpu_s: tuple[float, ...] = ()
    theirs_cpu_s: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        """Median over rounds of ours through theirs: below 1 is faster."""
        return statistics.median(a / b for a, b in zip(self.ours_s, self.theirs_s, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        """The middle half of the rounds' ratios."""
        ratios = sorted(a / b for a, b in zip(self.ours_s, self.theirs_s, strict=True))
        return ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]

    @property
    def best_ratio(self) -> float:
        """The quickest round of each: what is left when nothing else disturbs."""
        return min(self.ours_s) / min(self.theirs_s)

    @property
    def cpu_ratio(self) -> float:
        """As :attr:`ratio`, of processor time: what other work on the machine changes least."""
        pairs = zip(self.ours_cpu_s, self.theirs_cpu_s, strict=True)
        return statistics.median(a / b for a, b in pairs)

    @property
    def medians_s(self) -> tuple[float, float]:
        """Median seconds, ours and theirs."""
        return statistics.median(self.ours_s), statistics.median(self.theirs_s)


def in_turns(
    ours: Callable[[], float],
    theirs: Callable[[], float],
    rounds: int,
    warm_up: int = 2,
    limit_s: float = 600.0,
) -> Timed:
    """Run both ``rounds`` times, or for ``limit_s``; each returns the seconds that count."""
    left, right = all_in_turns([ours, theirs], rounds, warm_up, limit_s)
    return paired(left, right)


@dataclass
class Rounds:
    """Seconds of one thing, round by round: those that count, and the whole rounds' processor."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def add(self, work: Callable[[], float]) -> None:
        """One round more."""
        before = time.process_time()
        self.seconds.append(work())
        self.cpu_s.append(time.process_time() - before)


def paired(ours: Rounds, theirs: Rounds) -> Timed:
    """Two of what :func:`all_in_turns` returned."""
    return Timed(tuple(ours.seconds), tuple(theirs.seconds), tuple(ours.cpu_s), tuple(theirs.cpu_s))


def all_in_turns(
    works: Sequence[Callable[[], float]], rounds: int, warm_up: int = 2, limit_s: float = 600.0
) -> list[Rounds]:
    """Run each ``rounds`` times, at least three; whoever begins changes from round to round."""
    for _ in range(warm_up):
        for work in works:
            work()
    found = [Rounds() for _ in works]
    end = time.perf_counter() + limit_s
    # A collection in the middle of a round would be charged to whoever runs then.
    gc.disable()
    try:
        for index in range(rounds):
            if index >= 3 and time.perf_counter() > end:
                break
            order = [(index + step) % len(works) for step in range(len(works))]
            for which in order:
                found[which].add(works[which])
            gc.collect()
    finally:
        gc.enable()
    return found


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
