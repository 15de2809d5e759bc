"""A backend's failure as an error with a name: what was asked of it, and that nothing came of it.

Not its own words: they may name what a user wrote. Functions of the error alone; no torch here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeVar

from kvpack.errors import KvpackError
from node.errors import BackendFailedError, MemoryLackingError
from node.unexpected import unexpected

_T = TypeVar("_T")

#: As torch's allocators say what did not fit: CUDA's, the host's, and page-locked memory's.
_ASKED: Final = re.compile(r"[Tt]ried to allocate ([0-9.]{1,20}) (bytes|[KMGT]iB)")
_LACKING: Final = re.compile(r"out of memory|can't allocate memory", re.IGNORECASE)

#: What torch calls it, by name: nothing here may import torch.
_KIND: Final = "OutOfMemoryError"


def named(error: Exception, doing: str) -> KvpackError:
    """What callers are told in the place of ``error``.

    Args:
        error: Of the backend.
        doing: What it was asked for, such as ``a call of 512 tokens at position 1,024``.
    """
    if isinstance(error, KvpackError):
        return error
    if not _is_lack_of_memory(error):
        return BackendFailedError(f"{doing}: failed, and changed nothing: {unexpected(error)}")
    asked = _ASKED.search(str(error))
    size = f" ({asked[1]} {asked[2]} more were asked for)" if asked else ""
    return MemoryLackingError(f"{doing}: out of memory{size}, and changed nothing")


def guarded(work: Callable[[], _T], doing: str, give_up: Callable[[], None]) -> _T:
    """What ``work`` gives; where it fails, ``give_up`` and an error with a name.

    Raises:
        KvpackError: ``work`` failed.
    """
    try:
        return work()
    except Exception as error:
        failure = named(error, doing)
        if failure is error:
            raise
    # Out of the block: the error's way holds every array of the call that failed.
    give_up()
    raise failure


def _is_lack_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    if any(kind.__name__ == _KIND for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _LACKING.search(str(error)) is not None
