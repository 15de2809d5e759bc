"""Tiles of the prefill call that reaches the cut, taken as its layers are done.

What a hand-over exposes is what is left to send when the last call is over. A layer's rows are
final as soon as that layer was computed, so those of the first layers are copied, sealed and sent
while the call computes the others. Nothing else changes: it is the same call, so its rows have the
bits that they would have anyway.

What was copied ahead and not taken yet is bounded; beyond that nothing is copied, and whoever needs
such a tile reads it when the call is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

from kvpack.snapshot import Tile, TileSpec

#: Tiles that were copied while the call ran and that nobody has taken yet, about 2 MiB each.
EARLY_TILES: Final = 6

#: Told of a tile whose rows are final, with what copies them while the call of it lasts.
Give = Callable[[TileSpec, Callable[[], Tile]], None]


@runtime_checkable
class GivesEarly(Protocol):
    """A generation that tells of final rows before a prefill call is over."""

    def prefill_giving(
        self, token_ids: Sequence[int], specs: Sequence[TileSpec], give: Give
    ) -> None:
        """As ``prefill``; ``give`` is called for those of ``specs`` that are final before."""


class EarlyTiles:
    """Tiles of one call. Made on the event loop; ``give`` is for the call's own thread.

    Args:
        specs: What the call makes whole, in the order in which it is taken.
    """

    def __init__(self, specs: Sequence[TileSpec]) -> None:
        self.specs = tuple(specs)
        self._loop = asyncio.get_running_loop()
        self._room = threading.Semaphore(EARLY_TILES)
        self._tiles: dict[object, asyncio.Future[Tile | None]] = {
            spec: self._loop.create_future() for spec in specs
        }

    def give(self, spec: TileSpec, copy: Callable[[], Tile]) -> None:
        """Copy the tile, if there is room for it, and memory."""
        if not self._room.acquire(blocking=False):
            return
        try:
            tile = copy()
        except MemoryError:
            # Raised here it would stop the call half way, and the session could not go on.
            self._room.release()
            return
        self._loop.call_soon_threadsafe(self._put, spec, tile)

    def close(self) -> None:
        """The call is over, however: nothing more comes."""
        for waiting in self._tiles.values():
            if not waiting.done():
                waiting.set_result(None)

    async def take(self, item: object) -> Tile | None:
        """The tile, when its rows are there; None: whoever wants it reads it after the call."""
        found = self._tiles.get(item)
        tile = None if found is None else await asyncio.shield(found)
        if tile is not None and self._tiles.pop(item, None) is not None:
            self._room.release()
        return tile

    def _put(self, spec: TileSpec, tile: Tile) -> None:
        found = self._tiles[spec]
        if not found.done():
            found.set_result(tile)


class LastCall:
    """The prefill call that reaches the cut, under way or over.

    Args:
        early: What it tells of.
        call: Gives the moment of its end.
        turn: At the engine; ends with the call.
        note: Told that moment.

    Attributes:
        task: Ends when all of that is done. It is not to be cancelled.
    """

    def __init__(
        self,
        early: EarlyTiles,
        call: asyncio.Future[float],
        turn: contextlib.AsyncExitStack,
        note: Callable[[float], None],
    ) -> None:
        self._early = early
        self.task = asyncio.create_task(self._run(call, turn, note))

    async def take(self, item: object) -> Tile | None:
        """As :meth:`EarlyTiles.take`."""
        return await self._early.take(item)

    async def passed(self) -> bool:
        """Return when the call is over; whether it was waited for.

        Raises:
            KvpackError: What ended it.
        """
        waited = not self.task.done()
        if waited:
            await asyncio.wait({self.task})
        self.task.result()
        return waited

    async def _run(
        self,
        call: asyncio.Future[float],
        turn: contextlib.AsyncExitStack,
        note: Callable[[float], None],
    ) -> None:
        try:
            async with turn:
                note(await call)
        finally:
            self._early.close()


async def over(task: asyncio.Task[None] | None) -> None:
    """Return when ``task`` is not under way, also where this is cancelled."""
    cancelled = False
    while task is not None and not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            # What was begun is under way all the same, and soon over.
            cancelled = True
    if task is not None and not task.cancelled():
        task.exception()
    if cancelled:
        raise asyncio.CancelledError
