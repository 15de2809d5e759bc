"""Whether a bound is met: a function of what was measured, and of how quiet it was meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

MET = "met"
NOT_MET = "not met"
NOT_DECIDED = "not decided (spread)"

#: Fewer rounds say nothing about how far they lie apart.
ROUNDS_MIN = 3

#: Cores that other programs may take, in the median, before a run is one on a busy machine.
ALIEN_CORES_MAX = 0.25

#: Where rounds lie on both sides of a bound: as many have to agree, within as wide a range.
AGREEING_MIN = 0.75
RANGE_MAX = 0.30


def verdict(
    values: Sequence[float], bound: float, *, at_least: bool, alien: float | None = None
) -> str:
    """The word for ``values`` of several rounds against ``bound``.

    A busy machine decides nothing: neither a win nor a loss of it is one. On a quiet one, rounds
    that all lie on one side decide; where they do not, at least three of four have to agree, and
    the range must be narrow beside the median.

    Args:
        values: One for each round.
        bound: What is wanted.
        at_least: Whether values at the bound or above are good; else at it or below.
        alien: Cores that other programs took, in the median; None where nobody knows.
    """
    if len(values) < ROUNDS_MIN or (alien is not None and alien > ALIEN_CORES_MAX):
        return NOT_DECIDED
    good = [value >= bound if at_least else value <= bound for value in values]
    share = sum(good) / len(good)
    if share in (0.0, 1.0):
        return MET if share else NOT_MET
    middle = statistics.median(values)
    if max(share, 1 - share) < AGREEING_MIN or max(values) - min(values) > RANGE_MAX * middle:
        return NOT_DECIDED
    return MET if share > 1 - share else NOT_MET
