"""Writes down what large pieces of memory a process holds, over time and by who asked for them.

Python loads this by itself in every process that is started with this folder on its path:

    KVPACK_ALLOCATIONS=FOLDER PYTHONPATH=bench/tracing python ...

Each process writes ``FOLDER/PID.jsonl``: a line for every sample, with the second, the resident
bytes, and the bytes of pieces of 64 KiB and more by file and line. What libraries take without
asking Python (MLX's planes, gRPC's slices) is in the resident bytes alone.

What importing takes is not followed: a hundred thousand small pieces, which each sample would go
through. It begins when no module was imported for a moment. Where many pieces are held, samples are
rarer: they take a tenth of the time at most, or a process on a busy machine would not come on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

_LARGE_BYTES = 64 << 10
_EVERY_S = 0.1
_SHARE = 10

#: No module came for so long: a process has begun. Not waited for longer than that.
_QUIET_S = 0.3
_BEGIN_S = 60.0
_DEEP = 4


def _held() -> dict[str, int]:
    """Bytes of large pieces by the innermost line that is in no library of the language."""
    import _tracemalloc

    held: dict[str, int] = {}
    for trace in _tracemalloc._get_traces():
        size, frames = trace[1], trace[2]
        if size >= _LARGE_BYTES:
            place = _place(frames)
            held[place] = held.get(place, 0) + size
    return held


def _place(frames: tuple[tuple[str, int], ...]) -> str:
    root = f"{Path(__file__).parents[2]}{os.sep}"
    for name, line in frames:
        if name.startswith(root):
            return f"{name[len(root) :]}:{line}"
    name, line = frames[0]
    return f"{Path(name).parent.name}/{Path(name).name}:{line}"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _wait_for_imports(start: float) -> None:
    known, since = 0, start
    while time.monotonic() - since < _QUIET_S and time.monotonic() - start < _BEGIN_S:
        if known != len(sys.modules):
            known, since = len(sys.modules), time.monotonic()
        time.sleep(_QUIET_S / 10)


def _sample(file: TextIO) -> None:
    import tracemalloc

    start = time.monotonic()
    _wait_for_imports(start)
    tracemalloc.start(_DEEP)
    took_s = 0.0
    while True:
        time.sleep(max(_EVERY_S, _SHARE * took_s))
        second = round(time.monotonic() - start, 3)
        line = {"s": second, "resident": _resident_bytes(), "held": _held()}
        file.write(json.dumps(line) + "\n")
        file.flush()
        took_s = time.monotonic() - start - second


def _begin(folder: Path) -> None:
    file = (folder / f"{os.getpid()}.jsonl").open("w")
    # What it is, for whoever draws it; never a path.
    file.write(json.dumps({"command": [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:4]]}) + "\n")
    threading.Thread(target=_sample, args=(file,), daemon=True).start()


if folder := os.environ.get("KVPACK_ALLOCATIONS"):
    _begin(Path(folder))
