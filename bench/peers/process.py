"""One end of a peer, in a process of its own. Started by :mod:`bench.peers.pair` alone.

    python -m bench.peers.process check NAME
    python -m bench.peers.process receive|send|store NAME VARIANT PAYLOAD FOLDER

Lines on standard output are JSON objects. A receiver counts processor time between the lines ``go``
and ``end`` on its standard input, and compares what it got with the payload after that.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from node.bench.usage import cpu_s


def _say(**values: object) -> None:
    print(json.dumps(values), flush=True)


class Link:
    """What a receiver says, and when its processor time counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begun_s = self._ended_s = 0.0
        self._ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def listening(self, address: Any) -> None:
        """Somebody may send to ``address``, a value of JSON."""
        _say(address=address)

    def used_s(self) -> float:
        """Processor seconds while it was sent to."""
        self._ended.wait()
        return self._ended_s - self._begun_s

    def _listen(self) -> None:
        for line in sys.stdin:
            if line == "go\n":
                self._begun_s = cpu_s()
            elif line == "end\n":
                self._ended_s = cpu_s()
                self._ended.set()
        # Whoever asked is gone.
        os._exit(1)


def _receive(module: ModuleType, variant: str, payload: Path, folder: Path) -> None:
    link = Link(folder)
    buffer = np.zeros(payload.stat().st_size, np.uint8)
    # Pages that are touched for the first time would count as the transfer's.
    buffer[::4096] = 1
    module.receive(link, buffer, variant)
    used_s = link.used_s()
    sent = np.memmap(payload, np.uint8, "r")
    _say(cpu_s=used_s, equal=bool(np.array_equal(buffer, sent)))


def _send(module: ModuleType, variant: str, payload: Path, folder: Path) -> None:
    address = json.loads(sys.stdin.readline())
    data = np.fromfile(payload, np.uint8)
    work = module.send(address, data, variant, folder)
    _say(go=True)
    # The other end reads its clock of processor time; a moment is as long as that takes.
    time.sleep(0.02)
    used_s, start_s = cpu_s(), time.perf_counter()
    work()
    seconds = time.perf_counter() - start_s
    _say(seconds=seconds, cpu_s=cpu_s() - used_s)


def _store(module: ModuleType, variant: str, payload: Path, folder: Path) -> None:
    data = np.fromfile(payload, np.uint8)
    used_s = cpu_s()
    seconds, returned = module.store(data, folder, variant)
    used_s = cpu_s() - used_s
    back = np.frombuffer(returned, np.uint8)
    _say(detail=seconds, cpu_s=used_s, equal=bool(np.array_equal(back, data)))


def main() -> None:
    """Be the end that the arguments name."""
    what, name = sys.argv[1:3]
    module = importlib.import_module(f"bench.peers.{name}")
    try:
        if what == "check":
            module.load()
        else:
            variant, payload, folder = sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5])
            {"receive": _receive, "send": _send, "store": _store}[what](
                module, variant, payload, folder
            )
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is what is reported
        traceback.print_exc()
        _say(problem=f"{type(error).__name__}: {error}", missing=isinstance(error, ImportError))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a peer's own would keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
