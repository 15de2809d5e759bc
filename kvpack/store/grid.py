"""Which chunks a cut needs, when whole blocks of the grid were sealed while they were live.

A session seals each 256-token block once, when its last row is computed and all of them can still
be read. At a cut the window is a list of references into those blocks, the first one trimmed; only
what lies in no whole block is sealed for this cut alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvpack import limits
from kvpack.chunk import ChunkReference
from kvpack.chunk.reference import chunk_class_of
from kvpack.codes import ChunkClass
from kvpack.errors import LayoutMismatchError
from kvpack.layout import CacheLayout, LayerKind
from kvpack.snapshot import TileSpec, cut_tile_specs, tile_specs

_Block = tuple[ChunkClass, tuple[int, ...], int]


def completed_tiles(layout: CacheLayout, before: int, after: int) -> Iterator[TileSpec]:
    """Whole blocks that growing from ``before`` to ``after`` tokens completed and left readable.

    A sliding window no longer holds a block whose first row has left it; such a block is sealed in
    parts, by the cuts that need it.
    """
    first = before // limits.GRID_TOKENS * limits.GRID_TOKENS
    end = after // limits.GRID_TOKENS * limits.GRID_TOKENS
    for kind in (LayerKind.FULL, LayerKind.SWA):
        for spec in tile_specs(layout, kind, first, end):
            live_from = layout.layers[spec.layers[0]].first_row(after)
            if spec.token_count == limits.GRID_TOKENS and spec.first_position >= live_from:
                yield spec


@dataclass(frozen=True, slots=True)
class CutTiles:
    """What one cut needs.

    Attributes:
        references: Chunks that are sealed already, trimmed where the window begins inside one.
        to_seal: Tiles of which no whole block was sealed: a tail, or the head of a small window.
    """

    references: tuple[ChunkReference, ...]
    to_seal: tuple[TileSpec, ...]


class SealedGrid:
    """The whole blocks of one session that were sealed so far.

    Args:
        layout: The session's.
        references: What is sealed already, such as those of the cut that it was restored from.
            Those that are no whole block of rows are left out.
    """

    def __init__(self, layout: CacheLayout, references: Iterable[ChunkReference] = ()) -> None:
        self._layout = layout
        self._blocks: dict[_Block, ChunkReference] = {}
        for reference in references:
            if reference.has_rows and reference.token_count == limits.GRID_TOKENS:
                self.add(reference.untrimmed())

    def add(self, reference: ChunkReference) -> None:
        """Remember a whole block.

        Raises:
            LayoutMismatchError: It is not one.
        """
        if reference.token_count != limits.GRID_TOKENS:
            raise LayoutMismatchError("grid.token_count", limits.GRID_TOKENS, reference.token_count)
        name = (reference.chunk_class, reference.layers, reference.first_position)
        self._blocks[name] = reference

    def cut(self, position: int) -> CutTiles:
        """What a cut after ``position`` tokens needs: each row exactly once."""
        references: list[ChunkReference] = []
        to_seal: list[TileSpec] = []
        for spec in cut_tile_specs(self._layout, position):
            block = spec.first_position // limits.GRID_TOKENS * limits.GRID_TOKENS
            whole = self._blocks.get((chunk_class_of(spec.kind), spec.layers, block))
            if whole is None:
                to_seal.append(spec)
            else:
                references.append(trimmed(whole, spec))
        return CutTiles(tuple(references), tuple(to_seal))


def trimmed(whole: ChunkReference, used: TileSpec) -> ChunkReference:
    """``whole``, of which only the rows of ``used`` count.

    Raises:
        LayoutMismatchError: It does not hold them.
        FormatError: Only whole blocks of a sliding window can be trimmed.
    """
    if used == whole.tile_spec():
        return whole
    first = used.first_position - whole.first_position
    if used.layers != whole.layers or not 0 <= first < limits.GRID_TOKENS:
        raise LayoutMismatchError("grid.used", whole.tile_spec(), used)
    return dataclasses.replace(whole, first_used=first, count_used=used.token_count)
