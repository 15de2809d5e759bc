"""What measured cuts say together: how fast prompts are computed, and what a kept cut saves.

Functions of measurements. What was not measured is left out; nothing is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from node.economics.values import CutCost, Tier


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast prompts are computed.

    Attributes:
        tokens: Computed in the calls that were measured.
        engine_s: Seconds of these calls alone; more than 0.
        cuts: That they led to.
    """

    tokens: int
    engine_s: float
    cuts: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the engine's time."""
        return self.tokens / self.engine_s


@dataclass(frozen=True, slots=True)
class Saving:
    """One cut that was brought back: the deepest of its tier, before others one also computed here.

    Attributes:
        tier: Where its rows were.
        tokens: That it stands for.
        state_bytes: Plaintext of its rows.
        restore_s: Median time to bring it back.
        restores: How often that was measured.
        prefill_s: Time to compute all of it here; None: not measured.
    """

    tier: Tier
    tokens: int
    state_bytes: int
    restore_s: float
    restores: int
    prefill_s: float | None

    @property
    def miss_s(self) -> float | None:
        """What it would take longer without the cut; below 0 where it is quicker. None: unknown."""
        return None if self.prefill_s is None else self.prefill_s - self.restore_s

    @property
    def break_even_tokens(self) -> int | None:
        """Tokens of this prompt that take as long to compute as the restore. None: unknown."""
        if not self.prefill_s:
            return None
        return math.ceil(self.tokens * self.restore_s / self.prefill_s)


@dataclass(frozen=True, slots=True)
class Economy:
    """What one node measured so far.

    Attributes:
        rate: How fast prompts are computed; None: not measured.
        savings: One for each tier that something was brought back from, memory first.
    """

    rate: Rate | None = None
    savings: tuple[Saving, ...] = ()


def economy_of(costs: Sequence[CutCost]) -> Economy:
    """All that ``costs`` say."""
    savings = (_saving(costs, tier) for tier in (Tier.MEMORY, Tier.DISK))
    return Economy(_rate(costs), tuple(one for one in savings if one is not None))


def _rate(costs: Sequence[CutCost]) -> Rate | None:
    measured = [cost.prefill for cost in costs if cost.prefill is not None]
    engine_s = sum(one.engine_s for one in measured)
    if engine_s <= 0:
        return None
    return Rate(sum(one.computed_tokens for one in measured), engine_s, len(measured))


def _saving(costs: Sequence[CutCost], tier: Tier) -> Saving | None:
    found = [
        Saving(
            tier, cost.tokens, cost.state_bytes, restored.median_s, len(restored.seconds),
            None if cost.whole_prefill is None else cost.whole_prefill.wall_s,
        )
        for cost in costs for restored in cost.restores if restored.tier is tier
    ]  # fmt: skip
    return max(found, key=lambda one: (one.prefill_s is not None, one.tokens), default=None)
