"""What was found, and what it means: groups, verdicts, and who is to blame. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from node.prove.cases import Group
from node.prove.compare import Comparison
from node.prove.messages import Facts


class Verdict(enum.Enum):
    """Of a group or of a run."""

    EXACT = "exact"
    COMPATIBLE = "compatible"
    FAILED = "FAILED"
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True, slots=True)
class GroupResult:
    """All cases of one group.

    Attributes:
        group: Which.
        cases: How many.
        compared: Sums over them.
    """

    group: Group
    cases: int = 0
    compared: Comparison = field(default_factory=Comparison)

    def plus(self, compared: Comparison, cases: int = 1) -> GroupResult:
        """With more cases."""
        return GroupResult(self.group, self.cases + cases, self.compared + compared)

    @property
    def verdict(self) -> Verdict:
        """``compatible`` exists only where nothing is promised; no group passes unrun."""
        if not self.compared.steps:
            return Verdict.NOT_RUN
        if self.compared.exact:
            return Verdict.EXACT
        if self.group.is_promised or not self.compared.finite:
            return Verdict.FAILED
        return Verdict.COMPATIBLE

    @property
    def holds(self) -> bool:
        """Whether what is promised for this group was seen to hold."""
        return self.verdict in (Verdict.EXACT, Verdict.COMPATIBLE)


@dataclass(frozen=True, slots=True)
class DtypeRun:
    """Everything that was found with one dtype.

    Attributes:
        facts: What the first child said of model and machine.
        groups: Every group, in the report's order.
        left_out: What was not compared, and why.
        other_numerics: ``(name, first child's, second child's)`` of a value that differs between
            two processes of one run, or None.
        seconds: How long it took.
    """

    facts: Facts
    groups: tuple[GroupResult, ...]
    left_out: tuple[str, ...]
    other_numerics: tuple[str, str, str] | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Everything that is promised was seen to hold."""
        return self.other_numerics is None and all(group.holds for group in self.groups)

    @property
    def blame(self) -> str | None:
        """Where to look, in a sentence; None where nothing failed."""
        if self.ok:
            return None
        if self.other_numerics is not None:
            name, first, second = self.other_numerics
            return f"two processes on this machine differ in {name}: {first} and {second}"
        results = {result.group: result for result in self.groups}
        if not results[Group.CONTROL].holds:
            return (
                "the control failed: this machine does not repeat its own bits without any "
                "cache; look at the backend and its switches first, not at snapshots"
            )
        failed = [r.group.title for r in self.groups if r.verdict is Verdict.FAILED]
        if not failed:
            return "nothing failed, but a group was not run: give it more time with --budget"
        return f"the control holds, so the fault is in: {'; '.join(failed)}"


def first_difference(
    ours: Mapping[str, str], theirs: Mapping[str, str]
) -> tuple[str, str, str] | None:
    """``(name, ours, theirs)`` of the first value that differs, or None."""
    for name in sorted({*ours, *theirs}):
        left, right = ours.get(name, "absent"), theirs.get(name, "absent")
        if left != right:
            return name, left, right
    return None
