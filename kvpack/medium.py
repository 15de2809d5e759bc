"""How fast a folder takes bytes: what the rule of ADR 7 asks before it compresses for a store.

Writing with a flush is the slower direction of every medium that matters here, and reading a file
back that was just written would measure memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvpack.publish import FILE_MODE, flush, private_name

#: Long enough that a flush is not all there is, short enough for every command.
PROBE_BYTES: Final = 16 << 20

_PIECE_BYTES: Final = 1 << 20
_BITS: Final = 8

#: Faster than any medium: a clock that stood still must not divide by zero.
_SECONDS_MIN: Final = 1e-6


def measure_write_bits_per_s(folder: str | os.PathLike[str], clock: Callable[[], float]) -> int:
    """Write and flush 16 MiB under a private name in ``folder``, which is removed again.

    Args:
        folder: Where the store or the pack will be.
        clock: Seconds, monotonic.

    Raises:
        OSError: The folder takes no file, or has no room.
    """
    path = Path(folder) / private_name()
    noise = os.urandom(_PIECE_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        start = clock()
        for _ in range(PROBE_BYTES // _PIECE_BYTES):
            written = 0
            while written < _PIECE_BYTES:
                written += os.write(descriptor, noise[written:])
        flush(descriptor)
        seconds = max(clock() - start, _SECONDS_MIN)
    finally:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return max(1, int(PROBE_BYTES * _BITS / seconds))
