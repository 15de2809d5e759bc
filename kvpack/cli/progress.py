"""How far a long piece of work is: one line on a terminal, nothing anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, TextIO

#: Work that is done before this shows nothing at all.
FIRST_AFTER_S: Final = 1.0
_EVERY_S: Final = 0.1
_ERASE: Final = "\r\x1b[K"


@dataclass(frozen=True, slots=True)
class Unit:
    """In what the work is counted.

    Attributes:
        name: After the number.
        size: How much of what is advanced makes one.
    """

    name: str
    size: float


MEGABYTES: Final = Unit("MB", 1e6)
OBJECTS: Final = Unit("objects", 1)


class Progress:
    """A context manager around the work. The line is rewritten in place and erased at the end.

    Args:
        what: What is done, as a word.
        total: How much there is to do; 0 where nobody knows.
        stream: Where the line goes; nothing is written if that is no terminal.
        clock: Seconds, from anywhere.
        unit: Bytes are advanced and megabytes shown, unless it says otherwise.
    """

    def __init__(
        self,
        what: str,
        total: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        unit: Unit = MEGABYTES,
    ) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._done = 0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._next = clock() + FIRST_AFTER_S
        self._is_terminal = self._stream.isatty()
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            self._stream.write(_ERASE)
            self._stream.flush()

    def advance(self, count: int) -> None:
        """Another ``count`` bytes, or whatever is counted, are done."""
        self._done += count
        if not self._is_terminal or self._clock() < self._next:
            return
        self._next = self._clock() + _EVERY_S
        self._shown = True
        self._stream.write(f"{_ERASE}{self._what}: {self._state()}")
        self._stream.flush()

    def _state(self) -> str:
        size, name = self._unit.size, self._unit.name
        done = f"{self._done / size:,.0f}"
        if not self._total:
            return f"{done} {name}"
        percent = min(100, 100 * self._done // self._total)
        return f"{percent} %, {done} of {self._total / size:,.0f} {name}"
