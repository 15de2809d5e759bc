"""Where all tests put their files: in memory where there is room; and what is kept for all.

Everything here is written durably, so on a disk a test run is mostly waiting for it. Nothing that a
test asks is about the device: what a crash loses is asked of a simulated disk, full and slow
volumes are made for it, and processes that are killed lose nothing that they wrote to either.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path

#: Far more than all tests of a run have on the disk at one time.
ROOM_BYTES = 3 << 30


def _in_memory(folder: Path = Path("/dev/shm")) -> None:
    # A folder that somebody chose stays chosen.
    if any(os.environ.get(name) for name in ("PYTEST_DEBUG_TEMPROOT", "TMPDIR")):
        return
    if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= 2 * ROOM_BYTES:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)


def _compile_once() -> None:
    # Hundreds of tests start commands, and each start would compile some 240 modules again. What
    # is kept lies where Python keeps it for everybody else (__pycache__, which git does not see).
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


_in_memory()
_compile_once()


def pytest_collection() -> None:
    """What is imported and collected stays: to look for garbage in it takes a fifth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From now on garbage is looked for among what tests make."""
    gc.freeze()
    gc.enable()
