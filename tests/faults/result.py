"""What came of the runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from node.fault_points import FaultOrder

from .outside import Findings
from .plan import Plan


@dataclass
class Result:
    """What came of one run."""

    plan: Plan
    found: Findings = field(default_factory=Findings)
    outcome: str = ""
    fired: bool = False
    starts: int = 0
    seconds: float = 0.0


def carried_out(order: str, reached: list[str]) -> bool:
    """Whether a node that reached these points met the one of ``order`` often enough."""
    parsed = FaultOrder.parse(order)
    return reached.count(parsed.point) >= parsed.nth


def kinds(results: list[Result]) -> Counter:
    """How many runs had which kind of finding."""
    counts: Counter = Counter()
    for result in results:
        counts.update(kind for kind, texts in vars(result.found).items() if texts)
    return counts
