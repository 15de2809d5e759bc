"""How far two sessions are equal: logits as bytes, rows by digest, drift where they differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from engine import Logits

_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Comparison:
    """Counts over steps and states; sums of two are a comparison again.

    Attributes:
        steps: Sets of logits that were compared.
        equal_steps: Those whose bytes are equal.
        equal_tokens: Those whose greedy token is equal.
        states: Whole caches that were compared, every row of every layer.
        equal_states: Those whose bytes are equal.
        max_drift: Largest difference of a logit; 0 where all are equal.
        finite: No logit is NaN or infinite.
        first_difference: The first thing that differs, for people; None where nothing does.
    """

    steps: int = 0
    equal_steps: int = 0
    equal_tokens: int = 0
    states: int = 0
    equal_states: int = 0
    max_drift: float = 0.0
    finite: bool = True
    first_difference: str | None = None

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.steps + other.steps,
            self.equal_steps + other.equal_steps,
            self.equal_tokens + other.equal_tokens,
            self.states + other.states,
            self.equal_states + other.equal_states,
            max(self.max_drift, other.max_drift),
            self.finite and other.finite,
            self.first_difference or other.first_difference,
        )

    @property
    def exact(self) -> bool:
        """Everything is equal to the last bit, and is a number."""
        same = self.equal_steps == self.steps and self.equal_states == self.states
        return same and self.finite

    def at(self, where: str) -> Comparison:
        """The same, with ``where`` before what differs."""
        if self.first_difference is None:
            return self
        return dataclasses.replace(self, first_difference=f"{where}: {self.first_difference}")

    def as_json(self) -> dict[str, Any]:
        """For the parent."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """From :meth:`as_json`."""
        return cls(**value)


def compare_state(expected: bytes, found: bytes, where: str) -> Comparison:
    """Two digests of whole caches."""
    same = expected == found
    return Comparison(
        states=1, equal_states=int(same), first_difference=None if same else f"rows {where}"
    )


def compare_logits(expected: bytes, found: Sequence[Logits]) -> Comparison:
    """Logits of a twin, back to back, against those of a session.

    A twin that made fewer or more steps counts as different, never as fewer to compare.
    """
    if len(expected) != sum(len(logits.data) for logits in found):
        return Comparison(steps=len(found), first_difference="number of steps")
    total, offset = Comparison(), 0
    for index, logits in enumerate(found):
        end = offset + len(logits.data)
        total += _compare_step(expected[offset:end], logits, index)
        offset = end
    return total


def _compare_step(expected: bytes, found: Logits, index: int) -> Comparison:
    values = found.values()
    finite = math.isfinite(float(values.max())) and math.isfinite(float(values.min()))
    if expected == found.data:
        return Comparison(1, 1, 1, finite=finite, first_difference=None if finite else "not finite")
    twin = type(found)(found.encoding, expected)
    drift = float(abs(twin.values() - values).max())
    same_token = int(twin.argmax() == found.argmax())
    finite = finite and math.isfinite(drift)
    return Comparison(
        1, 0, same_token, max_drift=drift if math.isfinite(drift) else math.inf, finite=finite,
        first_difference=f"step {index + 1}",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class Twin:
    """What an uninterrupted session gives; a file between two processes.

    Attributes:
        start: Digest of its rows at the cut, 32 bytes.
        end: Digest of its rows after the continuation, 32 bytes.
        logits: The logits of every step, back to back.
    """

    start: bytes
    end: bytes
    logits: bytes

    def write(self, path: Path) -> int:
        """Write it, and return how many bytes.

        Raises:
            OSError: The disk refuses.
        """
        return path.write_bytes(self.start + self.end + self.logits)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what :meth:`write` wrote.

        Raises:
            OSError: It is not there.
        """
        content, two = path.read_bytes(), 2 * _DIGEST_BYTES
        return cls(content[:_DIGEST_BYTES], content[_DIGEST_BYTES:two], content[two:])

    def compare(self, start: bytes, found: Sequence[Logits], end: bytes) -> Comparison:
        """Against a session that was restored and made the same calls."""
        return (
            compare_state(self.start, start, "at the cut")
            + compare_logits(self.logits, found)
            + compare_state(self.end, end, "at the end")
        )
