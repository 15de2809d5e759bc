"""What was refused, and to whom: a bounded file of JSON lines, and the last ones in memory.

No text of a request is in it, and no key: a stable word, a route, a tenant, a status.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

#: One file is that long at most; the one before it is kept.
FILE_BYTES_MAX: Final = 1 << 20

#: Refusals in memory: what a page shows, and what may wait to be written.
RECENT_MAX: Final = 64
_WAITING_MAX: Final = 1024

#: Lines are written together: a flood of refusals costs one write in so many seconds.
_WRITE_EVERY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Refused:
    """One refusal.

    Attributes:
        at_s: When, in seconds since 1970.
        tenant: Who was refused; empty where that is not known.
        route: What was called, without what varies in it; empty where no route was met.
        status: HTTP's.
        code: The stable word.
    """

    at_s: float
    tenant: str
    route: str
    status: int
    code: str


class Audit:
    """Writes refusals down. Never in the way: what cannot be written is counted and dropped.

    Attributes:
        refusals: How many there were since the start.
        dropped: How many of them were not written.
    """

    def __init__(self, path: Path, now_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now_s = now_s
        self._waiting: collections.deque[Refused] = collections.deque()
        self._recent: collections.deque[Refused] = collections.deque(maxlen=RECENT_MAX)
        self._task: asyncio.Task[None] | None = None
        self.refusals = 0
        self.dropped = 0

    def note(self, tenant: str, route: str, status: int, code: str) -> None:
        """Note one refusal."""
        refused = Refused(self._now_s(), tenant, route, status, code)
        self.refusals += 1
        self._recent.append(refused)
        if len(self._waiting) >= _WAITING_MAX:
            self.dropped += 1
            return
        self._waiting.append(refused)

    def recent(self) -> list[Refused]:
        """The last ones, newest first."""
        return list(reversed(self._recent))

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Write what waits, and stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._flush()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_WRITE_EVERY_S)
            await self._flush()

    async def _flush(self) -> None:
        lines = [json.dumps(asdict(self._waiting.popleft())) for _ in range(len(self._waiting))]
        if not lines:
            return
        try:
            await asyncio.to_thread(_append, self._path, "".join(f"{line}\n" for line in lines))
        except OSError as error:
            self.dropped += len(lines)
            log.warning("%s: %d refusals not written (%s)", self._path, len(lines), error.strerror)


def _append(path: Path, text: str) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    with os.fdopen(descriptor, "a") as sink:
        sink.write(text)
        length = sink.tell()
    if length > FILE_BYTES_MAX:
        path.replace(path.with_name(f"{path.name}.1"))
