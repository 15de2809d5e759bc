"""The parts of the page as they change: what one viewer gets, second by second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
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
        look_s: Between two looks, in seconds.
    """

    def __init__(self, watcher: Watcher, look_s: float = LOOK_S) -> None:
        self._watcher = watcher
        self._look_s = look_s
        self._viewers = 0
        self._closed = asyncio.Event()

    def parts(self) -> dict[str, str]:
        """Every part as it is now."""
        return fragments(self._watcher.status(), self._watcher.recorder)

    def html(self) -> str:
        """The page as it is now."""
        return document(self._watcher.node, self.parts())

    @contextlib.contextmanager
    def viewing(self) -> Iterator[None]:
        """Be one of the viewers.

        Raises:
            NodeBusyError: There are as many as there may be.
        """
        if self._viewers >= VIEWERS_MAX:
            raise NodeBusyError(f"{VIEWERS_MAX} status pages are open")
        self._viewers += 1
        try:
            yield
        finally:
            self._viewers -= 1

    async def changes(self) -> AsyncGenerator[Mapping[str, str], None]:
        """All parts at once, then those that changed, until :meth:`close`.

        Raises:
            NodeBusyError: Too many pages are open.
        """
        with self.viewing():
            shown: dict[str, str] = {}
            while not self._closed.is_set():
                parts = self.parts()
                changed = {name: part for name, part in parts.items() if shown.get(name) != part}
                if changed:
                    yield changed
                shown = parts
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._look_s):
                        await self._closed.wait()

    def close(self) -> None:
        """End every viewer's stream: a page must not keep a node from stopping."""
        self._closed.set()
