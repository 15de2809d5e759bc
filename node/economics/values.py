"""What is known of a cut: how long it took to compute here, and how long to bring back here."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvpack.limits import POSITION_MAX, check_range

#: No answer waits for longer.
SECONDS_MAX = 30 * 24 * 3600


class Tier(enum.Enum):
    """Where the rows of a restored cut were."""

    MEMORY = "memory"  # all of them
    DISK = "disk"  # some of them


@dataclass(frozen=True, slots=True)
class Prefill:
    """The computing of a cut's rows, as it was measured.

    Attributes:
        first: Position at which measuring began: what is before it was there already.
        computed_tokens: Tokens computed from there to the cut.
        wall_s: Seconds of the calls, with what they waited for others' calls.
        engine_s: Seconds of the calls alone.

    Raises:
        LimitError: A number is outside its range.
    """

    first: int
    computed_tokens: int
    wall_s: float
    engine_s: float

    def __post_init__(self) -> None:
        check_range("prefill.first", self.first, 0, POSITION_MAX, "tokens")
        check_range("prefill.computed_tokens", self.computed_tokens, 1, POSITION_MAX, "tokens")
        check_range("prefill.wall_s", int(self.wall_s), 0, SECONDS_MAX, "seconds")
        check_range("prefill.engine_s", int(self.engine_s), 0, SECONDS_MAX, "seconds")


@dataclass(frozen=True, slots=True)
class Restored:
    """Restores of one cut out of one tier.

    Attributes:
        tier: Where the rows were.
        seconds: Of each, the newest last; never empty.
    """

    tier: Tier
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median. By hand: importing ``statistics`` would be a part of every start."""
        ordered, half = sorted(self.seconds), len(self.seconds) // 2
        if len(ordered) % 2:
            return ordered[half]
        return (ordered[half - 1] + ordered[half]) / 2


@dataclass(frozen=True, slots=True)
class CutCost:
    """All that was measured of one cut.

    Attributes:
        cut_id: Which.
        tokens: That it stands for.
        state_bytes: Plaintext of its rows, from its manifest.
        prefill: How it was computed; None: not measured.
        restores: How it was brought back, by tier; empty: not measured.
    """

    cut_id: bytes
    tokens: int
    state_bytes: int
    prefill: Prefill | None = None
    restores: tuple[Restored, ...] = ()

    @property
    def whole_prefill(self) -> Prefill | None:
        """The computing of all of the cut's tokens; None: it was not measured for all of them."""
        prefill = self.prefill
        if prefill is None or prefill.first or prefill.computed_tokens != self.tokens:
            return None
        return prefill

    def ratio(self, restored: Restored) -> float | None:
        """Median time to bring it back, of that to compute it; None unless both were measured."""
        prefill = self.whole_prefill
        return None if prefill is None or not prefill.wall_s else restored.median_s / prefill.wall_s
