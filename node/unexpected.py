"""What a log says of an error that is this program's own: where, and of which kind.

Not the error's words. A key that was not found, a value that could not be encoded: what Python
puts there may be a user's text or tokens, and those are in no log.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

#: Of the way to where it was raised, the last steps.
_STEPS: Final = 6


def unexpected(error: BaseException) -> str:
    """``TypeError at FILE:LINE NAME < FILE:LINE NAME …``, innermost first; and the cause's kind."""
    steps = traceback.extract_tb(error.__traceback__)[-_STEPS:]
    way = " < ".join(f"{_short(one.filename)}:{one.lineno} {one.name}" for one in reversed(steps))
    said = f"{type(error).__name__} at {way or 'an unknown place'}"
    cause = error.__cause__
    return said if cause is None else f"{said}; because of {type(cause).__name__}"


def _short(filename: str) -> str:
    """Folder and file: whose home it lies in is nobody's business either."""
    return "/".join(Path(filename).parts[-2:])
