"""One session's rows as torch keeps them: calls in, tiles and logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from engine import ContextLimitError, Logits, RowsNotLiveError
from kvpack.errors import LimitError
from kvpack.identity import CallSchedule
from kvpack.layout import CacheLayout, LayerKind, Producer
from kvpack.limits import GRID_TOKENS
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec, cut_tile_specs, tile_specs
from node.produce.failures import guarded

if TYPE_CHECKING:
    from node.produce.network import HostRows, Network

_T = TypeVar("_T")


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
        self._rows = guarded(network.new_rows, "a new session's rows", network.tidy)
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
            MemoryLackingError: There is too little memory. Nothing changed.
            BackendFailedError: The call failed. Nothing changed.
        """
        network = self._network

        def compute() -> None:
            network.compute(token_ids, self._rows)
            if network.device.type == "cuda":
                made = self._made(self.position, self.position + len(token_ids))
                self._leaving = {spec: self._rows.to_host(spec) for spec in made}
            network.finish()

        self._call(token_ids, compute)

    def step(self, token_id: int) -> Logits:
        """Append one token by a single-token call and return the logits after it.

        Raises:
            LimitError: The id is outside the vocabulary.
            ContextLimitError: The context is full. Nothing changed.
            MemoryLackingError: There is too little memory. Nothing changed.
            BackendFailedError: The call failed, or its logits did. Nothing changed.
        """
        network = self._network

        def compute() -> bytes:
            return network.logits(network.compute([token_id], self._rows))

        return Logits(self.layout.encoding, self._call([token_id], compute))

    def read_tile(self, spec: TileSpec) -> Tile:
        """As :meth:`read_tiles`, of one."""
        return self.read_tiles([spec])[0]

    def read_tiles(self, specs: Sequence[TileSpec]) -> list[Tile]:
        """Copy the rows of ``specs`` to the host; later calls do not change the copies.

        Raises:
            LayoutMismatchError: One names a layer that does not exist or is of another kind.
            RowsNotLiveError: A row was overwritten or is not computed yet.
            MemoryLackingError: There is too little memory on the host.
            BackendFailedError: Copying failed.
        """
        for spec in specs:
            spec.data_bytes(self.layout)
            self._require_live(spec)

        def copy() -> list[Tile]:
            # All of them are under way before the first is waited for.
            leaving = [
                self._leaving.pop(spec) if spec in self._leaving else self._rows.to_host(spec)
                for spec in specs
            ]
            return [Tile(spec, rows.take()) for spec, rows in zip(specs, leaving, strict=True)]

        return guarded(copy, f"rows of {len(specs)} tiles", self._give_up)

    def snapshot(self, token_ids: Sequence[int]) -> SessionCacheSnapshot:
        """The whole cut at :attr:`position`; ``token_ids`` are the tokens that led there.

        Raises:
            LayoutMismatchError: Not exactly :attr:`position` ids.
        """
        tiles = tuple(self.read_tiles(cut_tile_specs(self.layout, self.position)))
        return SessionCacheSnapshot(
            self.layout, Producer.ENGINE, self.position, tuple(token_ids), tiles
        )

    def _call(self, token_ids: Sequence[int], compute: Callable[[], _T]) -> _T:
        """One call, as a whole or not at all: rows count only once all that it gives is there."""
        if not token_ids:
            raise LimitError("token_ids", "at least one token", "none")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise LimitError("token_ids", f"ids of 0 to {self._vocab_size - 1}", "an id outside")
        first, count = self.position, len(token_ids)
        limit = self.layout.max_context_tokens
        if first + count > limit:
            raise ContextLimitError(limit, first + count)
        schedule = self._schedule.after_call(count)
        self._leaving = {}
        doing = f"a call of {count} token{'s' * (count > 1)} at position {first:,}"
        found = guarded(compute, doing, self._give_up)
        self._rows.end(count)
        self._schedule = schedule
        return found

    def _give_up(self) -> None:
        self._leaving = {}
        self._network.give_up(self._rows)

    def _made(self, first: int, last: int) -> list[TileSpec]:
        """Tiles of whole blocks of full layers that a call for ``[first, last)`` fills."""
        begin, end = (at - at % GRID_TOKENS for at in (first, last))
        return list(tile_specs(self.layout, LayerKind.FULL, begin, end))

    def _require_live(self, spec: TileSpec) -> None:
        for layer in spec.layers:
            live = (self.layout.layers[layer].first_row(self.position), self.position)
            asked = (spec.first_position, spec.end_position)
            if asked[0] < live[0] or asked[1] > live[1]:
                raise RowsNotLiveError(layer, live, asked)
