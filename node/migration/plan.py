"""When which tile of a cut may leave: as soon as its rows are final. A function of the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpack.layout import CacheLayout, LayerKind
from kvpack.snapshot import TileSpec, cut_tile_specs


@dataclass(frozen=True, slots=True)
class CutPlan:
    """The tiles of one cut in the order in which they become final.

    The cut is known from the start, so this holds for both kinds: full rows never change, and a row
    of a sliding window that the cut will hold is still in the ring at every position up to the cut.

    Attributes:
        layout: Shape of the rows.
        position: The cut, in tokens.
        specs: All tiles, by the position at which they are complete.
    """

    layout: CacheLayout
    position: int
    specs: tuple[TileSpec, ...]

    @classmethod
    def of(cls, layout: CacheLayout, position: int) -> CutPlan:
        """The plan for a cut after ``position`` tokens."""
        specs = cut_tile_specs(layout, position)
        return cls(layout, position, tuple(sorted(specs, key=lambda spec: spec.end_position)))

    def between(self, before: int, after: int) -> Sequence[TileSpec]:
        """Tiles that become complete when rows ``[before, after)`` are computed."""
        return [spec for spec in self.specs if before < spec.end_position <= after]

    @property
    def nope_bytes(self) -> int:
        """Plaintext K/V bytes of all full layers."""
        return self.layout.state_bytes(LayerKind.FULL, self.position)

    @property
    def swa_bytes(self) -> int:
        """Plaintext K/V bytes of all windows."""
        return self.layout.state_bytes(LayerKind.SWA, self.position)
