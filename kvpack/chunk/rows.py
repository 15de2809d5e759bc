"""Sealing the rows of one model with one codec: what a save and a transfer do tile by tile.

The codec is asked for once per link or store (:func:`kvpack.compression.choose_codec`), and never
for token ids or payloads: they are less than a thousandth of a pack.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvpack.chunk.open import OpenedChunk, tile_of
from kvpack.chunk.seal import SealContext, SealedChunk, seal_draft_tile, seal_tile
from kvpack.codes import Codec
from kvpack.layout import CacheLayout
from kvpack.snapshot import Tile


@dataclass(frozen=True, slots=True)
class RowSealer:
    """Seals tiles of one model.

    Attributes:
        context: What the chunks are bound to: the target's, or the draft's.
        layout: The shape of the rows; the codec needs the size of an element.
        codec: For rows. A chunk that saves less than 3 % is sealed raw all the same.
    """

    context: SealContext
    layout: CacheLayout
    codec: Codec = Codec.RAW

    def seal(self, tile: Tile) -> SealedChunk:
        """Seal rows of the target.

        Raises:
            LimitError: The tile is larger than a chunk may be.
        """
        size = self.layout.encoding.element_bytes
        return seal_tile(self.context, tile, self.codec, element_bytes=size)

    def seal_draft(self, tile: Tile) -> SealedChunk:
        """Seal rows of a draft model; ``context`` and ``layout`` are then the draft's.

        Raises:
            LimitError: The tile is larger than a chunk may be.
        """
        size = self.layout.encoding.element_bytes
        return seal_draft_tile(self.context, tile, self.codec, element_bytes=size)

    def again(self, opened: OpenedChunk) -> SealedChunk:
        """The rows of an opened chunk with this codec, under the cipher that it had.

        Its content id stays, its seal id and key are others unless it comes out as it was.

        Raises:
            FormatError: It holds no rows. LayoutMismatchError: rows of another shape.
        """
        tile = tile_of(self.layout, opened)
        context = dataclasses.replace(self.context, aead=opened.reference.aead)
        sealer = dataclasses.replace(self, context=context)
        return sealer.seal_draft(tile) if opened.reference.has_draft_rows else sealer.seal(tile)
