"""The parts of the page as they change: what one viewer gets, second by second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Final

from node.errors import NodeBusyError
from node.metrics.watcher import Watcher
from node.page.document import document
from node.page.fragments import fragments

#: Between two looks at the node.
LOOK_S: Final = 1.0

#: Pages that are kept fresh at once; each costs a connection and a rendering a second.
VIEWERS_MAX: Final = 16


class StatusPage:
    """The page of one node.

    Args:
        watcher: Reads the node.
        stopping: Set once the node is to stop: a page must not keep it from that.
        look_s: Between two looks, in seconds.
        refresh: Awaited before each look: reads what a look does not wait for.
    """

    def __init__(
        self,
        watcher: Watcher,
        stopping: asyncio.Event,
        look_s: float = LOOK_S,
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._watcher = watcher
        self._stopping = stopping
        self._look_s = look_s
        self._refresh = refresh
        self._viewers = 0

    def parts(self) -> dict[str, str]:
        """Every part as it is now."""
        return fragments(self._watcher.status(), self._watcher.recorder)

    async def refresh(self) -> None:
        """Let the next look see what has to be read from a disk."""
        if self._refresh is not None:
            await self._refresh()

    def html(self) -> str:
        """The page as it is now."""
        return document(self._watcher.node, self.parts())

    def require_room(self) -> None:
        """Refuse one viewer too many.

        Raises:
            NodeBusyError: There are as many as there may be.
        """
        if self._viewers >= VIEWERS_MAX:
            raise NodeBusyError(f"{VIEWERS_MAX} status pages are open")

    @contextlib.contextmanager
    def _viewing(self) -> Iterator[None]:
        self.require_room()
        self._viewers += 1
        try:
            yield
        finally:
            self._viewers -= 1

    async def changes(self) -> AsyncGenerator[Mapping[str, str], None]:
        """All parts at once, then those that changed, until the node stops.

        Raises:
            NodeBusyError: Too many pages are open.
        """
        with self._viewing():
            shown: dict[str, str] = {}
            while True:
                await self.refresh()
                parts = self.parts()
                changed = {name: part for name, part in parts.items() if shown.get(name) != part}
                if changed:
                    yield changed
                shown = parts
                if self._stopping.is_set():
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._look_s):
                        await self._stopping.wait()
