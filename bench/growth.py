"""How cost grows with something: a line through logarithms, and where it is steeper than linear."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from bench.measured import MEASURED, Contender

#: A little above 1 is noise of medians; a cost that grows faster has a slope of its own.
LINEAR_MAX = 1.1

#: Why a cost may grow faster than what it grows with, for those that were seen to.
EXPLAINED: dict[tuple[str, str], str] = {}

_AXES = {"context": "tokens", "lookup": "chunks", "sessions": "sessions"}


@dataclass(frozen=True)
class Series:
    """One cost at several sizes.

    Attributes:
        axis: What grows.
        name: Of the cost.
        points: ``(size, median seconds)``, ascending; at least two.
    """

    axis: str
    name: str
    points: tuple[tuple[int, float], ...]

    @property
    def slope(self) -> float:
        """Exponent of the size that fits best: 1 is linear, 0 does not grow."""
        sizes = [math.log(size) for size, _ in self.points]
        costs = [math.log(seconds) for _, seconds in self.points]
        return statistics.linear_regression(sizes, costs).slope

    @property
    def steepest(self) -> float:
        """The greatest slope between two neighbours."""
        pairs = zip(self.points, self.points[1:], strict=False)
        return max(math.log(b[1] / a[1]) / math.log(b[0] / a[0]) for a, b in pairs)

    @property
    def word(self) -> str:
        """Whether it grows faster than linearly, by the fit."""
        if self.slope <= LINEAR_MAX:
            return "at most linear"
        why = EXPLAINED.get((self.axis, self.name))
        return f"worse than linear: {why}" if why else "worse than linear"


def series_of(contenders: Iterable[Contender]) -> list[Series]:
    """Every cost that was measured at two sizes or more; sizes are in the contenders' names."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for one in contenders:
        parts = re.fullmatch(r"(context|lookup|sessions)_?([a-z_]*?)_?(\d+)_?([a-z_]*)", one.name)
        if parts is None or one.status != MEASURED or not one.samples:
            continue
        cost = (parts[2] or parts[4]).strip("_") or "hit"
        median = statistics.median(sample.seconds for sample in one.samples)
        found.setdefault((_AXES[parts[1]], cost), []).append((int(parts[3]), median))
    return [
        Series(axis, cost, tuple(sorted(points)))
        for (axis, cost), points in found.items()
        if len({size for size, _ in points}) > 1
    ]
