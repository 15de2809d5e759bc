"""Sealing what was loaded, on threads, ahead of the stream that sends it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpack.chunk import ChunkReference
from kvpack.snapshot import Tile
from node.migration.tape import Item
from node.migration.window import Chunk

#: Tiles that are sealed, or being sealed, beside the one that is written.
AHEAD_TILES: Final = 2


@dataclass(frozen=True, slots=True, repr=False)
class Loaded:
    """Item ``index`` of the tape, with its rows where it holds rows, or as its chunk."""

    index: int
    item: Item
    tile: Tile | None
    chunk: Chunk | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Sealed:
    """Item ``index`` of the tape as the piece of a stream; an empty one where naming it will do."""

    index: int
    piece: bytes
    reference: ChunkReference


class Sealing:
    """Seals what comes out of a queue on threads, ahead of whoever takes it, in its order.

    What is there is handed to the threads before the one before is given out: a stream's write
    encrypts in the event loop's own thread, so whatever waited for a turn of the loop would only
    begin when that is done.

    Args:
        queue: What is to be sealed; None is its end.
        seal: Seals one. Runs on several threads at once.
    """

    def __init__(
        self, queue: asyncio.Queue[Loaded | None], seal: Callable[[Loaded], Sealed]
    ) -> None:
        self._queue = queue
        self._seal = seal
        self._ahead: deque[asyncio.Future[Sealed]] = deque()
        self._over = False

    async def take(self) -> Sealed | None:
        """The next one; None after the last.

        Raises:
            KvpackError: What sealing it raised.
        """
        self._look_ahead()
        if not self._ahead:
            if self._over:
                return None
            self._hand_over(await self._queue.get())
            return await self.take()
        sealed = await self._ahead[0]
        self._ahead.popleft()
        self._look_ahead()
        return sealed

    def _look_ahead(self) -> None:
        while len(self._ahead) < AHEAD_TILES and not self._queue.empty():
            self._hand_over(self._queue.get_nowait())

    def _hand_over(self, loaded: Loaded | None) -> None:
        if loaded is None:
            self._over = True
            return
        sealing = asyncio.get_running_loop().run_in_executor(None, self._seal, loaded)
        # Where nobody takes it any more nobody has to hear why it failed, either.
        sealing.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._ahead.append(sealing)
