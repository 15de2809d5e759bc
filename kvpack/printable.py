"""Which texts may stand in a pack: a rule of code points that no Unicode table can change.

Python's ``str.isprintable`` follows the tables of its release, so one byte string would be good in
one release and bad in the next. The ranges are those of docs/spec/kvpack-v1.md, section 1. They
leave out what moves a cursor, breaks a line, turns the direction of writing, or cannot be seen, and
what has no meaning of its own: surrogates, private use, noncharacters. A code point that nobody has
assigned yet is good: it may be a letter tomorrow.
"""

from __future__ import annotations

import re
from typing import Final

#: First and last code point of each refused range, ascending. Besides, the last two code points of
#: every plane are noncharacters.
REFUSED: Final = (
    (0x0000, 0x001F),  # C0 controls
    (0x007F, 0x00A0),  # delete, C1 controls, the space that does not break
    (0x00AD, 0x00AD),  # soft hyphen
    (0x061C, 0x061C),  # Arabic letter mark: direction
    (0x1680, 0x1680),  # Ogham space
    (0x180E, 0x180E),  # Mongolian vowel separator
    (0x2000, 0x200F),  # spaces, joiners, marks of direction
    (0x2028, 0x202F),  # line and paragraph separators, embeddings, narrow space
    (0x205F, 0x206F),  # spaces, invisible operators, isolates
    (0x3000, 0x3000),  # ideographic space
    (0xD800, 0xF8FF),  # surrogates, private use
    (0xFDD0, 0xFDEF),  # noncharacters
    (0xFEFF, 0xFEFF),  # byte order mark
    (0xFFF9, 0xFFFB),  # interlinear annotation
    (0x1BCA0, 0x1BCA3),  # shorthand format controls
    (0x1D173, 0x1D17A),  # musical format controls
    (0xE0000, 0x10FFFF),  # tags and other invisible selectors, private planes
)

_PLANES_BEFORE_TAGS: Final = 14


def _pattern() -> re.Pattern[str]:
    plane_ends = (
        (plane << 16 | 0xFFFE, plane << 16 | 0xFFFF) for plane in range(_PLANES_BEFORE_TAGS)
    )
    ranges = (f"\\U{first:08x}-\\U{last:08x}" for first, last in (*REFUSED, *plane_ends))
    return re.compile(f"[{''.join(ranges)}]")


_REFUSED: Final = _pattern()


def is_printable(text: str) -> bool:
    """Whether no code point of ``text`` is refused. The empty text is printable."""
    return _REFUSED.search(text) is None
