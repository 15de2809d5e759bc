"""Stop strings, matched over text as it arrives.

The rule, independent of how the text is cut into pieces: reading character by character, the first
stop string to be complete ends the text, the longest where several are complete at once, and what
comes before it is the whole text. Whatever could still become the beginning of a stop string is
held back; what turns out not to be one is released in order. Text before the first generated
character, such as the end of the prompt, is never part of a match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvpack.errors import LimitError
from kvpack.limits import check_range

#: Stop strings of one request: what public APIs accept.
STOP_STRINGS_MAX: Final = 4

#: Characters of one stop string; what is held back is shorter than that.
STOP_STRING_CHARACTERS_MAX: Final = 256


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """The stop strings of a request, if they are ones.

    Raises:
        LimitError: More than four, or one that is empty, too long or not encodable as UTF-8.
    """
    check_range("stop", len(stops), 0, STOP_STRINGS_MAX, "strings")
    for index, stop in enumerate(stops):
        check_range(f"stop[{index}]", len(stop), 1, STOP_STRING_CHARACTERS_MAX, "characters")
        if any("\ud800" <= character <= "\udfff" for character in stop):
            raise LimitError(f"stop[{index}]", "Unicode text", "a lone surrogate")
    return tuple(stops)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that ends ``text``, or None where none is complete."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def held_characters(text: str, stops: Sequence[str]) -> int:
    """How many last characters of ``text`` may be the beginning of a stop string.

    ``text`` itself holds no whole one.
    """
    longest = max((len(stop) for stop in stops), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        tail = text[-count:]
        if any(stop.startswith(tail) for stop in stops):
            return count
    return 0
