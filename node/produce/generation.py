"""One session's rows as torch keeps them: calls in, tiles and logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine import ContextLimitError, Logits, RowsNotLiveError
from kvpack.errors import LimitError
from kvpack.identity import CallSchedule
from kvpack.layout import CacheLayout, LayerKind, Producer
from kvpack.limits import GRID_TOKENS
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec, cut_tile_specs, tile_specs

if TYPE_CHECKING:
    from node.produce.network import HostRows, Network


class TorchGeneration:
    """Stands in for :class:`engine.Generation`.

    Whole blocks of full layers begin to leave the device as soon as a prefill call made them: they
    are what a transfer asks for next.
    """

    #: All rows are computed here; nothing was ever installed.
    is_mixed = False

    def __init__(self, network: Network, vocab_size: int) -> None:
        self._network = network
        self._vocab_size = vocab_size
        self._rows = network.new_rows()
        self._schedule = CallSchedule()
        self._leaving: dict[TileSpec, HostRows] = {}

    @property
    def position(self) -> int:
        """Tokens that the state stands for."""
        return self._rows.position

    @property
    def schedule(self) -> CallSchedule:
        """The calls that computed the rows."""
        return self._schedule

    @property
    def layout(self) -> CacheLayout:
        """Shape of the rows."""
        return self._network.layout

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Append the rows of ``token_ids`` by one forward call; computed on return.

        Raises:
            LimitError: No token, or an id outside the vocabulary.
            ContextLimitError: The context would overflow. Nothing changed.
        """
        first = self.position
        self._call(token_ids)
        if self._network.device.type == "cuda":
            self._leaving = {spec: self._rows.to_host(spec) for spec in self._made(first)}
        self._network.finish()

    def step(self, token_id: int) -> Logits:
        """Append one token by a single-token call and return the logits after it.

        Raises:
            LimitError: The id is outside the vocabulary.
            ContextLimitError: The context is full. Nothing changed.
        """
        activations = self._call([token_id])
        return Logits(self.layout.encoding, self._network.logits(activations))

    def read_tile(self, spec: TileSpec) -> Tile:
        """As :meth:`read_tiles`, of one."""
        return self.read_tiles([spec])[0]

    def read_tiles(self, specs: Sequence[TileSpec]) -> list[Tile]:
        """Copy the rows of ``specs`` to the host; later calls do not change the copies.

        Raises:
            LayoutMismatchError: One names a layer that does not exist or is of another kind.
            RowsNotLiveError: A row was overwritten or is not computed yet.
        """
        for spec in specs:
            spec.data_bytes(self.layout)
            self._require_live(spec)
        # All of them are under way before the first is waited for.
        leaving = [
            self._leaving.pop(spec) if spec in self._leaving else self._rows.to_host(spec)
            for spec in specs
        ]
        return [Tile(spec, rows.take()) for spec, rows in zip(specs, leaving, strict=True)]

    def snapshot(self, token_ids: Sequence[int]) -> SessionCacheSnapshot:
        """The whole cut at :attr:`position`; ``token_ids`` are the tokens that led there.

        Raises:
            LayoutMismatchError: Not exactly :attr:`position` ids.
        """
        tiles = tuple(self.read_tiles(cut_tile_specs(self.layout, self.position)))
        return SessionCacheSnapshot(
            self.layout, Producer.ENGINE, self.position, tuple(token_ids), tiles
        )

    def _call(self, token_ids: Sequence[int]) -> object:
        if not token_ids:
            raise LimitError("token_ids", "at least one token", "none")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise LimitError("token_ids", f"ids of 0 to {self._vocab_size - 1}", "an id outside")
        limit = self.layout.max_context_tokens
        if self.position + len(token_ids) > limit:
            raise ContextLimitError(limit, self.position + len(token_ids))
        schedule = self._schedule.after_call(len(token_ids))
        self._leaving.clear()
        activations: object = self._network.compute(token_ids, self._rows)
        self._schedule = schedule
        return activations

    def _made(self, first: int) -> list[TileSpec]:
        """Tiles of whole blocks of full layers that the call from ``first`` on has filled."""
        begin, end = (at - at % GRID_TOKENS for at in (first, self.position))
        return list(tile_specs(self.layout, LayerKind.FULL, begin, end))

    def _require_live(self, spec: TileSpec) -> None:
        for layer in spec.layers:
            live = (self.layout.layers[layer].first_row(self.position), self.position)
            asked = (spec.first_position, spec.end_position)
            if asked[0] < live[0] or asked[1] > live[1]:
                raise RowsNotLiveError(layer, live, asked)
