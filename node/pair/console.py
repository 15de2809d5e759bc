"""The person at this terminal: what is shown, and a yes that has to be typed."""

from __future__ import annotations

import os
import select
import sys
import termios
from collections.abc import Callable
from typing import Final

from node.pair.line import SealedLine
from node.pair.messages import raise_if_no

_LINE_BYTES_MAX: Final = 4096


class Console:
    """Shows lines, and asks for a yes while it watches the other side and the clock.

    Args:
        stdin: Descriptor that answers are read from.
        show: Prints one line.
    """

    def __init__(self, stdin: int = 0, show: Callable[[str], None] | None = None) -> None:
        self._stdin = stdin
        self._show = show or _to_stderr
        self._typed = b""

    def show(self, line: str) -> None:
        """Print one line."""
        self._show(line)

    def confirm(self, question: str, sealed: SealedLine) -> bool:
        """Whether the person typed yes.

        Raises:
            PairError: The other side stopped or hung up, or the time is over.
        """
        if os.isatty(self._stdin):
            # What was typed before the question was seen is no answer to it.
            termios.tcflush(self._stdin, termios.TCIFLUSH)
        self._show(f"{question} Type yes, or anything else to stop:")
        return self._answer(sealed).strip().lower() == b"yes"

    def _answer(self, sealed: SealedLine) -> bytes:
        other = sealed.line.fileno()
        while b"\n" not in self._typed:
            if len(self._typed) > _LINE_BYTES_MAX:
                return b""
            left_s = sealed.line.deadline.left_s()
            ready, _, _ = select.select([self._stdin, other], [], [], left_s)
            if other in ready:
                # It was quicker: its yes waits for its turn, its no ends the question.
                raise_if_no(sealed.receive_early())
            if self._stdin in ready:
                typed = os.read(self._stdin, _LINE_BYTES_MAX)
                if not typed:
                    break
                self._typed += typed
        answer, _, self._typed = self._typed.partition(b"\n")
        return answer


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
