"""What a run found: samples of contenders, round by round, and ratios between two of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MEASURED = "measured"
FAILED = "failed"
TIMED_OUT = "timed out"
NOT_INSTALLED = "not installed"
NOT_THERE_YET = "not there yet"

GIGA = 1e9


@dataclass(frozen=True)
class Sample:
    """One contender, once.

    Attributes:
        seconds: That count.
        byte_count: Bytes of payload that were worked on in them.
        cpu_s: Processor seconds of every process that took part, where that is known.
        alien_cores: Cores that other programs kept busy meanwhile; None where nobody knows.
        detail: Whatever else was seen, by name.
        round: Samples of one round stood beside each other.
    """

    seconds: float
    byte_count: int
    cpu_s: float | None = None
    detail: Mapping[str, float] = field(default_factory=dict)
    alien_cores: float | None = None
    round: int = 0

    @property
    def speed(self) -> float:
        """Bytes a second; where there are none, times a second."""
        return (self.byte_count or 1) / self.seconds


@dataclass
class Contender:
    """Somebody who does a job, and how that went.

    Attributes:
        name: A word, the same in every run.
        title: For people.
        group: Those who took turns with it.
        against: Name of the group's reference for it; empty for a reference.
        protects: What becomes of the bytes on their way or at rest: nothing, encryption,
            authentication, identity; empty where no bytes travel.
        status: ``measured`` or why there is no figure.
        reason: In the words of whoever failed.
        samples: Round by round.
    """

    name: str
    title: str
    group: str
    against: str = ""
    protects: str = ""
    status: str = MEASURED
    reason: str = ""
    samples: list[Sample] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, read: Mapping[str, Any]) -> Contender:
        samples = [Sample(**sample) for sample in read["samples"]]
        return cls(**{**read, "samples": samples})

    def by_round(self) -> dict[int, Sample]:
        return {sample.round: sample for sample in self.samples}


@dataclass(frozen=True)
class Spread:
    """Median and range of a number over rounds."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        found = list(values)
        if not found:
            return None
        return cls(statistics.median(found), min(found), max(found), len(found))

    def text(self, digits: int = 2) -> str:
        """For people, with the number of rounds; one round has no range."""
        spread = f" ({self.low:.{digits}f} to {self.high:.{digits}f})" if self.count > 1 else ""
        return f"{self.median:.{digits}f}{spread}, n={self.count}"


def speed_ratios(ours: Contender, others: Iterable[Contender]) -> list[float]:
    """Speed of ``ours`` over that of ``others`` done one after another, round by round."""
    theirs = [other.by_round() for other in others]
    found = []
    for number, sample in sorted(ours.by_round().items()):
        if not all(number in other for other in theirs):
            continue
        seconds_a_byte = sum(1 / other[number].speed for other in theirs)
        found.append(sample.speed * seconds_a_byte)
    return found


def cpu_ratios(ours: Contender, theirs: Contender) -> list[float]:
    """Processor seconds for a byte, ``ours`` over ``theirs``, round by round."""
    other, found = theirs.by_round(), []
    for number, sample in sorted(ours.by_round().items()):
        their = other.get(number)
        if sample.cpu_s is None or their is None or not their.cpu_s:
            continue
        found.append(sample.cpu_s / sample.byte_count / (their.cpu_s / their.byte_count))
    return found


def alien_cores(contenders: Iterable[Contender]) -> float | None:
    """Median of what other programs took while these ran."""
    seen = [
        sample.alien_cores
        for contender in contenders
        for sample in contender.samples
        if sample.alien_cores is not None
    ]
    return statistics.median(seen) if seen else None
