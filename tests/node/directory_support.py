"""Directories for tests, and a clock that a test moves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from node.directory_sqlite import SqliteDirectory


def nonce(number: int) -> bytes:
    return number.to_bytes(16, "big")


class FakeClock:
    """A clock that stands still until it is moved; ``restart`` is what a reboot does to it."""

    def __init__(self, now_s: float = 1000.0):
        self.value_s = now_s

    def now_s(self):
        return self.value_s

    def move(self, seconds):
        self.value_s += seconds

    def restart(self, now_s=0.0):
        self.value_s = now_s


@dataclasses.dataclass
class Place:
    """A directory file, the clock that it is measured by, and a way to open it."""

    path: object
    clock: FakeClock = dataclasses.field(default_factory=FakeClock)

    @contextlib.asynccontextmanager
    async def opened(self, node: str = "a"):
        """The directory, as ``node`` reaches it."""
        directory = SqliteDirectory(self.path, self.clock)
        try:
            yield directory
        finally:
            await directory.close()

    def run(self, work, seconds=60.0):
        """Run ``work(directory)`` with a bound on its time."""

        async def bounded():
            async with asyncio.timeout(seconds), self.opened() as directory:
                return await work(directory)

        return asyncio.run(bounded())
