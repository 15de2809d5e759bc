"""What a transfer sends, made: compute the backlog, read tiles, seal them, make the boundary call.

A producer knows its tape and its session, and no target. Each item is made when it is asked for,
in the order of the tape; what was made once can be made again, byte for byte, for a target that
lost it, also after the boundary call has overwritten a row of a ring.

A live session is sent while it decodes on: its full layers' whole blocks first, and only when all
of them have left, and whole blocks of its windows are sealed, is it held, for the rest. What was
read and still waits for the link would be waited for by a session that nobody serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpack.chunk import (
    ChunkClass,
    ChunkReference,
    Codec,
    RowSealer,
    SealedChunk,
    seal_component,
    seal_tile,
    seal_tile_framed,
    seal_token_ids,
)
from kvpack.identity import CallSchedule
from kvpack.layout import CacheLayout
from kvpack.limits import GRID_TOKENS
from kvpack.manifest import KnownReferences
from kvpack.snapshot import Tile, TileSpec
from node import fault_points
from node.binding import PackBinding
from node.engine_thread import EngineThread
from node.errors import NodeBusyError, SessionFrozenError, TransferFailedError
from node.migration.early import EarlyTiles, GivesEarly, LastCall, over
from node.migration.sealing import Loaded, Sealed, Sealing
from node.migration.tape import Item, Tape, TokenRange
from node.migration.window import WindowAhead
from node.migration.wire import encode_object, object_frame
from node.packs import manifest_blob, state_bytes
from node.session import Decoded, Session

#: Tiles between engine and wire, about 2 MiB each.
QUEUE_TILES: Final = 4

#: Tiles copied in one call on the engine's thread. A session that decodes on waits that long.
READ_TILES: Final = 4

#: How long a live session may be busy with one long operation after another before it is held.
FREEZE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Finished:
    """What the calls up to the cut were, and the source's own boundary call."""

    schedule: CallSchedule
    boundary: Decoded


class Producer:
    """Makes the items of one tape.

    Args:
        engine: Where the session's calls run.
        binding: What chunks are sealed for.
        session: Whose rows.
        tape: What is sent; closed where the cut is known already.
        freeze: Holds a live session, when only the rest is left. False: it is busy; ask again.
        codec: For rows. A chunk that saves less than 3 % is sealed raw all the same.

    Attributes:
        session: Whose rows.
        tape: What is sent.
        zero_s: When the last prefill call returned; for a session without backlog, its freeze.
        boundary_s: When the boundary call returned.
        finished: What it gave; None before.
        schedule: The calls up to the cut; None before all items were read once.
        mixed: The rows are not all this node's own.
    """

    def __init__(
        self,
        engine: EngineThread,
        binding: PackBinding,
        session: Session,
        tape: Tape,
        freeze: Callable[[], Awaitable[bool]],
        codec: Codec = Codec.RAW,
    ) -> None:
        self._engine = engine
        self._binding = binding
        self.session = session
        self._freeze = freeze
        self._rewrites = session.rewrites
        self._kept: dict[Item, Tile] = {}
        self._scratch: list[bytearray] = []
        self._rows = RowSealer(binding.context, binding.layout, codec)
        self._window = WindowAhead(self._read_live, self._seal_tile)
        self._states: dict[ChunkClass, bytes] = {}
        self._watchers: list[Callable[[], None]] = []
        self._token_chunks: list[bytes] | None = None
        self._boundary: asyncio.Task[None] | None = None
        self._last: LastCall | None = None
        self.tape = tape
        self.zero_s = 0.0
        self.boundary_s = 0.0
        self.finished: Finished | None = None
        self.schedule: CallSchedule | None = None
        self.mixed = session.generation.is_mixed

    def watch(self, report: Callable[[], None]) -> None:
        """Call ``report`` after every prefill call, and after what else may take long."""
        self._watchers.append(report)

    def tell(self) -> None:
        """Tell those who watch that this has come on."""
        for report in self._watchers:
            report()

    def token_chunks(self) -> list[bytes]:
        """All tokens known when first asked, by which a target finds what it holds of their rows.

        Empty for a session so short that nothing of it can be held.
        """
        if self._token_chunks is None:
            known = self.session.token_ids
            enough = len(known) > GRID_TOKENS
            chunks = seal_token_ids(self._binding.context, known) if enough else ()
            self._token_chunks = [chunk.object for chunk in chunks]
        return self._token_chunks

    async def fill(
        self, index: int, queue: asyncio.Queue[Loaded | None], consumer: asyncio.Task[None]
    ) -> None:
        """Load items from ``index`` on into ``queue``, then None; last comes the boundary call.

        Whoever takes them calls ``queue.task_done`` for each that has left. Whatever ends
        ``consumer`` ends this, too. However it ends, a cancel included: no call of the session that
        this has begun is under way then.
        """
        self.tell()
        if self.tape.cut is not None and self.zero_s == 0.0:
            self.zero_s = time.monotonic()
            self._note_state(self.tape.cut)
        try:
            while await self._more(index, queue, consumer):
                loaded = await self._load(index, READ_TILES)
                index += len(loaded)
                if index == len(self.tape.items) and self.tape.cut is not None:
                    # All rows were copied: the boundary call may overwrite the oldest of a ring.
                    self._begin_boundary()
                for one in loaded:
                    await _offer(queue, one, consumer)
            self._begin_boundary()
            await _offer(queue, None, consumer)
        except asyncio.CancelledError:
            # Who cancels a stream may keep that to himself and let go of the session at once.
            await self._engine.passed()
            raise
        finally:
            # Whatever ended this: the turn is another's, who seals a window set of his own, and
            # nobody else may have the session while a call of it is under way.
            self._window.keep(())
            await over(None if self._last is None else self._last.task)
            await over(self._boundary)
        if self._boundary is not None:
            self._boundary.result()

    def _begin_boundary(self) -> None:
        """Begin the boundary call, if it was not before; what is left to send is on its way."""
        if self.finished is not None or (self._boundary is not None and not self._boundary.done()):
            return
        generation = self.session.generation
        self.schedule, self.mixed = generation.schedule, generation.is_mixed
        self._boundary = asyncio.create_task(self._make_boundary(self.schedule))

    async def _make_boundary(self, schedule: CallSchedule) -> None:
        boundary = await self._engine.call(self.session.decode_next)
        self.boundary_s = time.monotonic()
        self.finished = Finished(schedule, boundary)
        self.tell()

    def manifest(self, references: KnownReferences) -> bytes:
        """The sealed manifest of the cut. It needs no boundary call, but all items read.

        Raises:
            KvpackError: ``references`` are not those of one whole cut.
            RuntimeError: Not all items were read.
        """
        if self.tape.cut is None or self.schedule is None:
            raise RuntimeError("a manifest before its cut")
        return manifest_blob(
            self._binding, self.tape.cut, self.schedule, references, mixed=self.mixed
        )

    def sealing(
        self, queue: asyncio.Queue[Loaded | None], named: frozenset[bytes] = frozenset()
    ) -> Sealing:
        """Seal what comes out of ``queue``. Of a seal id in ``named`` no piece is made."""
        return Sealing(queue, lambda loaded: self._seal(loaded, named))

    async def sealed_again(self, index: int) -> Sealed:
        """Make an item that was made before: the same bytes."""
        (loaded,) = await self._load(index, 1)
        return await asyncio.to_thread(self._seal, loaded, frozenset())

    async def _more(
        self, index: int, queue: asyncio.Queue[Loaded | None], consumer: asyncio.Task[None]
    ) -> bool:
        """Whether the tape has an item ``index``; lets it grow, and closes it when it does not."""
        tape = self.tape
        if tape.cut is None:
            tape.grow(self.session.position)
            if index == len(tape.items):
                # While the last blocks are on their way.
                await self._seal_window(consumer)
                await _left(queue, consumer)
        patience = time.monotonic() + FREEZE_S
        while tape.cut is None:
            tape.grow(self.session.position)
            if index < len(tape.items):
                break
            # Nothing is left but what is not whole yet. Where the session stands now is the cut.
            if await self._freeze():
                self._require_one_context()
                self.zero_s = time.monotonic()
                self._window.keep(tape.close(self.session.next_index - 1, self._window.specs))
                fault_points.reach("source.frozen")
                self._note_state(self.session.next_index - 1)
                self.tell()
            elif time.monotonic() > patience:
                raise SessionFrozenError(
                    f"session {self.session.session_id}: busy for {FREEZE_S:.0f} s; no time to cut"
                )
        return index < len(tape.items)

    async def _seal_window(self, consumer: asyncio.Task[None]) -> None:
        """Seal what of the windows any cut soon after has; what ends ``consumer`` is raised."""

        def still() -> None:
            if consumer.done():
                consumer.result()
            # Each batch waits for the engine, which others use as well.
            self.tell()

        # Without memory, or a place in the engine's line, it is sealed when it is sent.
        with contextlib.suppress(MemoryError, NodeBusyError):
            await self._window.renew(self.tape.settled(self.session.position), still)

    def _require_one_context(self) -> None:
        """A live session may be given another context while it is sent: then nothing fits."""
        if self.session.rewrites != self._rewrites:
            raise TransferFailedError(
                f"session {self.session.session_id}: its context was replaced while it was sent; "
                "it serves here as before"
            )

    def _note_state(self, cut: int) -> None:
        """Keep what the session is before its boundary call: sent again, it is the same bytes."""
        self._states = state_bytes(self.session, cut)

    async def _load(self, first: int, most: int) -> list[Loaded]:
        """Item ``first``, and with it at most ``most - 1`` of the next ones that exist already."""
        if await self._compute(first):
            # Whoever seals has nothing to do: the first one is his before the next are read.
            most = 1
        if self._last is not None:
            item = self.tape.items[first]
            early = await self._last.take(item)
            if early is not None:
                self._keep(item, early)
                return [Loaded(first, item, early)]
            if await self._last.passed():
                most = 1
        indices, position = [first], self.session.position
        for index in range(first + 1, min(first + most, len(self.tape.items))):
            if self.tape.rows_needed(index) > position:
                break
            indices.append(index)
        items = [self.tape.items[index] for index in indices]
        sealed = {item: self._window.take(item) for item in items}
        tiles = await self._read([item for item in items if sealed[item] is None])
        return [
            Loaded(index, item, tiles.get(item), sealed[item])
            for index, item in zip(indices, items, strict=True)
        ]

    async def _compute(self, index: int) -> bool:
        """Compute known tokens, one grid call after the other, until item ``index`` can be read.

        The call that reaches the cut is only begun.

        Returns:
            Whether a call was made for it.
        """
        made = False
        while self._last is None and self.session.position < self.tape.rows_needed(index):
            async with contextlib.AsyncExitStack() as turn:
                grid_tokens = await turn.enter_async_context(self._engine.pace.prefill_turn())
                call_tokens = self.session.backlog_call(grid_tokens)
                if self._gives_early(call_tokens):
                    self._begin_last(call_tokens, turn)
                    return True
                self.zero_s = await self._engine.call(_prefill, self.session, call_tokens)
            self.tell()
            made = True
        return made

    def _gives_early(self, call_tokens: int) -> bool:
        """Whether a call of so many tokens reaches the cut and tells of its rows meanwhile."""
        reached = self.session.position + call_tokens
        return reached == self.tape.cut and isinstance(self.session.generation, GivesEarly)

    def _begin_last(self, call_tokens: int, turn: contextlib.AsyncExitStack) -> None:
        """Begin the call that reaches the cut; what ``turn`` ends is then ended with the call."""
        early = EarlyTiles(self.tape.arrange_rest(self.session.position))
        call = self._engine.submit(_prefill_giving, self.session, call_tokens, early)
        # Only now: where the line was full, whoever had the turn until here ends it.
        self._last = LastCall(early, call, turn.pop_all(), self._note_zero)

    def _note_zero(self, zero_s: float) -> None:
        self.zero_s = zero_s
        self.tell()

    async def _read_live(self, specs: Sequence[TileSpec]) -> list[Tile | None]:
        # Of another context, should it have been replaced: the freeze looks.
        return await self._engine.call(_read_live_tiles, self.session, self.tape.layout, specs)

    async def _read(self, items: Sequence[Item]) -> dict[Item, Tile]:
        """The tiles of ``items``, copied in one call: a change of thread costs as much as a tile.

        What is not a tile is left out.
        """
        tiles = {item: self._kept[item] for item in items if item in self._kept}
        specs = [i for i in items if isinstance(i, TileSpec) and i not in tiles]
        if specs:
            read = await self._engine.call(_read_tiles, self.session, specs)
            self._require_one_context()
            tiles.update(zip(specs, read, strict=True))
        for item, tile in tiles.items():
            self._keep(item, tile)
        return tiles

    def _keep(self, item: Item, tile: Tile) -> None:
        if self.tape.overwritten_next(item):
            # Should the target lose it, it cannot be read again.
            self._kept[item] = tile

    def _seal(self, loaded: Loaded, named: frozenset[bytes]) -> Sealed:
        if loaded.chunk is not None:
            reference, piece = loaded.chunk
        elif loaded.tile is not None:
            reference, piece = self._seal_tile(loaded.tile)
        else:
            token_ids, states = self.session.token_ids, self._states
            chunk = seal_item(self._binding, token_ids, states, loaded.item, None)
            reference, piece = chunk.reference, encode_object(chunk.object)
        return Sealed(loaded.index, b"" if reference.seal_id in named else piece, reference)

    def _seal_tile(self, tile: Tile) -> tuple[ChunkReference, bytes]:
        """Put the piece together in a buffer that was used before: fresh memory is zeroed first."""
        if self._rows.codec is not Codec.RAW:
            chunk = self._rows.seal(tile)
            return chunk.reference, encode_object(chunk.object)
        # On several threads at once for several targets: each takes one of its own.
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = bytearray()
        sealed = seal_tile_framed(self._binding.context, tile, object_frame, scratch)
        self._scratch.append(scratch)
        return sealed


def seal_item(
    binding: PackBinding,
    token_ids: list[int],
    states: Mapping[ChunkClass, bytes],
    item: Item,
    tile: Tile | None,
) -> SealedChunk:
    """The chunk of one item of a tape. Equal items give equal bytes, whoever seals them.

    Args:
        binding: What it is sealed for.
        token_ids: All known tokens of the session.
        states: Plaintext of its state chunks.
        item: What it holds.
        tile: The rows, where it holds rows.
    """
    if tile is not None:
        return seal_tile(binding.context, tile)
    if isinstance(item, TokenRange):
        ids = token_ids[item.first : item.first + item.count]
        (chunk,) = seal_token_ids(binding.context, ids, item.first)
        return chunk
    if isinstance(item, TileSpec):
        raise RuntimeError("a tile without its rows")
    data = states[item.chunk_class]
    return seal_component(binding.context, item.chunk_class, item.position, 0, data)


def _read_tiles(session: Session, specs: Sequence[TileSpec]) -> list[Tile]:
    return session.generation.read_tiles(specs)


def _read_live_tiles(
    session: Session, layout: CacheLayout, specs: Sequence[TileSpec]
) -> list[Tile | None]:
    """As :func:`_read_tiles`; None for a tile of which a row has left its window, or is gone."""
    position = session.position

    def lives(spec: TileSpec) -> bool:
        oldest = max(layout.layers[layer].first_row(position) for layer in spec.layers)
        return oldest <= spec.first_position and spec.end_position <= position

    live = [spec for spec in specs if lives(spec)]
    read = dict(zip(live, _read_tiles(session, live), strict=True))
    return [read.get(spec) for spec in specs]


def _prefill(session: Session, call_tokens: int) -> float:
    session.prefill_next(call_tokens)
    return time.monotonic()


async def _left(queue: asyncio.Queue[Loaded | None], consumer: asyncio.Task[Any]) -> None:
    """Return when all that was put into ``queue`` has left; what ends the consumer is raised."""
    left = asyncio.ensure_future(queue.join())
    try:
        await asyncio.wait({left, consumer}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
    if consumer.done():
        consumer.result()


def _prefill_giving(session: Session, call_tokens: int, early: EarlyTiles) -> float:
    session.prefill_giving(call_tokens, early.specs, early.give)
    return time.monotonic()


async def _offer(
    queue: asyncio.Queue[Loaded | None], item: Loaded | None, consumer: asyncio.Task[Any]
) -> None:
    """Put ``item`` into the queue, unless the consumer has ended: then raise what ended it."""
    if not queue.full() and not consumer.done():
        queue.put_nowait(item)
        return
    put = asyncio.ensure_future(queue.put(item))
    try:
        await asyncio.wait({put, consumer}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not put.done():
            put.cancel()
    if consumer.done():
        consumer.result()
