"""Rows out of a cut, back into a generation: read and opened on worker threads, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpack.chunk import ChunkReference, tile_of
from kvpack.snapshot import Tile
from kvpack.store import CutReader
from kvpack.store.reader import trim_tile
from node.packs import require_engine_rows
from node.serving.ladder.resident import Resident

if TYPE_CHECKING:
    from engine import Generation, Installer
    from kvpack.layout import CacheLayout
    from node.binding import PackBinding
    from node.engine_thread import EngineThread

#: Plaintext that is read ahead, and scattered in one call on the engine's thread.
BATCH_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, repr=False)
class RestoredRows:
    """A cut's rows.

    Attributes:
        generation: The rows, detached; its taker's alone.
        plain_bytes: Of rows that count, from the manifest.
        memory_bytes: Of the chunks read for it, those that were in memory already.
        disk_bytes: And those that were not.
    """

    generation: Generation
    plain_bytes: int
    memory_bytes: int
    disk_bytes: int


class Restoring:
    """One restore. ``run`` is called once; cancelled, it leaves nothing but what it cached.

    Args:
        engine: Where the generation is built.
        binding: Tells whether the rows are this node's own.
        reader: The cut.
        resident: Asked first, and given what was read.
        readers: Threads that read.
    """

    def __init__(
        self,
        engine: EngineThread,
        binding: PackBinding,
        reader: CutReader,
        resident: Resident,
        readers: Executor,
    ) -> None:
        self._engine = engine
        self._binding = binding
        self._reader = reader
        self._resident = resident
        self._readers = readers
        self._layout = reader.cut.header.layout
        self._memory_bytes = 0
        self._disk_bytes = 0

    async def run(self) -> RestoredRows:
        """Bring the rows back.

        Raises:
            LayoutMismatchError: No engine computed them, or they do not make a whole state.
            NotStoredError: A chunk is gone.
            AuthenticationError: A chunk was changed. And what opening one raises.
            NodeBusyError: Too many calls wait for the engine.
        """
        manifest, engine = self._reader.cut.manifest, self._engine
        require_engine_rows(manifest)
        rows = [reference for reference in manifest.references if reference.has_rows]
        batches = _batches(rows)
        ahead = self._ahead(next(batches, []))
        try:
            installer = await engine.call(engine.model.installer, manifest.position)
            while tiles := await ahead:
                ahead = self._ahead(next(batches, []))
                await engine.call(_scatter, installer, tiles)
        finally:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)
        mixed = not self._binding.owns(manifest.numerics)
        generation = await engine.call(installer.finish, manifest.schedule, mixed=mixed)
        plain = state_bytes(self._layout, rows)
        return RestoredRows(generation, plain, self._memory_bytes, self._disk_bytes)

    def _ahead(self, references: Sequence[ChunkReference]) -> asyncio.Future[list[Tile]]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._readers, self._load, references)

    def _load(self, references: Sequence[ChunkReference]) -> list[Tile]:
        return [self._tile(reference) for reference in references]

    def _tile(self, reference: ChunkReference) -> Tile:
        """The rows that count of one chunk."""
        data = self._resident.get(reference.seal_id)
        if data is not None:
            self._memory_bytes += reference.plain_bytes
            whole = Tile(reference.tile_spec(), data)
        else:
            self._disk_bytes += reference.plain_bytes
            whole = tile_of(self._layout, self._reader.open(reference))
            self._resident.put(reference.seal_id, whole.data)
        return trim_tile(self._layout, whole, reference.used_spec())


def state_bytes(layout: CacheLayout, references: Sequence[ChunkReference]) -> int:
    """Plaintext of the rows that count, as a manifest's references say."""
    return sum(ref.used_spec().data_bytes(layout) for ref in references if ref.has_rows)


def _batches(references: Sequence[ChunkReference]) -> Iterator[list[ChunkReference]]:
    batch: list[ChunkReference] = []
    size = 0
    for reference in references:
        if batch and size + reference.plain_bytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(reference)
        size += reference.plain_bytes
    if batch:
        yield batch


def _scatter(installer: Installer, tiles: Sequence[Tile]) -> None:
    for tile in tiles:
        installer.scatter(tile)
