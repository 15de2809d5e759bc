"""What a node measured, for a page that is rendered without waiting for a disk."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from node.economics.summary import Economy, economy_of
from node.records.errors import RecordsError

if TYPE_CHECKING:
    from node.economics.book import Book

log = logging.getLogger(__name__)

#: A page waits so long for the book; then it shows what was read before.
WAIT_S: Final = 0.25


class BookLook:
    """The book as it was read last; read again only where something was written since.

    Attributes:
        economy: What it says.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._seen: int | None = None
        self._reading: asyncio.Task[None] | None = None
        self.economy = Economy()

    async def look(self) -> None:
        """Bring :attr:`economy` up to date, if that is soon done. Never fails."""
        if self._reading is None and self._book.written != self._seen:
            self._reading = asyncio.create_task(self._read())
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=WAIT_S)

    async def _read(self) -> None:
        self._seen = self._book.written
        try:
            self.economy = economy_of(await asyncio.to_thread(self._book.read))
        except RecordsError as error:
            log.warning("what was measured is not shown: %s", error)
        finally:
            self._reading = None
