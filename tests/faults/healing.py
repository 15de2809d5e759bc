"""Two nodes are watched: what has ended is started again, what was paused goes on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import time
from dataclasses import dataclass

from .lab import Lab, NodeProcess


async def lock_directory(lab: Lab, seconds: float) -> None:
    """Let nobody write to the directory for so long."""
    if seconds:
        await asyncio.to_thread(_lock, lab, seconds)


def _lock(lab: Lab, seconds: float) -> None:
    with contextlib.closing(sqlite3.connect(lab.directory, timeout=10.0)) as directory:
        directory.isolation_level = None
        directory.execute("BEGIN EXCLUSIVE")
        time.sleep(seconds)
        directory.execute("ROLLBACK")


@dataclass
class Faults:
    """The orders that are left for each node, by name; how long a pause lasts."""

    orders: dict[str, list[str]]
    pause_s: float
    healed: int = 0
    done: bool = False

    async def watch(self, node: NodeProcess) -> None:
        """Until cancelled. The next order is given before the node starts or goes on."""
        self._next(node)
        starting: asyncio.Future[bool] | None = None
        while True:
            if starting is not None and starting.done():
                starting.result()
                starting = None
            if node.is_paused():
                await asyncio.sleep(self.pause_s)
                self._next(node)
                node.signal(signal.SIGCONT)
                self.healed += 1
            elif starting is None and node.has_ended():
                self._next(node)
                starting = asyncio.ensure_future(node.start())
                self.healed += 1
            await asyncio.sleep(0.02)

    def _next(self, node: NodeProcess) -> None:
        left = self.orders[node.name]
        node.order(left.pop(0) if left and not self.done else "")
