"""The machine: what it is, how busy it is, and which processes descend from this one."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_PACKAGES = (
    "kvpack", "cryptography", "blake3", "grpcio", "protobuf", "zstandard", "numpy", "mlx", "mlx-lm",
    "safetensors", "pyzmq", "pyarrow", "mooncake-transfer-engine-non-cuda", "nixl-cu12", "lmcache",
    "llama-cpp-python", "torch",
)  # fmt: skip
_PR_SET_CHILD_SUBREAPER = 36
_PROVIDE_S = 120.0
_FREE_PAGES = "SC_AVPHYS_PAGES"


def describe() -> dict[str, Any]:
    """What ratios depend on: processor, memory, kernel, versions."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    import ssl

    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count() if affinity is None else len(affinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
        "tcp_congestion_control": _first_line(Path("/proc/sys/net/ipv4/tcp_congestion_control")),
        "versions": versions,
    }  # fmt: skip


def load() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def _cpu() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def provide_memory(byte_count: int) -> None:
    """Have a virtual machine's host provide so much memory, at most half of what is free.

    It takes back what nobody used for a while, and gives it again at a tenth of the rate at which a
    move writes it. A process that writes as much once, and ends, takes that off what is measured.
    Where the system does not say what is free (macOS), or it takes too long, what is measured goes
    on without: that is no fault of a contender.
    """
    with contextlib.suppress(ValueError, subprocess.TimeoutExpired):
        page, free = os.sysconf("SC_PAGE_SIZE"), os.sysconf(_FREE_PAGES)
        size = min(byte_count, page * free // 2)
        program = f"import numpy; numpy.empty({size}, numpy.uint8).fill(1)"
        subprocess.run([sys.executable, "-c", program], check=False, timeout=_PROVIDE_S)


def _first_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def adopt_orphans() -> None:
    """Let processes whose parent dies become this one's: none of a tree is lost. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Processes that descend from ``root``, children first; it is not among them."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, at = list(children.get(root, [])), 0
    while at < len(found):
        found += children.get(found[at], [])
        at += 1
    return found


def _parents() -> list[tuple[int, int]]:
    if not _PROC.is_dir():
        listed = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, check=True)
        rows = (line.split() for line in listed.stdout.decode().splitlines())
        return [(int(pid), int(parent)) for pid, parent in rows]
    return [(pid, int(fields[1])) for pid, fields in _stats() if fields[0] != "Z"]


def _stats() -> list[tuple[int, list[str]]]:
    """``(pid, fields from the state on)`` of every process."""
    found = []
    for name in os.listdir(_PROC):  # noqa: PTH208 - thousands of paths would be made
        if name.isdigit():
            with contextlib.suppress(OSError):
                text = (_PROC / name / "stat").read_text()
                found.append((int(name), text.rpartition(")")[2].split()))
    return found


@dataclass(frozen=True)
class Busy:
    """Processor seconds so far: of the machine, and of this process and all below it."""

    at_s: float
    machine_s: float
    own_s: float

    @classmethod
    def now(cls) -> Busy | None:
        """None where the system does not tell."""
        if not _PROC.is_dir():
            return None
        tick = os.sysconf("SC_CLK_TCK")
        fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()
        # user, nice, system, irq, softirq; guest time is in user already.
        machine = sum(int(fields[i]) for i in (1, 2, 3, 6, 7)) / tick
        stats = dict(_stats())
        children: dict[int, list[int]] = {}
        for pid, row in stats.items():
            children.setdefault(int(row[1]), []).append(pid)
        own, todo = 0, [os.getpid()]
        while todo:
            pid = todo.pop()
            todo += children.get(pid, [])
            # With those of children that were waited for: what ends does not get lost.
            own += sum(map(int, stats[pid][11:15])) if pid in stats else 0
        return cls(time.monotonic(), machine, own / tick)

    def alien_cores(self, since: Busy | None) -> float | None:
        """Cores that others used since ``since``."""
        if since is None or self.at_s <= since.at_s:
            return None
        others = (self.machine_s - since.machine_s) - (self.own_s - since.own_s)
        return round(max(0.0, others / (self.at_s - since.at_s)), 3)
