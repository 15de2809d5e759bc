"""The stream of a move: prefill, read, seal, push, each overlapping the next.

The engine computes a chunk of the prompt; the tiles that became final are copied to the host
between two calls; a second task seals and writes them while the engine computes on. The queue
between the two is short: a target that does not read stops the prefill, not the memory.

A stream may be run again after a cut; it goes on with the first object that the target does not
hold. What is sent is made by a :class:`node.migration.producer.Producer`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import grpc.aio

from kvpack.chunk import ChunkReference
from kvpack.manifest import KnownReferences
from node import fault_points
from node.errors import InventoryError, PeerUnavailableError
from node.migration.producer import QUEUE_TILES, Producer
from node.migration.sealing import Loaded, Sealed
from node.migration.tape import Tape
from node.migration.timeline import Timeline
from node.migration.wire import MigrationStub, encode_cut, encode_held, encode_open, peer_error
from node.pb.v1 import migration_pb2 as pb
from node.session import Decoded

#: A write that has not returned by then has met a peer that does not read.
STALL_S: Final = 30.0

#: How often it is looked what a call has sent of what was written, and how often while there is
#: nothing to write: then the freeze of a live session may wait for what is under way.
LOOK_S: Final = 1.0
IDLE_LOOK_S: Final = 0.005

#: How often it is looked whether a call is still open while nothing of it is under way.
OPEN_LOOK_S: Final = 0.1

#: The whole stream, prefill included. A prompt of a million tokens on a slow machine fits.
STREAM_S: Final = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Fed:
    """What the stream leaves behind for Seal.

    Attributes:
        position: Tokens of the cut.
        references: Every chunk, in the order sent.
        object_bytes: Their bytes, as objects.
        manifest: The sealed manifest of the cut.
        boundary: The source's own boundary call.
    """

    position: int
    references: tuple[ChunkReference, ...]
    object_bytes: int
    manifest: bytes
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


@runtime_checkable
class SendsBehind(Protocol):
    """A call whose writes return before their pieces are sent.

    It ends by itself where a piece takes too long: how long a write waits says nothing of that.

    Attributes:
        sent_s: When each piece after the first was sent, in order, by ``time.monotonic()``.
    """

    sent_s: deque[float]

    def require_open(self) -> None:
        """Raise what ended the call: what was written and not sent by then never is."""


class Feed:
    """The stream of one transfer: from the first piece to the target's acknowledgement.

    Args:
        producer: Makes what is sent.
        timeline: Told when what was sent.
        report: Called when something has changed that a watcher may want to see.
    """

    def __init__(self, producer: Producer, timeline: Timeline, report: Callable[[], None]) -> None:
        self._producer = producer
        self._timeline = timeline
        self._report = report
        self._references = KnownReferences(layout=producer.tape.layout)
        self._holding = Holding()
        self._manifest = b""
        self._written: deque[Callable[[float], None]] = deque()
        self._left: Callable[[], None] = lambda: None
        producer.watch(report)

    @property
    def tape(self) -> Tape:
        """What is sent."""
        return self._producer.tape

    def token_chunks(self) -> list[bytes]:
        """The tokens that Prepare offers."""
        return self._producer.token_chunks()

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
        self._references.truncate(holding.received)
        self._holding = holding
        if self._producer.finished is None or holding.received < len(self.tape.items):
            await self._stream(stub, transfer, peer)
        self._timeline.zero_s = self._producer.zero_s
        self._timeline.boundary_s = self._producer.boundary_s
        self._timeline.pushed_s = time.monotonic()
        if not self._manifest:
            # Nothing was left to send.
            self._make_manifest()
        return self._outcome()

    def _make_manifest(self) -> None:
        # Its references were encoded, and looked at, one by one: a change of thread takes longer.
        self._manifest = self._producer.manifest(self._references)

    def _outcome(self) -> Fed:
        finished, cut = self._producer.finished, self.tape.cut
        if finished is None or cut is None:
            raise RuntimeError("a stream that ended before its cut")
        references = self._references.references
        object_bytes = sum(reference.object_bytes for reference in references)
        return Fed(cut, references, object_bytes, self._manifest, finished.boundary)

    async def _stream(self, stub: MigrationStub, transfer: pb.TransferRef, peer: str) -> None:
        queue: asyncio.Queue[Loaded | None] = asyncio.Queue(QUEUE_TILES)
        sealing = self._producer.sealing(queue, self._holding.seal_ids)
        self._left = queue.task_done
        pusher = asyncio.ensure_future(self._push(stub, transfer, sealing.take, peer))
        try:
            await self._producer.fill(len(self._references), queue, pusher)
            await pusher
        finally:
            # Also where the fill failed: the stream then ends without a Seal.
            pusher.cancel()
            await asyncio.wait({pusher})

    async def _push(
        self,
        stub: MigrationStub,
        transfer: pb.TransferRef,
        take: Callable[[], Awaitable[Sealed | None]],
        peer: str,
    ) -> None:
        """Write what ``take`` gives, up to its None, and hear how much of it arrived."""
        call = stub.push(timeout=STREAM_S)
        self._written.clear()
        # One chunk is sealed while the one before it is written.
        sealing = asyncio.ensure_future(take())
        following = asyncio.ensure_future(self._follow(call))
        try:
            await call.write(encode_open(transfer))
            named = False
            while (sealed := await self._idle(call, sealing)) is not None:
                sealing = asyncio.ensure_future(take())
                if not named and self.tape.needs_cut(sealed.index):
                    await self._put(call, encode_cut(self.tape.cut or 0), lambda _: None)
                    named = True
                await self._write(call, sealed)
                fault_points.reach("source.chunk.sent")
            async with _bound(call):
                await call.done_writing()
            # While the last chunks are on their way: afterwards everybody would wait for it.
            self._make_manifest()
            async with _bound(call):
                reply = await call
        except grpc.aio.AioRpcError as error:
            raise peer_error(error, peer) from None
        except asyncio.InvalidStateError:
            raise await _early_end(call, peer) from None
        except TimeoutError:
            raise PeerUnavailableError(f"node {peer}: does not read any more") from None
        finally:
            self._note_sent(call)
            call.cancel()
            sealing.cancel()
            following.cancel()
            await asyncio.gather(sealing, following, return_exceptions=True)
        if reply.received_objects != len(self._references):
            raise InventoryError(
                f"node {peer} acknowledged {reply.received_objects} chunks of "
                f"{len(self._references)}"
            )

    async def _write(self, call: Any, sealed: Sealed) -> None:  # noqa: ANN401 - grpc's call object
        """Write one chunk, or its name where the target holds it."""
        reference = sealed.reference
        held = reference.seal_id in self._holding.seal_ids
        # Before the write: where that fails, the target may have it all the same.
        self._references.append(reference)

        def told(at_s: float) -> None:
            if held:
                self._timeline.held(reference)
            else:
                self._timeline.add(at_s, reference)
            self._left()

        await self._put(call, encode_held(reference.seal_id) if held else sealed.piece, told)
        self._report()

    async def _idle(self, call: Any, sealing: asyncio.Future[Sealed | None]) -> Sealed | None:  # noqa: ANN401
        """The next chunk; while there is none, what leaves of those before it is noted.

        A live session may be frozen next: a link that broke meanwhile is better known before.
        """
        while not sealing.done():
            look_s = IDLE_LOOK_S if self._written else OPEN_LOOK_S
            await asyncio.wait({sealing}, timeout=look_s)
            if isinstance(call, SendsBehind):
                call.require_open()
            elif call.done():
                raise asyncio.InvalidStateError
            self._look(call)
        return await sealing

    async def _put(self, call: Any, piece: bytes, told: Callable[[float], None]) -> None:  # noqa: ANN401
        """Write a piece; ``told`` is called with the moment when it was sent, some pieces later."""
        async with _bound(call):
            await call.write(piece)
        self._written.append(told)
        self._note_sent(call)

    async def _follow(self, call: Any) -> None:  # noqa: ANN401 - grpc's call object
        """Report pieces that leave while a write, or the answer, is waited for."""
        while isinstance(call, SendsBehind):
            await asyncio.sleep(LOOK_S)
            self._look(call)

    def _look(self, call: Any) -> None:  # noqa: ANN401 - grpc's call object
        before = len(self._written)
        self._note_sent(call)
        if len(self._written) < before:
            self._report()

    def _note_sent(self, call: Any) -> None:  # noqa: ANN401 - grpc's call object
        behind = isinstance(call, SendsBehind)
        while self._written and (not behind or call.sent_s):
            told = self._written.popleft()
            told(call.sent_s.popleft() if behind else time.monotonic())


def _bound(call: Any) -> asyncio.Timeout:  # noqa: ANN401 - grpc's call object
    return asyncio.timeout(None if isinstance(call, SendsBehind) else STALL_S)


async def _early_end(call: Any, peer: str) -> Exception:  # noqa: ANN401 - grpc's call object
    """Why the target ended the stream before everything was written."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return peer_error(error, peer)
    return PeerUnavailableError(f"node {peer}: ended the stream early")
