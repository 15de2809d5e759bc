"""Chunks of a live session's windows, read and sealed while it serves on.

What the freeze of a live session exposes is its window set: read, named, sealed and sent. Only the
sending has to wait for the cut. A whole block well inside a window is a chunk of every cut until
the window has slid into it, so such blocks are sealed just before the freeze, and what is left of
the window then is its two ends. Nothing else changes: the chunks are the ones that the cut would
have given, and one that it does not have is dropped. What could not be sealed ahead is sealed when
it is sent, as everything else is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from kvpack.chunk import ChunkReference
from kvpack.snapshot import Tile, TileSpec

#: Tiles that are copied in one call on the engine's thread, and then sealed at once.
BATCH_TILES: Final = 4

#: A chunk as the piece of a stream.
Chunk = tuple[ChunkReference, bytes]


class WindowAhead:
    """Chunks for a cut that is not known yet: at most one window set.

    Args:
        read: Copies tiles; of one whose rows are not live any more it gives None.
        seal: Seals one. Runs on several threads at once.
    """

    def __init__(
        self,
        read: Callable[[Sequence[TileSpec]], Awaitable[list[Tile | None]]],
        seal: Callable[[Tile], Chunk],
    ) -> None:
        self._read = read
        self._seal = seal
        self._chunks: dict[TileSpec, Chunk] = {}

    @property
    def specs(self) -> frozenset[TileSpec]:
        """What is held."""
        return frozenset(self._chunks)

    async def renew(self, specs: Sequence[TileSpec], still: Callable[[], None]) -> None:
        """Hold the chunks of ``specs`` and no others; those whose rows are gone meanwhile excepted.

        Args:
            specs: Blocks of the windows where they stand now.
            still: Called before every batch; raises where nobody takes them any more.

        Raises:
            KvpackError: What reading, sealing or ``still`` raises.
        """
        self.keep(specs)
        missing = [spec for spec in specs if spec not in self._chunks]
        for first in range(0, len(missing), BATCH_TILES):
            still()
            read = await self._read(missing[first : first + BATCH_TILES])
            tiles = [tile for tile in read if tile is not None]
            chunks = await asyncio.gather(*(asyncio.to_thread(self._seal, tile) for tile in tiles))
            self._chunks.update({t.spec: chunk for t, chunk in zip(tiles, chunks, strict=True)})

    def keep(self, specs: Collection[TileSpec]) -> None:
        """Let go of what is not among ``specs``; it can be made again."""
        kept = frozenset(specs)
        self._chunks = {spec: chunk for spec, chunk in self._chunks.items() if spec in kept}

    def take(self, item: object) -> Chunk | None:
        """The chunk of ``item``, once, if it is held."""
        return self._chunks.pop(item, None) if isinstance(item, TileSpec) else None
