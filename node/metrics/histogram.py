"""A histogram as plain integers. What is counted while a request runs must not be able to fail."""

from __future__ import annotations

import bisect
import math
from typing import Final

#: Upper bounds in seconds. A token takes milliseconds, a long prompt minutes.
SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip


class Histogram:
    """How often a duration fell below each bound. Steps forward only.

    Args:
        bounds: Upper bounds, ascending; one more, without end, is added.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration. A clock that stepped back counts as no time at all."""
        value = max(0.0, seconds) if math.isfinite(seconds) else 0.0
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        """Durations that were counted."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """All of them together, in seconds."""
        return self._sum

    def buckets(self) -> list[tuple[str, float]]:
        """``(upper bound, durations at or below it)``, as Prometheus wants them."""
        total, rows = 0, []
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == math.inf else repr(bound), float(total)))
        return rows
