"""The stream of a move: prefill, read, seal, push, each overlapping the next.

The engine computes a chunk of the prompt; the tiles that became final are copied to the host
between two calls; a second task seals and writes them while the engine computes on. The queue
between the two is short: a target that does not read stops the prefill, not the memory.

A live session is sent while it decodes on: its full layers' whole blocks first, and only when none
of them is left is it held, for the rest. A stream may be run again after a cut; it goes on with
the first object that the target does not hold.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from kvpack.chunk import (
    ChunkClass,
    ChunkReference,
    SealedChunk,
    seal_component,
    seal_tile,
    seal_token_ids,
)
from kvpack.identity import CallSchedule
from kvpack.snapshot import Tile, TileSpec
from node import fault_points
from node.binding import PackBinding
from node.engine_thread import EngineThread
from node.errors import InventoryError, PeerUnavailableError, SessionFrozenError
from node.migration.tape import Item, Tape, TokenRange
from node.migration.timeline import Timeline
from node.migration.wire import (
    MigrationStub,
    encode_cut,
    encode_held,
    encode_object,
    encode_open,
    peer_error,
)
from node.packs import state_bytes
from node.pb.v1 import migration_pb2 as pb
from node.session import Decoded, Session

#: Tiles between engine and wire, about 2 MiB each.
QUEUE_TILES: Final = 4

#: A write that has not returned by then has met a peer that does not read.
STALL_S: Final = 30.0

#: How long a live session may be busy with one long operation after another before it is held.
FREEZE_S: Final = 600.0

#: The whole stream, prefill included. A prompt of a million tokens on a slow machine fits.
STREAM_S: Final = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Fed:
    """What the stream leaves behind for Seal.

    Attributes:
        position: Tokens of the cut.
        references: Every chunk, in the order sent.
        object_bytes: Their bytes, as objects.
        schedule: The calls that computed the rows of the cut.
        boundary: The source's own boundary call.
    """

    position: int
    references: tuple[ChunkReference, ...]
    object_bytes: int
    schedule: CallSchedule
    boundary: Decoded


@dataclass(frozen=True, slots=True)
class Holding:
    """What the target said that it holds.

    Attributes:
        received: Objects of this transfer that it has taken, in the order sent.
        seal_ids: Objects that need only be named.
    """

    received: int = 0
    seal_ids: frozenset[bytes] = frozenset()


class Feed:
    """The stream of one transfer: from the first piece to the target's acknowledgement.

    Args:
        engine: Where the session's calls run.
        binding: What chunks are sealed for.
        session: Whose rows.
        tape: What is sent; closed where the cut is known already.
        freeze: Holds a live session, when only the rest is left. False: it is busy; ask again.
        timeline: Told when what was sent.
        report: Called when something has changed that a watcher may want to see.
    """

    def __init__(
        self,
        engine: EngineThread,
        binding: PackBinding,
        session: Session,
        tape: Tape,
        freeze: Callable[[], Awaitable[bool]],
        timeline: Timeline,
        report: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._binding = binding
        self._session = session
        self._freeze = freeze
        self._timeline = timeline
        self._report = report
        self._references: list[ChunkReference] = []
        self._holding = Holding()
        self._kept: dict[Item, Tile] = {}
        self._states: dict[ChunkClass, bytes] = {}
        self._fed: Fed | None = None
        self._finished: tuple[CallSchedule, Decoded] | None = None
        self.tape = tape

    @property
    def tiles_known(self) -> int:
        """Objects on the tape so far."""
        return len(self.tape.items)

    async def run(
        self, stub: MigrationStub, transfer: pb.TransferRef, peer: str, holding: Holding
    ) -> Fed:
        """Compute the backlog and send what of the cut the target does not hold.

        Raises:
            PeerUnavailableError: The target went away, or stopped reading.
            PeerAnswerError: It refused a chunk.
            InventoryError: It acknowledged another number of chunks than were sent.
        """
        if holding.received > len(self._references):
            raise InventoryError(
                f"node {peer} holds {holding.received} chunks of {len(self._references)} sent"
            )
        del self._references[holding.received :]
        self._holding = holding
        if self._finished is None or holding.received < len(self.tape.items):
            await self._stream(stub, transfer, peer)
        self._timeline.pushed_s = time.monotonic()
        return self._outcome()

    def _outcome(self) -> Fed:
        if self._finished is None or self.tape.cut is None:
            raise RuntimeError("a stream that ended before its cut")
        schedule, boundary = self._finished
        object_bytes = sum(reference.object_bytes for reference in self._references)
        return Fed(self.tape.cut, tuple(self._references), object_bytes, schedule, boundary)

    async def _stream(self, stub: MigrationStub, transfer: pb.TransferRef, peer: str) -> None:
        queue: asyncio.Queue[_Loaded | None] = asyncio.Queue(QUEUE_TILES)
        pusher = asyncio.ensure_future(self._push(stub, transfer, queue, peer))
        try:
            await self._fill(queue, pusher)
            await pusher
        finally:
            # Also where the fill failed: the stream then ends without a Seal.
            pusher.cancel()
            await asyncio.wait({pusher})

    async def _fill(self, queue: asyncio.Queue[_Loaded | None], pusher: asyncio.Task[None]) -> None:
        index = len(self._references)
        if self.tape.cut is not None and self._timeline.zero_s == 0.0:
            self._timeline.zero_s = time.monotonic()
            self._note_state(self.tape.cut)
        while await self._more(index):
            await self._compute(self.tape.rows_needed(index))
            item = self.tape.items[index]
            await _offer(queue, _Loaded(index, item, await self._read(item)), pusher)
            index += 1
        schedule = self._session.generation.schedule
        await _offer(queue, None, pusher)
        if self._finished is None:
            # The ring's rows were copied: from here on the boundary call may overwrite one.
            boundary = await self._engine.call(self._session.decode_next)
            self._timeline.boundary_s = time.monotonic()
            self._finished = (schedule, boundary)

    async def _more(self, index: int) -> bool:
        """Whether the tape has an item ``index``; lets it grow, and closes it when it does not."""
        tape, patience = self.tape, time.monotonic() + FREEZE_S
        while tape.cut is None:
            tape.grow(self._session.position)
            if index < len(tape.items):
                break
            # Nothing is left but what is not whole yet. Where the session stands now is the cut.
            if await self._freeze():
                self._timeline.zero_s = time.monotonic()
                tape.close(self._session.next_index - 1)
                fault_points.reach("source.frozen")
                self._note_state(self._session.next_index - 1)
            elif time.monotonic() > patience:
                raise SessionFrozenError(
                    f"session {self._session.session_id}: busy for {FREEZE_S:.0f} s; no time to cut"
                )
        return index < len(tape.items)

    def _note_state(self, cut: int) -> None:
        """Keep what the session is before its boundary call: sent again, it is the same bytes."""
        self._states = state_bytes(self._session, cut)

    async def _compute(self, rows: int) -> None:
        """Compute known tokens, one grid call after the other, until ``rows`` rows exist."""
        while self._session.position < rows:
            calls = await self._engine.call(self._session.backlog_calls)
            self._timeline.zero_s = await self._engine.call(_prefill, self._session, calls[0])
            self._report()

    async def _read(self, item: Item) -> Tile | None:
        if not isinstance(item, TileSpec):
            return None
        kept = self._kept.get(item)
        if kept is not None:
            return kept
        tile = await self._engine.call(self._session.generation.read_tile, item)
        if self.tape.overwritten_next(item):
            # Should the target lose it, it cannot be read again.
            self._kept[item] = tile
        return tile

    async def _push(
        self,
        stub: MigrationStub,
        transfer: pb.TransferRef,
        queue: asyncio.Queue[_Loaded | None],
        peer: str,
    ) -> None:
        call = stub.push(timeout=STREAM_S)
        # One chunk is sealed while the one before it is written.
        sealing = asyncio.ensure_future(self._next_sealed(queue))
        try:
            await call.write(encode_open(transfer))
            named = False
            while (sealed := await sealing) is not None:
                sealing = asyncio.ensure_future(self._next_sealed(queue))
                if not named and self.tape.needs_cut(sealed.index):
                    await call.write(encode_cut(self.tape.cut or 0))
                    named = True
                async with asyncio.timeout(STALL_S):
                    await call.write(sealed.piece)
                self._sent(sealed)
                fault_points.reach("source.chunk.sent")
            await call.done_writing()
            async with asyncio.timeout(STALL_S):
                reply = await call
        except grpc.aio.AioRpcError as error:
            raise peer_error(error, peer) from None
        except asyncio.InvalidStateError:
            raise await _early_end(call, peer) from None
        except TimeoutError:
            raise PeerUnavailableError(f"node {peer}: does not read any more") from None
        finally:
            call.cancel()
            sealing.cancel()
            await asyncio.gather(sealing, return_exceptions=True)
        if reply.received_objects != len(self._references):
            raise InventoryError(
                f"node {peer} acknowledged {reply.received_objects} chunks of "
                f"{len(self._references)}"
            )

    async def _next_sealed(self, queue: asyncio.Queue[_Loaded | None]) -> _Sealed | None:
        loaded = await queue.get()
        return None if loaded is None else await asyncio.to_thread(self._seal, loaded)

    def _seal(self, loaded: _Loaded) -> _Sealed:
        chunk = seal_item(
            self._binding, self._session.token_ids, self._states, loaded.item, loaded.tile
        )
        held = chunk.reference.seal_id in self._holding.seal_ids
        piece = encode_held(chunk.reference.seal_id) if held else encode_object(chunk.object)
        return _Sealed(loaded.index, piece, chunk.reference, held)

    def _sent(self, sent: _Sealed) -> None:
        self._references.append(sent.reference)
        if sent.held:
            self._timeline.held(sent.reference)
        else:
            self._timeline.add(time.monotonic(), sent.reference)
        self._report()


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


@dataclass(frozen=True, slots=True, repr=False)
class _Loaded:
    index: int
    item: Item
    tile: Tile | None


@dataclass(frozen=True, slots=True, repr=False)
class _Sealed:
    index: int
    piece: bytes
    reference: ChunkReference
    held: bool


def _prefill(session: Session, call_tokens: int) -> float:
    session.prefill_next(call_tokens)
    return time.monotonic()


async def _offer(
    queue: asyncio.Queue[_Loaded | None], item: _Loaded | None, pusher: asyncio.Task[None]
) -> None:
    """Put ``item`` into the queue, unless the pusher has ended: then raise what ended it."""
    put = asyncio.ensure_future(queue.put(item))
    try:
        await asyncio.wait({put, pusher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not put.done():
            put.cancel()
    if pusher.done():
        pusher.result()


async def _early_end(call: Any, peer: str) -> Exception:  # noqa: ANN401 - grpc's call object
    """Why the target ended the stream before everything was written."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return peer_error(error, peer)
    return PeerUnavailableError(f"node {peer}: ended the stream early")
