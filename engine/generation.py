"""One session's live cache: forward calls in, rows and logits out.

A generation is a value that grows. Nothing that happens to another one changes a byte of it; a
restore builds a new one and the owner swaps the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from engine.cache import PlaneCache
from engine.dtypes import encoding_of, host_bytes
from engine.errors import ContextLimitError, TornGenerationError
from engine.logits import Logits
from engine.origins import PlaneLayout
from engine.planes import Plane, PlaneShape
from kvpack.errors import LimitError
from kvpack.identity import CallSchedule
from kvpack.layout import CacheLayout, Producer
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec, cut_tile_specs


class Network(Protocol):
    """What a generation needs of a model."""

    @property
    def layout(self) -> CacheLayout:
        """Shape of the cache, layer by layer."""

    @property
    def plane_layout(self) -> PlaneLayout:
        """Axis order of the planes."""

    @property
    def vocab_size(self) -> int:
        """Number of logits; token ids are below it."""

    def forward(self, token_ids: mx.array, caches: Sequence[PlaneCache]) -> mx.array:
        """Logits ``[1, count, vocab_size]`` for ``token_ids`` ``[1, count]``; lazy."""


def empty_planes(network: Network) -> list[Plane]:
    """One plane per layer, without rows."""
    layers = range(len(network.layout.layers))
    return [Plane(PlaneShape.of(network.layout, i, network.plane_layout)) for i in layers]


class Generation:
    """The cache of one session and the position it stands at."""

    __slots__ = ("_caches", "_network", "_position", "_schedule", "_torn")

    def __init__(
        self, network: Network, planes: Sequence[Plane], schedule: CallSchedule | None = None
    ) -> None:
        """Take over ``planes``, which stand at ``schedule.position``."""
        layers = network.layout.layers
        self._network = network
        self._caches = [
            PlaneCache(plane, layer.window_tokens)
            for plane, layer in zip(planes, layers, strict=True)
        ]
        self._schedule = schedule or CallSchedule()
        self._position = self._schedule.position
        self._torn = False

    @property
    def position(self) -> int:
        """Tokens that the state stands for; also the position computed next."""
        return self._position

    @property
    def schedule(self) -> CallSchedule:
        """The forward calls that computed the rows."""
        return self._schedule

    @property
    def layout(self) -> CacheLayout:
        """Shape of the cache, layer by layer."""
        return self._network.layout

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Append the rows of ``token_ids`` by one forward call; evaluated on return.

        Raises:
            LimitError: No token, or an id outside the vocabulary.
            ContextLimitError: The context would overflow. Nothing changed.
            TornGenerationError: An earlier call stopped half way.
        """
        self._call(token_ids, keep_logits=False)

    def step(self, token_id: int) -> Logits:
        """Append one token by a single-token call and return the logits after it.

        Raises:
            LimitError: The id is outside the vocabulary.
            ContextLimitError: The context is full. Nothing changed.
            TornGenerationError: An earlier call stopped half way.
        """
        logits = self._call([token_id], keep_logits=True)
        encoding = encoding_of(logits.dtype)
        return Logits(encoding, host_bytes(logits, encoding))

    def read_tile(self, spec: TileSpec) -> Tile:
        """Copy the rows of ``spec`` to the host; later calls do not change the copy.

        Raises:
            LayoutMismatchError: ``spec`` names a layer that does not exist or is of another kind.
            RowsNotLiveError: A row was overwritten or is not computed yet.
            TornGenerationError: An earlier call stopped half way.
        """
        self._require_whole()
        spec.data_bytes(self.layout)
        parts: list[bytes] = []
        for layer in spec.layers:
            plane = self._caches[layer].plane
            parts.extend(plane.host_rows(spec.first_position, spec.token_count))
        return Tile(spec, b"".join(parts))

    def snapshot(self, token_ids: Sequence[int]) -> SessionCacheSnapshot:
        """The whole cut at :attr:`position`; ``token_ids`` are the tokens that led there.

        Raises:
            LayoutMismatchError: Not exactly :attr:`position` ids.
            TornGenerationError: An earlier call stopped half way.
        """
        self._require_whole()
        specs = cut_tile_specs(self.layout, self.position)
        tiles = tuple(self.read_tile(spec) for spec in specs)
        return SessionCacheSnapshot(
            self.layout, Producer.ENGINE, self.position, tuple(token_ids), tiles
        )

    def _call(self, token_ids: Sequence[int], *, keep_logits: bool) -> mx.array:
        self._require_whole()
        self._require_tokens(token_ids)
        # Cleared only when every layer has its rows: whatever stops the call half way, an
        # interrupt included, leaves the mark behind.
        self._torn = True
        logits = self._network.forward(mx.array([list(token_ids)]), self._caches)[0, -1]
        buffers = [array for cache in self._caches for array in cache.plane.arrays()]
        # Without logits the output layer is never computed.
        mx.eval([logits, *buffers] if keep_logits else buffers)
        self._position += len(token_ids)
        self._schedule = self._schedule.after_call(len(token_ids))
        self._torn = any(cache.offset != self._position for cache in self._caches)
        self._require_whole()
        return logits

    def _require_whole(self) -> None:
        if self._torn:
            raise TornGenerationError(
                "a forward call of this session stopped half way; restore it from its last cut"
            )

    def _require_tokens(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise LimitError("token_ids", "at least one token", "none")
        if min(token_ids) < 0 or max(token_ids) >= self._network.vocab_size:
            limit = self._network.vocab_size - 1
            raise LimitError("token_ids", f"ids of 0 to {limit}", "an id outside")
        limit = self.layout.max_context_tokens
        if self._position + len(token_ids) > limit:
            raise ContextLimitError(limit, self._position + len(token_ids))
