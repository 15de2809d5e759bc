"""What this process used: processor seconds, and memory at its highest since a moment."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.config import widen_heap

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")

#: Written to ``clear_refs``: the highest resident size so far becomes the present one.
_RESET_PEAK: Final = "5"

_KIB: Final = 1024


def cpu_s() -> float:
    """Seconds of processor time that all threads of this process took, in user and in kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, slots=True)
class MemoryMark:
    """Resident memory of this process when a measurement began.

    Attributes:
        resident_bytes: None where the system does not tell, or cannot forget an older peak.
    """

    resident_bytes: int | None

    @classmethod
    def now(cls) -> MemoryMark:
        """Give back what is free and begin to watch the peak anew."""
        gc.collect()
        _give_back()
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
            return cls(_field("VmRSS"))
        return cls(None)

    def peak_growth_bytes(self) -> int | None:
        """How much more was resident at the highest moment since; None where nobody knows."""
        peak = _field("VmHWM")
        if peak is None or self.resident_bytes is None:
            return None
        return peak - self.resident_bytes


def _field(name: str) -> int | None:
    try:
        text = _STATUS.read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * _KIB if found else None


def _give_back() -> None:
    """Freed memory that glibc keeps would hide growth: it is there already."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
        # The heap's end went, and with it what was said of its pages.
        widen_heap()
