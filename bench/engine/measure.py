"""Two things in turns, and the median of their ratios.

A machine that does other work slows both alike when they take turns, so the ratio holds where the
times do not. Each round runs A and B once, in an order that changes from round to round.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timed:
    """Seconds of two things, round by round.

    Attributes:
        ours_s: The engine's.
        theirs_s: What it is measured against.
    """

    ours_s: tuple[float, ...]
    theirs_s: tuple[float, ...]

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
    def medians_s(self) -> tuple[float, float]:
        """Median seconds, ours and theirs."""
        return statistics.median(self.ours_s), statistics.median(self.theirs_s)


def in_turns(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int, warm_up: int = 2
) -> Timed:
    """Run both ``rounds`` times; each returns the seconds that count."""
    for _ in range(warm_up):
        ours()
        theirs()
    left: list[float] = []
    right: list[float] = []
    # A collection in the middle of a round would be charged to whoever runs then.
    gc.disable()
    try:
        for index in range(rounds):
            first, second = ((ours, left), (theirs, right))[:: 1 if index % 2 else -1]
            for work, times in (first, second):
                times.append(work())
            gc.collect()
    finally:
        gc.enable()
    return Timed(tuple(left), tuple(right))


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
