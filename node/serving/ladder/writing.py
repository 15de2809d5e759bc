"""One cut into the store: read what was not copied, seal what is new, refer to the rest."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpack.chunk import (
    ChunkClass,
    ChunkReference,
    SealedChunk,
    seal_component,
    seal_tile,
    seal_token_ids,
)
from kvpack.keys import Keyring
from kvpack.layout import LayerKind, Producer
from kvpack.limits import GRID_TOKENS
from kvpack.manifest import Component, ComponentKind, Manifest
from kvpack.snapshot import Tile, TileSpec
from kvpack.store import Budget, CutWriter, NotStoredError, ObjectStore, WriterTools
from kvpack.store.grid import SealedGrid, completed_tiles
from node.serving.ladder.capture import Capture, batches, read_tiles
from node.serving.ladder.line import TOKEN_PIECES_MAX
from node.serving.ladder.pace import Pace
from node.serving.ladder.resident import Resident

if TYPE_CHECKING:
    from kvpack.chunk import SealContext

#: What a chunk takes beside its plaintext at most, its line in the manifest included.
_CHUNK_OVERHEAD_BYTES: Final = 2048
_REFERENCE_BYTES: Final = 192

#: A writer that nobody renews for so long died.
_INTENT_S: Final = 900
_PAUSE_S: Final = 0.02
_PAUSES_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Written:
    """What came of it.

    Attributes:
        cut_id: The cut.
        references: All of its chunks, in order.
        written_bytes: Plaintext of those that were sealed for it.
        shared: How many were there already.
    """

    cut_id: bytes
    references: tuple[ChunkReference, ...]
    written_bytes: int
    shared: int


def tools(budget: Budget) -> WriterTools:
    """What a writer of the store may not draw by itself."""
    return WriterTools(
        secrets.token_bytes(16), time.time, lambda: time.sleep(_PAUSE_S), budget, _INTENT_S,
        _PAUSES_MAX,
    )  # fmt: skip


class CutWriting:
    """Writes one capture. ``run`` is called once.

    Args:
        store: Where to.
        resident: Gets the plaintext of what is sealed.
        pace: How hard to work.
        budget: What the store may take.
        capture: The cut.
    """

    def __init__(
        self, store: ObjectStore, resident: Resident, pace: Pace, budget: Budget, capture: Capture
    ) -> None:
        self._resident = resident
        self._pace = pace
        self._capture = capture
        self._binding = capture.line.binding
        self._written_bytes = 0
        self._grid = SealedGrid(self._binding.layout, capture.line.sealed.blocks)
        self._new: list[ChunkReference] = []
        self._writer = CutWriter(
            store, Keyring([self._binding.key]), self._binding.header_bytes, tools(budget)
        )

    async def run(self) -> Written:
        """Write the cut; durable on return.

        Raises:
            StoreFullError: There is no room. Nothing of it stays behind.
            NotStoredError: What it was to refer to is gone, or was never copied.
            TornGenerationError: Its rows cannot be read any more.
            KvpackError: The store refuses.
        """
        pace, writer = self._pace, self._writer
        try:
            whole = self._missing_blocks()
            await pace.off_loop(writer.reserve, self._needed_bytes(whole))
            for reference in await self._seal(whole):
                self._grid.add(reference)
            needed = self._grid.cut(self._capture.position)
            await self._seal(needed.to_seal)
            rest = await pace.off_loop(self._add_rest)
            rows = [*needed.references, *self._of_tiles(needed.to_seal)]
            references = (*rest, *rows)
            cut_id = await pace.off_loop(self._publish, references)
        except BaseException as error:
            await pace.off_loop(writer.__exit__, type(error), error, None)
            raise
        new = set(self._new)
        shared = sum(reference.untrimmed() not in new for reference in references)
        return Written(cut_id, references, self._written_bytes, shared)

    def _missing_blocks(self) -> list[TileSpec]:
        """Whole blocks that no chunk holds yet, and that can still be read as a whole."""
        capture, layout = self._capture, self._binding.layout
        full = [
            spec
            for spec in completed_tiles(layout, capture.line.sealed.position, capture.position)
            if spec.kind is LayerKind.FULL
        ]
        held = {(ref.layers, ref.first_position) for ref in capture.line.sealed.blocks}
        whole = [spec for spec in (*full, *capture.rings) if _is_whole(spec)]
        return [spec for spec in whole if (spec.layers, spec.first_position) not in held]

    def _needed_bytes(self, whole: Sequence[TileSpec]) -> int:
        """Room for all that may have to be written: an estimate from above."""
        capture, layout = self._capture, self._binding.layout
        tails = [spec for spec in capture.rings if not _is_whole(spec)]
        rows = sum(spec.data_bytes(layout) for spec in (*whole, *tails))
        full = layout.layers_of(LayerKind.FULL)
        full_tail = GRID_TOKENS * sum(layout.row_bytes(layer) for layer in full)
        states = sum(map(len, capture.states.values()))
        chunks = len(whole) + len(tails) + len(layout.layers) + 8
        manifest = _REFERENCE_BYTES * (len(capture.line.sealed.blocks) + chunks)
        return (
            rows + full_tail + states + 4 * capture.position
            + _CHUNK_OVERHEAD_BYTES * chunks + manifest
        )  # fmt: skip

    async def _seal(self, specs: Sequence[TileSpec]) -> list[ChunkReference]:
        """Read, seal and store tiles, some at a time."""
        sealed: list[ChunkReference] = []
        for batch in batches(specs, self._capture.line):
            tiles = await self._tiles(batch)
            sealed += await self._pace.off_loop(self._add_tiles, tiles)
        return sealed

    async def _tiles(self, specs: Sequence[TileSpec]) -> dict[TileSpec, Tile]:
        capture = self._capture
        tiles = {spec: capture.rings[spec] for spec in specs if spec in capture.rings}
        rest = [spec for spec in specs if spec not in tiles]
        for spec in rest:
            if spec.kind is not LayerKind.FULL:
                raise NotStoredError(f"rows {spec.first_position} of a ring")
        if rest:
            tiles.update(await self._pace.on_engine(read_tiles, capture.generation, rest))
        return tiles

    def _add_tiles(self, tiles: Mapping[TileSpec, Tile]) -> list[ChunkReference]:
        chunks = []
        for tile in tiles.values():
            chunk = seal_tile(self._binding.context, tile)
            self._resident.put(chunk.reference.seal_id, tile.data)
            chunks.append(chunk)
        return self._add(chunks)

    def _add(self, chunks: Sequence[SealedChunk]) -> list[ChunkReference]:
        references = list(self._writer.add(chunks))
        self._written_bytes += sum(reference.plain_bytes for reference in references)
        self._new += references
        return references

    def _add_rest(self) -> list[ChunkReference]:
        """Rely on what is there; add token ids and states. Token ids come first, in order."""
        capture, sealed = self._capture, self._capture.line.sealed
        known = list(sealed.token_pieces)
        if len(known) >= TOKEN_PIECES_MAX:
            known = []
        reached = sum(piece.token_count for piece in known)
        old = [*known, *self._shared_blocks()]
        if old:
            self._writer.rely(old)
        context = self._binding.context
        chunks = seal_token_ids(context, capture.token_ids[reached:], reached)
        chunks += list(_state_chunks(context, capture))
        return [*known, *self._add(chunks)]

    def _shared_blocks(self) -> list[ChunkReference]:
        new = {reference.seal_id for reference in self._new}
        references = self._grid.cut(self._capture.position).references
        return [ref for ref in references if ref.seal_id not in new]

    def _of_tiles(self, specs: Sequence[TileSpec]) -> list[ChunkReference]:
        wanted = set(specs)
        return [ref for ref in self._new if ref.has_rows and ref.tile_spec() in wanted]

    def _publish(self, references: tuple[ChunkReference, ...]) -> bytes:
        capture, binding = self._capture, self._binding
        manifest = Manifest(
            producer=Producer.ENGINE,
            position=capture.position,
            numerics=binding.stated(mixed=capture.generation.is_mixed),
            schedule=capture.schedule,
            references=references,
            components=(Component(ComponentKind.TARGET, binding.context.identity_digest),),
        )
        ids = capture.token_ids if capture.indexed else None
        cut_id = self._writer.publish(manifest, capture.line.lineage, capture.kind, ids)
        self._writer.close()
        return cut_id


def _is_whole(spec: TileSpec) -> bool:
    return spec.token_count == GRID_TOKENS


def _state_chunks(context: SealContext, capture: Capture) -> Iterator[SealedChunk]:
    for chunk_class in (ChunkClass.SESSION, ChunkClass.SAMPLER):
        data = capture.states.get(chunk_class)
        if data is not None:
            yield seal_component(context, chunk_class, capture.position, 0, data)
