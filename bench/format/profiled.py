"""``python -m bench.format.profiled restore|save``: the same work again and again, to be looked at.

With ``--perf FILE`` only the work is recorded, and not the imports and the pack before it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.format.pack import HEADER, KEY, NUMERICS, make_pack
from bench.format.restore import restored
from kvpack.bundle import publish_new, write_snapshot
from node.config import tune_malloc

_PERF: Final = ("perf", "record", "-q", "--call-graph", "dwarf,8192", "-F", "399")
_PERF_BEGINS_S: Final = 1.0


def saved(generation: Any, target: Path) -> None:
    """Snapshot of live planes, sealed and written, durable."""
    snapshot = generation.snapshot(range(generation.position))
    with publish_new(target) as sink:
        write_snapshot(sink, KEY, HEADER, snapshot, NUMERICS, generation.schedule)
    target.unlink()


@contextmanager
def recorded(file: Path | None) -> Iterator[None]:
    """With a file, let perf look at this process meanwhile."""
    if file is None:
        yield
        return
    perf = subprocess.Popen([*_PERF, "-p", str(os.getpid()), "-o", str(file)])
    try:
        time.sleep(_PERF_BEGINS_S)
        yield
    finally:
        perf.send_signal(signal.SIGINT)
        perf.wait(timeout=60)


def main() -> None:
    """Parse, prepare, repeat."""
    parser = argparse.ArgumentParser(prog="python -m bench.format.profiled", description=__doc__)
    parser.add_argument("work", choices=("restore", "save"))
    parser.add_argument("--mib", type=int, default=494, help="size of the pack")
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--threads", type=int, help="of a restore; default: as many as cores")
    parser.add_argument("--perf", type=Path, help="where perf writes what it saw")
    options = parser.parse_args()
    tune_malloc()
    with tempfile.TemporaryDirectory() as folder:
        path = make_pack(Path(folder) / "pack", options.mib)
        generation = restored(path)
        work: Callable[[], object] = lambda: restored(path, options.threads)  # noqa: E731
        if options.work == "save":
            work = lambda: saved(generation, Path(folder) / "saved")  # noqa: E731
        else:
            generation = None
        with recorded(options.perf):
            for _ in range(options.times):
                work()


if __name__ == "__main__":
    main()
