"""What a case will take, and whether there is still time and room for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from node.prove.cases import (
    CHUNK_TOKENS,
    STEPS_AFTER_BLOCK,
    Continuation,
    History,
    RollbackStation,
    Station,
)
from node.prove.messages import Facts

#: All files of a run together. A cut of the reference geometry at 32,768 tokens has 518 MB.
SPOOL_BYTES_MAX: Final = 4 << 30

#: Copying rows between planes, host and files, digests included; a slow machine's.
_BYTES_PER_S: Final = 0.3e9

#: An estimate may be this wrong before a case counts as hanging.
_PATIENCE: Final = 20.0
_PATIENCE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of the first child and of the second, and bytes on disk."""

    write_s: float
    read_s: float
    file_bytes: int

    @property
    def seconds(self) -> float:
        """Both children."""
        return self.write_s + self.read_s


def patience_s(seconds: float) -> float:
    """How long to wait for something that should take ``seconds``."""
    return _PATIENCE_S + _PATIENCE * seconds


def history_s(facts: Facts, history: History) -> float:
    """Seconds to compute a session."""
    single = history.single_calls
    return single * facts.step_s + (history.position - single) * facts.token_s


def station_cost(facts: Facts, station: Station) -> Cost:
    """The cost of a cut and its restores."""
    size = facts.cut_bytes(station.history.position)
    copies_s = size / _BYTES_PER_S
    kinds = {kind for _, kind in station.restores}
    return Cost(
        write_s=sum(
            history_s(facts, station.history) + _continuation_s(facts, kind) + 2 * copies_s
            for kind in kinds
        )
        + 3 * copies_s,
        read_s=sum(_continuation_s(facts, k) + 4 * copies_s for _, k in station.restores),
        file_bytes=2 * size,
    )


def rollback_cost(facts: Facts, station: RollbackStation) -> Cost:
    """The cost of a cut and all blocks from it."""
    copies_s = facts.cut_bytes(station.history.position) / _BYTES_PER_S
    case_s = (2 + STEPS_AFTER_BLOCK) * facts.step_s + 4 * copies_s
    counts = {count for count, _ in station.blocks}
    return Cost(
        write_s=(2 + 2 * len(counts)) * history_s(facts, station.history)
        + len(station.blocks) * case_s,
        read_s=len(station.blocks) * case_s,
        file_bytes=facts.cut_bytes(station.history.position),
    )


def _continuation_s(facts: Facts, kind: Continuation) -> float:
    chunk_s = CHUNK_TOKENS * facts.token_s if kind is Continuation.CHUNK else 0.0
    return kind.calls * facts.step_s + chunk_s


@dataclass(slots=True)
class Ledger:
    """Time and room that are left.

    Attributes:
        budget_s: For both children together.
        read_s: What the second child will need for what the first has written.
        file_bytes: What was written.
    """

    budget_s: float
    read_s: float = 0.0
    file_bytes: int = 0

    def why_not(self, cost: Cost, elapsed_s: float) -> str | None:
        """Why a case that is not essential has to be left out; None where it need not."""
        if elapsed_s + self.read_s + cost.seconds > self.budget_s:
            return "time"
        if self.file_bytes + cost.file_bytes > SPOOL_BYTES_MAX:
            return "room on disk"
        return None
