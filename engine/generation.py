"""One session's live cache: forward calls in, rows and logits out.

A generation is a value that grows. Nothing that happens to another one changes a byte of it; a
restore builds a new one and the owner swaps the reference.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import mlx.core as mx
import numpy as np

from engine.ahead import AheadCall, pays_here
from engine.cache import PlaneCache
from engine.call_logits import CallLogits
from engine.checkpoint import Checkpoint, check_block
from engine.device_route import copier
from engine.encodings import host_dtype
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
        """Logits ``[1, count, vocab_size]`` for ``token_ids`` ``[1, count]``; lazy.

        It must not look at the ids' values: a call may be built before its token is known.
        """


def empty_planes(network: Network) -> list[Plane]:
    """One plane per layer, without rows."""
    layers = range(len(network.layout.layers))
    return [Plane(PlaneShape.of(network.layout, i, network.plane_layout)) for i in layers]


class Generation:
    """The cache of one session and the position it stands at."""

    __slots__ = (
        "_ahead", "_caches", "_checkpoint", "_mixed", "_network", "_pays_ahead",
        "_position", "_repeats", "_schedule", "_torn",
    )  # fmt: skip

    def __init__(
        self,
        network: Network,
        planes: Sequence[Plane],
        schedule: CallSchedule | None = None,
        *,
        mixed: bool = False,
    ) -> None:
        """Take over ``planes``, which stand at ``schedule.position``; see :attr:`is_mixed`."""
        layers = network.layout.layers
        self._network = network
        self._caches = [
            PlaneCache(plane, layer.window_tokens)
            for plane, layer in zip(planes, layers, strict=True)
        ]
        self._schedule = schedule or CallSchedule()
        # Calls like the schedule's last one that it does not count yet: decoding adds nothing else.
        self._repeats = 0
        self._position = self._schedule.position
        self._mixed = mixed
        self._torn = False
        self._checkpoint: Checkpoint | None = None
        self._ahead: AheadCall | None = None
        self._pays_ahead = pays_here()

    @property
    def position(self) -> int:
        """Tokens that the state stands for; also the position computed next."""
        return self._position

    @property
    def schedule(self) -> CallSchedule:
        """The forward calls that computed the rows."""
        if self._repeats:
            *runs, last = self._schedule.runs
            more = dataclasses.replace(last, calls=last.calls + self._repeats)
            self._schedule, self._repeats = CallSchedule((*runs, more)), 0
        return self._schedule

    @property
    def is_mixed(self) -> bool:
        """Whether some of the rows are not those that this process would have computed.

        It was so when they were installed, and stays: whatever is computed after such rows is
        another build's answer, too. Who writes rows down says it with them.
        """
        return self._mixed

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

    def prefill_giving(
        self,
        token_ids: Sequence[int],
        specs: Sequence[TileSpec],
        give: Callable[[TileSpec, Callable[[], Tile]], None],
    ) -> None:
        """As :meth:`prefill`, and tell of rows that are final before the call is over.

        Args:
            token_ids: Of one forward call.
            specs: Tiles whose rows exist after the call. What its last layer holds is left out,
                and all of them where rows are copied by a GPU's runtime, which would be in the
                call's way.
            give: Called in the order in which layers are done, with a tile's spec and what copies
                its rows, which works until ``give`` returns.

        Raises:
            LimitError: As for :meth:`prefill`, also ContextLimitError and TornGenerationError.
            LayoutMismatchError: A spec names a layer that does not exist or is of another kind.
        """
        last = len(self._caches) - 1
        early = [spec for spec in specs if max(spec.layers) < last]
        if copier() is not None or not early:
            self.prefill(token_ids)
            return
        for spec in early:
            spec.data_bytes(self.layout)

        def evaluate(_: list[mx.array]) -> None:
            for done in self._evaluated(sorted({max(spec.layers) for spec in early})):
                for spec in early:
                    if max(spec.layers) == done:
                        give(spec, functools.partial(self._copied, spec))

        self._call(token_ids, keep_logits=False, evaluate=evaluate)

    def block(self, token_ids: Sequence[int]) -> tuple[Logits, ...]:
        """Append 1 to 16 tokens by one forward call and return the logits after each of them.

        Raises:
            LimitError: No token, more than 16, more than an open checkpoint can take back, or an
                id outside the vocabulary.
            ContextLimitError: The context would overflow. Nothing changed.
            TornGenerationError: An earlier call stopped half way.
        """
        check_block(len(token_ids))
        return self._call(token_ids, keep_logits=True)

    def checkpoint(self, token_count: int) -> Checkpoint:
        """Mark this state: up to ``token_count`` more tokens can be accepted in part or undone.

        Until the checkpoint is settled, calls may add no more than that, and no row is handed out.

        Raises:
            LimitError: ``token_count`` is not 1 to 16.
            RuntimeError: Another checkpoint is open.
            TornGenerationError: An earlier call stopped half way.
        """
        self._require_settled()
        # It holds the buffers, and a block's writes would copy what somebody else holds.
        self._ahead = None
        planes = [cache.plane for cache in self._caches]
        self._checkpoint = Checkpoint(planes, self.schedule, token_count, self._settle)
        return self._checkpoint

    def step(self, token_id: int) -> Logits:
        """Append one token by a single-token call and return the logits after it.

        Raises:
            LimitError: The id is outside the vocabulary.
            ContextLimitError: The context is full. Nothing changed.
            TornGenerationError: An earlier call stopped half way.
        """
        return self._call([token_id], keep_logits=True)[0]

    def read_tile(self, spec: TileSpec) -> Tile:
        """Copy the rows of ``spec`` to the host; later calls do not change the copy.

        Raises:
            LayoutMismatchError: ``spec`` names a layer that does not exist or is of another kind.
            RowsNotLiveError: A row was overwritten or is not computed yet.
            RuntimeError: A checkpoint is open: nobody knows yet which rows will stay.
            TornGenerationError: An earlier call stopped half way.
        """
        self._require_settled()
        copies = copier()
        if copies is not None and copies.fits(self.layout, spec):
            return self.read_tiles([spec])[0]
        return self._copied(spec)

    def _copied(self, spec: TileSpec) -> Tile:
        data = np.empty(spec.data_bytes(self.layout), np.uint8)
        words, offset = data.view(host_dtype(self.layout.encoding)), 0
        for layer in spec.layers:
            # Straight to its place: while rings are copied, decode waits.
            plane, count = self._caches[layer].plane, spec.token_count
            targets = []
            for dim in (plane.shape.key_dim, plane.shape.value_dim):
                end = offset + count * plane.shape.kv_heads * dim
                targets.append(words[offset:end].reshape(count, plane.shape.kv_heads, dim))
                offset = end
            plane.copy_rows(spec.first_position, *targets)
        data.flags.writeable = False
        return Tile(spec, data.data)

    def read_tiles(self, specs: Sequence[TileSpec]) -> list[Tile]:
        """As :meth:`read_tile`, of several: on a GPU that is quicker than one after the other.

        Raises:
            LayoutMismatchError: As for :meth:`read_tile`, also RowsNotLiveError, RuntimeError and
                TornGenerationError.
            BackendError: The GPU's runtime refuses to copy.
        """
        self._require_settled()
        copies = copier()
        if copies is None or not all(copies.fits(self.layout, spec) for spec in specs):
            return [self.read_tile(spec) for spec in specs]
        planes = [cache.plane for cache in self._caches]
        tiles = []
        for spec, data in zip(specs, copies.read(planes, self.layout, specs), strict=True):
            data.flags.writeable = False
            tiles.append(Tile(spec, data.data))
        return tiles

    def snapshot(self, token_ids: Sequence[int]) -> SessionCacheSnapshot:
        """The whole cut at :attr:`position`; ``token_ids`` are the tokens that led there.

        Raises:
            LayoutMismatchError: Not exactly :attr:`position` ids.
            RuntimeError: A checkpoint is open: nobody knows yet which rows will stay.
            TornGenerationError: An earlier call stopped half way.
        """
        self._require_settled()
        specs = cut_tile_specs(self.layout, self.position)
        tiles = tuple(self.read_tiles(specs))
        return SessionCacheSnapshot(
            self.layout, Producer.ENGINE, self.position, tuple(token_ids), tiles
        )

    def _evaluated(self, layers: Sequence[int]) -> Iterator[int]:
        """Evaluate a call's rows up to each of ``layers``, ascending, and give it; then the rest.

        Each part is asked for before the one before it is waited for, so the device goes on.
        """
        *parts, rest = pairwise([0, *(layer + 1 for layer in layers), len(self._caches)])
        waiting: tuple[int, list[mx.array]] | None = None
        for first, end in (*parts, rest):
            caches = self._caches[first:end]
            buffers = [array for cache in caches for array in cache.plane.arrays()]
            mx.async_eval(*buffers)  # type: ignore[no-untyped-call]
            if waiting is not None:
                mx.eval(waiting[1])
                yield waiting[0]
            waiting = end - 1, buffers
        if waiting is not None:
            mx.eval(waiting[1])

    def _call(
        self,
        token_ids: Sequence[int],
        *,
        keep_logits: bool,
        evaluate: Callable[[list[mx.array]], None] | None = None,
    ) -> tuple[Logits, ...]:
        """One forward call; the logits after each of its tokens, or none.

        What it comes to is evaluated by ``evaluate``, else at once.
        """
        self._require_whole()
        self._require_tokens(token_ids)
        repeats = self._repeats_last(len(token_ids))
        schedule = self._schedule if repeats else self.schedule.after_call(len(token_ids))
        caches: Sequence[PlaneCache] = self._caches
        if self._checkpoint is not None:
            self._checkpoint.require_room(len(token_ids))
            caches = self._checkpoint.caches(self.layout)
        # Cleared only when every layer has its rows: whatever stops the call half way, an
        # interrupt included, leaves the mark behind.
        self._torn = True
        logits = self._built(token_ids, caches, keep_logits=keep_logits)
        buffers = [array for cache in self._caches for array in cache.plane.arrays()]
        # Without logits the output layer is never computed. With them, the words that the host
        # may copy are part of the call: asked for afterwards they would be a call of their own.
        said = CallLogits(logits) if keep_logits else None
        wanted = buffers if said is None else [*said.arrays(), *buffers]
        if keep_logits and self._decodes_on():
            mx.async_eval(*wanted)  # type: ignore[no-untyped-call]
            self._ahead = AheadCall(self._network.forward, self._caches)
        (evaluate or mx.eval)(wanted)
        self._position += len(token_ids)
        self._schedule, self._repeats = schedule, self._repeats + 1 if repeats else 0
        if self._checkpoint is not None:
            self._checkpoint.note_call(len(token_ids))
        self._torn = any(cache.offset != self._position for cache in self._caches)
        self._require_whole()
        return () if said is None else said.split()

    def _built(
        self, token_ids: Sequence[int], caches: Sequence[PlaneCache], *, keep_logits: bool
    ) -> mx.array:
        """The call's logits, not evaluated; its rows are in the planes."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and keep_logits and len(token_ids) == 1 and ahead.fits(caches):
            return ahead.commit(token_ids[0], caches)
        del ahead
        return self._network.forward(mx.array([list(token_ids)]), caches)

    def _decodes_on(self) -> bool:
        """Whether another single-token call is likely: this one follows one, and there is room."""
        if not self._pays_ahead or self._checkpoint is not None or not self._repeats_last(1):
            return False
        position = self._caches[0].offset
        return position == self._position + 1 and position < self.layout.max_context_tokens

    def _repeats_last(self, token_count: int) -> bool:
        """Whether a call of ``token_count`` tokens is like the last one of the schedule."""
        runs = self._schedule.runs
        return bool(runs) and runs[-1].call_tokens == token_count == runs[-1].kept_tokens

    def _settle(self, position: int, schedule: CallSchedule) -> None:
        """The open checkpoint has brought the planes to ``position``."""
        self._position, self._schedule, self._repeats = position, schedule, 0
        self._checkpoint = None
        self._torn = False

    def _require_settled(self) -> None:
        self._require_whole()
        if self._checkpoint is not None:
            raise RuntimeError("a checkpoint is open: accept or roll back first")

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
