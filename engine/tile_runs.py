"""Tiles that lie one behind the other in the same planes, to be gathered at once.

Every operation on a GPU costs about as much as copying some hundred kilobytes, and a tile has two
planes for each of its layers. Neighbouring grid blocks of one layer group are therefore one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpack.layout import CacheLayout
from kvpack.snapshot import TileSpec


@dataclass(frozen=True, slots=True)
class TileRun:
    """Tiles of the same layers and as many tokens each, without a gap between them.

    Attributes:
        layers: Of every tile.
        first_position: Of the first tile.
        block_tokens: Tokens of each tile.
        tile_bytes: Bytes of each tile.
        indices: Where the tiles stand in what was asked for, by position.
    """

    layers: tuple[int, ...]
    first_position: int
    block_tokens: int
    tile_bytes: int
    indices: tuple[int, ...]

    @property
    def token_count(self) -> int:
        """Tokens of all its tiles."""
        return self.block_tokens * len(self.indices)


def tile_runs(layout: CacheLayout, specs: Sequence[TileSpec], most_bytes: int) -> list[TileRun]:
    """``specs`` as runs of at most ``most_bytes``, or of one tile where that is larger already.

    Raises:
        LayoutMismatchError: A spec names a layer that does not exist or is of another kind.
    """
    runs: list[TileRun] = []
    last: dict[tuple[tuple[int, ...], int], int] = {}
    for index, spec in enumerate(specs):
        tile_bytes = spec.data_bytes(layout)
        key = (spec.layers, spec.token_count)
        at = last.get(key)
        if at is not None:
            run = runs[at]
            follows = run.first_position + run.token_count == spec.first_position
            if follows and (len(run.indices) + 1) * tile_bytes <= most_bytes:
                indices = (*run.indices, index)
                runs[at] = TileRun(
                    run.layers, run.first_position, run.block_tokens, tile_bytes, indices
                )
                continue
        last[key] = len(runs)
        runs.append(
            TileRun(spec.layers, spec.first_position, spec.token_count, tile_bytes, (index,))
        )
    return runs
