"""What of one growing text is sealed, and what its next cut has to copy at once.

Rows of full layers below a cut never change, so they are read later. A ring's rows do change, so a
cut copies those that no chunk holds yet: whole blocks of the grid that are still live as a whole,
once each, and what lies in no such block. Cuts that wait count as sealed here; should one fail, the
line begins anew, and the next cut copies and seals everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpack.chunk import ChunkClass, ChunkReference
from kvpack.layout import LayerKind
from kvpack.limits import GRID_TOKENS
from kvpack.snapshot import TileSpec, cut_tile_specs
from kvpack.store.grid import SealedGrid, completed_tiles

if TYPE_CHECKING:
    from kvpack.layout import CacheLayout
    from node.binding import PackBinding

#: A text of many turns has its token ids in as many pieces, all of which a lookup reads. Beyond so
#: many they are sealed as one again.
TOKEN_PIECES_MAX: Final = 32

_Block = tuple[tuple[int, ...], int]


class CutGrid(SealedGrid):
    """The whole blocks of a cut that rows were restored from, and the pieces of its token ids."""

    def __init__(
        self,
        layout: CacheLayout,
        cut_id: bytes,
        position: int,
        references: Sequence[ChunkReference],
    ) -> None:
        super().__init__(layout, references)
        self.cut_id = cut_id
        self.sealed = Sealed.of(position, references)


def _may_be_used_again(reference: ChunkReference) -> bool:
    whole = reference.has_rows and reference.token_count == GRID_TOKENS
    return whole or reference.chunk_class is ChunkClass.TOKEN_IDS


@dataclass(frozen=True, slots=True, repr=False)
class Sealed:
    """Chunks that cuts to come may refer to.

    Attributes:
        position: Of the cut that they were sealed for, or restored from; 0: nothing is.
        blocks: Whole blocks of rows.
        token_pieces: Token ids from 0 to ``position``, in order.
    """

    position: int = 0
    blocks: tuple[ChunkReference, ...] = ()
    token_pieces: tuple[ChunkReference, ...] = ()

    @classmethod
    def of(cls, position: int, references: Iterable[ChunkReference]) -> Sealed:
        """What of a cut's references can be used again."""
        kept = [ref.untrimmed() for ref in references if _may_be_used_again(ref)]
        rows = tuple(ref for ref in kept if ref.has_rows)
        return cls(position, rows, tuple(ref for ref in kept if not ref.has_rows))


class Line:
    """One growing text.

    Attributes:
        binding: What its chunks are sealed for.
        lineage: 16 bytes: whose cuts these are.
        sealed: What lies in the store.
        version: Raised whenever that was given up: what was copied by then may be too little.
        cut_position: Of the newest cut, waiting ones included.
        cut_id: Of the newest cut that lies in the store; empty: there is none.
    """

    def __init__(
        self, binding: PackBinding, lineage: bytes, sealed: Sealed, cut_id: bytes = b""
    ) -> None:
        self.binding = binding
        self.lineage = lineage
        self.sealed = sealed
        self.version = 0
        self.cut_position = sealed.position
        self.cut_id = cut_id
        self._planned_to = sealed.position
        self._planned = _ring_blocks(sealed.blocks)

    @property
    def layout(self) -> CacheLayout:
        """Shape of its rows."""
        return self.binding.layout

    def plan(self, position: int) -> tuple[TileSpec, ...]:
        """The tiles of rings that a cut at ``position`` copies now, and counts as sealed."""
        whole = [
            spec
            for spec in completed_tiles(self.layout, self._planned_to, position)
            if spec.kind is LayerKind.SWA and _block(spec) not in self._planned
        ]
        window = [s for s in cut_tile_specs(self.layout, position) if s.kind is LayerKind.SWA]
        live = {_block(spec) for spec in window}
        # What left every window is of no use to a later cut.
        self._planned = {*(block for block in self._planned if block in live), *map(_block, whole)}
        self._planned_to = self.cut_position = position
        rest = [spec for spec in window if _block(spec) not in self._planned]
        return (*whole, *rest)

    def is_planned(self, position: int) -> bool:
        """Whether a cut lies, or waits, at ``position`` already."""
        return 0 < position == self.cut_position

    def published(self, cut_id: bytes, position: int, references: Sequence[ChunkReference]) -> None:
        """A cut of these references lies in the store; blocks that left a window are let go of."""
        self.cut_id = cut_id
        self.sealed = Sealed.of(position, references)

    def give_up(self) -> None:
        """Something of it was not kept, or is gone: nothing counts as sealed any more."""
        self.version += 1
        self.sealed = Sealed()
        self.cut_position = self._planned_to = 0
        self._planned = set()


def _ring_blocks(blocks: Iterable[ChunkReference]) -> set[_Block]:
    return {(ref.layers, ref.first_position) for ref in blocks if ref.chunk_class is ChunkClass.SWA}


def _block(spec: TileSpec) -> _Block:
    return spec.layers, spec.first_position // GRID_TOKENS * GRID_TOKENS
