"""A place for a run: one folder, and every process that it starts. Nothing of it outlives it.

Interrupts (SIGINT, SIGTERM, SIGHUP) end the block as ``KeyboardInterrupt``; then, and at any other
end, processes that descend from this one are ended and the folder is removed. While that is done a
further interrupt waits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.machine import adopt_orphans, descendants

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: Told to end, and then made to.
_ASKED_S = 2.0
_MADE_S = 10.0


@contextlib.contextmanager
def stage(parent: Path | None = None) -> Iterator[Path]:
    """A folder in ``parent``, or where temporary files go; temporary files of children go there."""
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    before = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    folder = Path(tempfile.mkdtemp(prefix="kvpack-bench-", dir=parent))
    tmpdir = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        yield folder
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        end_descendants()
        shutil.rmtree(folder, ignore_errors=True)
        if tmpdir is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = tmpdir
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def end_descendants() -> None:
    """End every process that descends from this one, whoever started it."""
    start = time.monotonic()
    while time.monotonic() < start + _MADE_S:
        alive = descendants(os.getpid())
        if not alive:
            return
        asked = time.monotonic() < start + _ASKED_S
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM if asked else signal.SIGKILL)
        _reap()
        time.sleep(0.05)


def _reap() -> None:
    """Orphans that were adopted are ours to wait for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
