"""The clock that leases are measured by: it runs while the machine sleeps, and nobody can set it.

A node that was suspended for longer than its lease must know so the moment it wakes. Python's own
monotonic clock stands still during sleep, on Linux and on macOS; the wall clock jumps. Linux calls
the right one CLOCK_BOOTTIME; on macOS CLOCK_MONOTONIC is it, read through clock_gettime.
"""

from __future__ import annotations

import sys
import time
from typing import Final, Protocol


class Clock(Protocol):
    """Seconds since a moment that is fixed until the machine starts again."""

    def now_s(self) -> float:
        """The present time; never less than any earlier answer of this boot."""
        ...


def _clock_id() -> int:
    if sys.platform == "linux":
        return time.CLOCK_BOOTTIME
    if sys.platform == "darwin":
        return time.CLOCK_MONOTONIC
    raise RuntimeError(f"no clock that runs during sleep is known on {sys.platform}")


class BootClock:
    """The machine's clock that runs during sleep: one for all processes of a machine.

    Raises:
        RuntimeError: None is known on this platform.
    """

    def __init__(self) -> None:
        self._clock_id: Final = _clock_id()

    def now_s(self) -> float:
        return time.clock_gettime(self._clock_id)
