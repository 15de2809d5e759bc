"""What a measurement found: ratios round by round, and the bound that is wanted."""

from __future__ import annotations

import operator
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

_SIGNS: Final[dict[str, Callable[[float, float], bool]]] = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
        name: What.
        against: Of what it is a ratio, or the unit.
        values: One of each round.
        sign: ``<=`` or ``>=``; empty: nothing is wanted.
        bound: What it may be.
        note: More of the same rounds, in words.
        cpu: The same ratio of processor time, which other work changes least; None: no ratio of
            times.
    """

    name: str
    against: str
    values: tuple[float, ...]
    sign: str = ""
    bound: float = 0.0
    note: str = ""
    cpu: float | None = None

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """Its middle half."""
        ordered = sorted(self.values)
        return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]

    @property
    def verdict(self) -> str:
        """Whether the median is within the bound."""
        if not self.sign:
            return ""
        return "met" if _SIGNS[self.sign](self.median, self.bound) else "not met"

    @property
    def wanted(self) -> str:
        """The bound in words."""
        return f"{self.sign} {self.bound:g}" if self.sign else ""

    def as_json(self) -> dict[str, object]:
        """All of it."""
        return {
            "name": self.name, "against": self.against, "median": self.median,
            "middle_half": self.spread, "values": self.values, "cpu": self.cpu,
            "wanted": self.wanted, "verdict": self.verdict, "note": self.note,
            "load": os.getloadavg()[0],
        }  # fmt: skip

    def markdown(self) -> str:
        """One line of a table."""
        low, high = self.spread
        cpu = "" if self.cpu is None else _short(self.cpu)
        return (
            f"| {self.name} | {self.against} | {_short(self.median)} "
            f"({_short(low)} to {_short(high)}) | {len(self.values)} | {cpu} | {self.wanted} | "
            f"{self.verdict} | {os.getloadavg()[0]:.0f} | {self.note} |"
        )


HEAD: Final = (
    "| what | against | median (middle half) | rounds | processor | wanted | | load | |\n"
    "|---|---|---:|---:|---:|---:|---|---:|---|"
)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """Round by round."""
    return tuple(a / b for a, b in zip(ours, theirs, strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _short(number: float) -> str:
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"
