"""What one transfer sends, in order: a list that both ends count in the same way.

The target takes objects in the order in which they were sent, so what it holds of a transfer is
always a first part of this list, and its length says all: after a cut the source goes on from
there. Items are descriptions; rows are read again when they are sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from kvpack import limits
from kvpack.chunk import ChunkClass
from kvpack.layout import CacheLayout, LayerKind
from kvpack.snapshot import TileSpec, cut_tile_specs, tile_specs


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token ids ``[first, first + count)``: one TOKEN_IDS chunk."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class StateAt:
    """The SESSION or SAMPLER chunk of a cut."""

    position: int
    chunk_class: ChunkClass


Item = TileSpec | TokenRange | StateAt

#: So many tokens later a block that :meth:`Tape.settled` gives is still one of the window.
SETTLED_TOKENS: Final = 64


class Tape:
    """The items of one transfer. Grows at its end only, until the cut is known.

    Attributes:
        layout: Shape of the rows.
        items: One chunk each, in the order sent.
        cut: Tokens of the cut; None while a live session grows.
        cut_index: How many items may be sent before the target knows the cut.
        growing: Whether the target has to be told the cut within the stream.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.items: list[Item] = []
        self.cut: int | None = None
        self.cut_index = 0
        self.growing = True
        self._full_rows = 0

    @classmethod
    def known(cls, layout: CacheLayout, cut: int) -> Tape:
        """The tape of a cut whose position is known from the start.

        A row of a sliding window that the cut will hold is still in the ring at every position up
        to the cut, so every tile leaves as soon as its rows are computed.
        """
        tape = cls(layout)
        tape.growing = False
        tape.close(cut)
        return tape

    def grow(self, position: int) -> None:
        """Rows up to ``position`` exist: append what of the full layers is whole and final.

        Raises:
            RuntimeError: The cut is known already.
        """
        if self.cut is not None:
            raise RuntimeError("a closed tape does not grow")
        whole = position - position % limits.GRID_TOKENS
        if whole > self._full_rows:
            self.items += tile_specs(self.layout, LayerKind.FULL, self._full_rows, whole)
            self._full_rows = whole

    def close(self, cut: int, ready: Collection[TileSpec] = ()) -> tuple[TileSpec, ...]:
        """Fix the cut: append token ids, session state, and all rows that are not on the tape yet.

        Args:
            cut: Tokens of the cut.
            ready: Rows that need not be read and sealed any more.

        Returns:
            Those of ``ready`` that the cut has, but for what has to be read all the same. They
            leave first of all, while the others are read.

        Raises:
            RuntimeError: The cut is known already, or lies before rows that are on the tape.
        """
        if self.cut is not None or cut < self._full_rows:
            raise RuntimeError(f"cannot close a tape of {self._full_rows} rows at {cut}")
        self.cut, self.cut_index = cut, len(self.items)
        sent = set(self.items)
        rest = [spec for spec in cut_tile_specs(self.layout, cut) if spec not in sent]
        rest.sort(key=lambda spec: spec.end_position)
        ahead = tuple(s for s in rest if s in ready and not self.overwritten_next(s))
        self.items += ahead
        self.items += _token_ranges(cut)
        self.items += (StateAt(cut, ChunkClass.SESSION), StateAt(cut, ChunkClass.SAMPLER))
        first = frozenset(ahead)
        self.items += [spec for spec in rest if spec not in first]
        return ahead

    def settled(self, position: int) -> tuple[TileSpec, ...]:
        """Whole blocks of the windows at ``position`` that a cut soon after has as they are."""
        shapes = [shape for shape in self.layout.layers if shape.kind is LayerKind.SWA]
        later = position + SETTLED_TOKENS
        first = min((shape.first_row(later) for shape in shapes), default=position)
        found = tile_specs(self.layout, LayerKind.SWA, first - first % limits.GRID_TOKENS, position)
        return tuple(
            spec
            for spec in found
            if spec.token_count == limits.GRID_TOKENS
            and spec.first_position >= self.layout.layers[spec.layers[0]].first_row(later)
        )

    def rows_needed(self, index: int) -> int:
        """Rows that must be computed before item ``index`` can be read."""
        item = self.items[index]
        return item.end_position if isinstance(item, TileSpec) else 0

    def arrange_rest(self, rows: int) -> tuple[TileSpec, ...]:
        """Order the tiles that wait for more than ``rows`` rows by the last of their layers.

        They become whole in one call, one layer after the other. None of them was read yet, so
        what a target has of the list is what it was.
        """
        first = len(self.items)
        while first and self.rows_needed(first - 1) > rows:
            first -= 1
        rest = [item for item in self.items[first:] if isinstance(item, TileSpec)]
        rest.sort(key=lambda spec: (max(spec.layers), spec.end_position))
        self.items[first:] = rest
        return tuple(rest)

    def needs_cut(self, index: int) -> bool:
        """Whether the target must know the cut before it is sent item ``index``."""
        return self.growing and self.cut is not None and index >= self.cut_index

    def state_bytes(self, kind: LayerKind) -> int:
        """Plaintext K/V bytes of all layers of ``kind`` at the cut; so far, if it grows."""
        position = self._full_rows if self.cut is None else self.cut
        return self.layout.state_bytes(kind, position)

    def overwritten_next(self, item: Item) -> bool:
        """Whether the boundary call overwrites a row of ``item``: the oldest one of its ring."""
        if not isinstance(item, TileSpec) or item.kind is not LayerKind.SWA or self.cut is None:
            return False
        oldest = min(self.layout.layers[layer].first_row(self.cut) for layer in item.layers)
        window = max(self.layout.layers[layer].window_tokens or 0 for layer in item.layers)
        return self.cut >= window and item.first_position <= oldest


def _token_ranges(cut: int) -> Sequence[TokenRange]:
    most = limits.TOKEN_IDS_PER_CHUNK
    return [TokenRange(first, min(most, cut - first)) for first in range(0, cut, most)]
