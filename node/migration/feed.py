"""The stream of a move: prefill, read, seal, push, each overlapping the next.

The engine computes a chunk of the prompt; the tiles that became final are copied to the host
between two calls; a second task seals and writes them while the engine computes on. The queue
between the two is short: a target that does not read stops the prefill, not the memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
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
from kvpack.snapshot import Tile
from node.binding import PackBinding
from node.engine_thread import EngineThread
from node.errors import InventoryError, PeerUnavailableError
from node.migration.plan import CutPlan
from node.migration.timeline import Timeline
from node.migration.wire import MigrationStub, encode_object, encode_open, peer_error
from node.pb.v1 import migration_pb2 as pb
from node.session import Decoded, Session
from node.state import encode_state

#: Tiles between engine and wire, about 2 MiB each.
QUEUE_TILES: Final = 4

#: A write that has not returned by then has met a peer that does not read.
STALL_S: Final = 30.0

#: The whole stream, prefill included. A prompt of a million tokens on a slow machine fits.
STREAM_S: Final = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Fed:
    """What the stream leaves behind for Seal.

    Attributes:
        references: Every chunk, in the order sent.
        object_bytes: Their bytes, as objects.
        schedule: The calls that computed the rows of the cut.
        boundary: The source's own boundary call.
    """

    references: tuple[ChunkReference, ...]
    object_bytes: int
    schedule: CallSchedule
    boundary: Decoded


class Feed:
    """One stream, from the first piece to the target's acknowledgement."""

    def __init__(
        self,
        engine: EngineThread,
        binding: PackBinding,
        session: Session,
        timeline: Timeline,
        report: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._binding = binding
        self._session = session
        self._timeline = timeline
        self._report = report
        self._references: list[ChunkReference] = []
        self.plan = CutPlan.of(binding.layout, session.next_index - 1)

    async def run(self, stub: MigrationStub, transfer: pb.TransferRef, peer: str) -> Fed:
        """Compute the backlog and send the cut.

        Raises:
            PeerUnavailableError: The target went away, or stopped reading.
            PeerAnswerError: It refused a chunk.
            InventoryError: It acknowledged another number of chunks than were sent.
        """
        queue: asyncio.Queue[_Item | None] = asyncio.Queue(QUEUE_TILES)
        pusher = asyncio.create_task(self._push(stub, transfer, queue, peer))
        try:
            schedule, boundary = await self._fill(queue, pusher)
            await pusher
        finally:
            # Also where the fill failed: the stream then ends without a Seal.
            pusher.cancel()
            await asyncio.wait({pusher})
        self._timeline.pushed_s = time.monotonic()
        object_bytes = sum(reference.object_bytes for reference in self._references)
        return Fed(tuple(self._references), object_bytes, schedule, boundary)

    async def _fill(
        self, queue: asyncio.Queue[_Item | None], pusher: asyncio.Task[None]
    ) -> tuple[CallSchedule, Decoded]:
        session, cut = self._session, self.plan.position
        # Token ids and the boundary token are known before a row is: they need not wait.
        await _offer(queue, _TokenIds(tuple(session.token_ids[:cut])), pusher)
        await _offer(queue, _State(cut, session.token_ids[cut]), pusher)
        await self._offer_tiles(queue, 0, session.position, pusher)
        self._timeline.zero_s = time.monotonic()
        for call_tokens in await self._engine.call(session.backlog_calls):
            before = session.position
            self._timeline.zero_s = await self._engine.call(_prefill, session, call_tokens)
            self._report()
            await self._offer_tiles(queue, before, session.position, pusher)
        schedule = session.generation.schedule
        await _offer(queue, None, pusher)
        # The ring's rows were copied: from here on the boundary call may overwrite one.
        boundary = await self._engine.call(session.decode_next)
        self._timeline.boundary_s = time.monotonic()
        return schedule, boundary

    async def _offer_tiles(
        self,
        queue: asyncio.Queue[_Item | None],
        before: int,
        after: int,
        pusher: asyncio.Task[None],
    ) -> None:
        for spec in self.plan.between(before, after):
            tile = await self._engine.call(self._session.generation.read_tile, spec)
            await _offer(queue, tile, pusher)

    async def _push(
        self,
        stub: MigrationStub,
        transfer: pb.TransferRef,
        queue: asyncio.Queue[_Item | None],
        peer: str,
    ) -> None:
        call = stub.push(timeout=STREAM_S)
        try:
            await call.write(encode_open(transfer))
            while (item := await queue.get()) is not None:
                for piece, reference in await asyncio.to_thread(self._seal, item):
                    async with asyncio.timeout(STALL_S):
                        await call.write(piece)
                    self._sent(reference)
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
        if reply.received_objects != len(self._references):
            raise InventoryError(
                f"node {peer} acknowledged {reply.received_objects} chunks of "
                f"{len(self._references)}"
            )

    def _seal(self, item: _Item) -> list[tuple[bytes, ChunkReference]]:
        context = self._binding.context
        sealed: list[SealedChunk]
        if isinstance(item, Tile):
            sealed = [seal_tile(context, item)]
        elif isinstance(item, _TokenIds):
            sealed = seal_token_ids(context, item.token_ids)
        else:
            state = encode_state(item.pending_token)
            sealed = [seal_component(context, ChunkClass.SESSION, item.position, 0, state)]
        return [(encode_object(chunk.object), chunk.reference) for chunk in sealed]

    def _sent(self, reference: ChunkReference) -> None:
        self._references.append(reference)
        self._timeline.add(time.monotonic(), reference)
        self._report()


@dataclass(frozen=True, slots=True, repr=False)
class _TokenIds:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, repr=False)
class _State:
    position: int
    pending_token: int


_Item = Tile | _TokenIds | _State


def _prefill(session: Session, call_tokens: int) -> float:
    session.prefill_next(call_tokens)
    return time.monotonic()


async def _offer(
    queue: asyncio.Queue[_Item | None], item: _Item | None, pusher: asyncio.Task[None]
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
