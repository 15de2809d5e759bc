"""The giving end of a move or copy. Performs the effects of its table and feeds back events.

Up to Seal a failure only ends the move: the session serves on under its old token. From Seal on it
is frozen until the directory says who owns it. If that is still this node, it raises the revision
by a compare-and-swap of its own before it serves again: the target's then fails.

A link that breaks ends nothing by itself: the source asks what the target holds, over a new channel
and for a bounded time, and goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from kvpack.chunk import ChunkClass, seal_component
from kvpack.errors import KvpackError
from kvpack.layout import LayerKind
from kvpack.wire import encode_numerics
from node import fault_points
from node.dataplane.lane import Lane
from node.directory import NONCE_BYTES, Whose, whose
from node.errors import (
    DirectoryError,
    NodeError,
    PeerAnswerError,
    PeerUnavailableError,
    SessionStateError,
    StaleTokenError,
    TransferFailedError,
)
from node.migration import versions, wire
from node.migration.feed import Fed, Feed, Holding
from node.migration.orders import (
    WAIT_FIRST_S,
    WAIT_MOST_S,
    Moved,
    Order,
    Patience,
    Progress,
    Source,
)
from node.migration.table import COPY, SOURCE, Machine, SourceEffect, SourceEvent, SourceState
from node.migration.timeline import TargetTimes, Timeline
from node.pb.v1 import migration_pb2 as pb
from node.session import Phase, Session

log = logging.getLogger(__name__)

PREPARE_S: Final = 15.0
SEAL_S: Final = 60.0
COMMIT_S: Final = 60.0
ABORT_S: Final = 5.0
STATUS_S: Final = 5.0

#: How long a copy asks what became of a Commit that was not answered.
ASK_S: Final = 30.0


#: Makes the stream of one transfer, given whom to tell what was sent, and that it was.
Feeding = Callable[[Timeline, Callable[[], None]], Feed]


class Move:
    """One move or copy of one session. ``run`` is called once.

    Args:
        source: This node.
        session: The session; held by the caller where the tape is closed.
        order: What is asked for.
        feeding: Makes the stream, of this transfer alone or of one of several.
        report: Told of progress.
    """

    def __init__(
        self,
        source: Source,
        session: Session,
        order: Order,
        feeding: Feeding,
        report: Callable[[Progress], None],
    ) -> None:
        self._source = source
        self._session = session
        self._order = order
        self._report = report
        self._machine = Machine(COPY if order.copy_as else SOURCE, SourceState.IDLE)
        self._timeline = Timeline(time.monotonic())
        self._meter = wire.Meter()
        self._lane = Lane(source.plane_of(order), order.target, self._meter)
        self._feed = feeding(self._timeline, self._came_on)
        self._patience = Patience(source.resume_s)
        self._streaming: asyncio.Task[Fed] | None = None
        self._cancelled = False
        self._request: pb.PrepareRequest | None = None
        self._holding = Holding()
        self._fed: Fed | None = None
        self._reply: pb.CommitReply | None = None
        self._failure: KvpackError | None = None
        self._token = session.token
        self._wait_s = WAIT_FIRST_S
        self._compatible = False
        self._minor: int | None = None
        self._connect()
        self._effects: Mapping[SourceEffect, Callable[[], Awaitable[SourceEvent | None]]] = {
            SourceEffect.PREPARE: self._prepare,
            SourceEffect.STREAM: self._stream,
            SourceEffect.SEAL: self._seal,
            SourceEffect.COMMIT: self._commit,
            SourceEffect.READ_OWNER: self._read_owner,
            SourceEffect.RAISE: self._raise,
            SourceEffect.WAIT: self._wait,
            SourceEffect.ABORT: self._abort,
            SourceEffect.THAW: self._thaw,
            SourceEffect.RELEASE: self._release,
            SourceEffect.ASK_STATUS: self._ask_status,
            SourceEffect.FINISH: self._finish,
        }

    @property
    def state(self) -> SourceState:
        """Where the move stands."""
        return self._machine.state

    @property
    def session(self) -> Session:
        """What is moved."""
        return self._session

    def cancel(self) -> None:
        """End the move while the session still serves here.

        The target is told at once, or when a call of the engine that is under way is over.

        Raises:
            SessionStateError: Too late: the hand-over has begun, and the directory decides.
        """
        if self._machine.state not in (SourceState.PREPARING, SourceState.STREAMING):
            raise SessionStateError(
                f"session {self._session.session_id}: its move is {self._machine.state.value}; "
                "too late to cancel"
            )
        self._cancelled = True
        if self._streaming is not None:
            self._streaming.cancel()

    async def run(self) -> Moved:
        """Move the session, or leave it serving here.

        Raises:
            TransferFailedError: The session stayed, or moved without an answer; says which.
        """
        try:
            event: SourceEvent | None = SourceEvent.START
            while event is not None:
                effect = self._machine.on(event)
                log.info(
                    "move of %s to %s: %s", self._session.session_id, self._order.target,
                    self._machine.state.value,
                )  # fmt: skip
                event = await self._effects[effect]()
        finally:
            await self._channel.close()
        return self._outcome()

    def _outcome(self) -> Moved:
        if self._machine.state in (SourceState.RELEASED, SourceState.COPIED):
            if self._reply is None or self._fed is None:
                raise TransferFailedError(
                    f"the session is on node {self._order.target}, but its answer was lost"
                )
            return Moved(
                self._session.session_id,
                self._order, self._fed.position, self._reply, self._timeline,
                self._meter.wire_bytes, len(self._fed.references),
                self._lane.used, self._lane.fallback,
            )  # fmt: skip
        raise TransferFailedError(
            f"{self._failure}; the session stays on this node"
        ) from self._failure

    def _connect(self) -> None:
        # The present credentials and a fresh connection: nothing of a broken one is waited for.
        self._channel = self._source.connect(self._order.target, self._order.address)
        self._stub = wire.MigrationStub(self._channel, self._meter)

    async def _reconnect(self) -> None:
        await self._channel.close()
        self._connect()

    async def _prepare(self) -> SourceEvent:
        self._report_progress()
        try:
            again = self._request is not None
            if self._cancelled:
                return self._failed(_cancelled(), SourceEvent.PREPARE_FAILED)
            if again:
                await self._patience.wait()
                await self._reconnect()
            request = self._request = self._request or await self._new_request()
            fault_points.reach("source.prepare.before")
            reply = await self._ask(self._stub.prepare, request, PREPARE_S)
            fault_points.reach("source.prepare.after")
            self._agree(reply)
            self._lane.answered(reply)
            if reply.received_objects > self._holding.received:
                self._patience.renew()
            self._holding = Holding(reply.received_objects, frozenset(reply.held_seal_ids))
        except PeerUnavailableError as error:
            if again and self._patience.left():
                return SourceEvent.PREPARE_CUT
            return self._failed(error, SourceEvent.PREPARE_FAILED)
        except NodeError as error:
            return self._failed(error, SourceEvent.PREPARE_FAILED)
        if self._cancelled:
            return self._failed(_cancelled(), SourceEvent.PREPARE_FAILED)
        self._timeline.resumed += again
        self._compatible = reply.continuation == pb.CONTINUATION_COMPATIBLE
        return SourceEvent.PREPARED

    def _agree(self, reply: pb.PrepareReply) -> None:
        target, before = self._order.target, self._minor
        self._minor = versions.require_answer(self._source.speaker, target, reply, before)
        if before is None:
            log.info(
                "move of %s to %s: by %s, kvpack %s there", self._session.session_id, target,
                versions.named(self._minor), reply.node_version or "of another version",
            )  # fmt: skip

    async def _new_request(self) -> pb.PrepareRequest:
        binding, session, order = self._source.binding, self._session, self._order
        epoch, tape = binding.key.epoch, self._feed.tape
        number = await self._source.journal.next_number(order.target, epoch)
        request = pb.PrepareRequest(
            transfer=wire.transfer_ref(epoch, number),
            session_id=order.copy_as or session.session_id,
            mode=pb.MODE_COPY if order.copy_as else pb.MODE_MOVE,
            pack_header=binding.header_bytes,
            numerics=encode_numerics(binding.stated(mixed=session.generation.is_mixed)),
            position=max(1, session.position) if tape.cut is None else tape.cut,
            accept_compatible=order.accept_compatible,
            growing=tape.growing,
            token_chunks=self._feed.token_chunks(),
        )
        if not order.copy_as:
            request.token.CopyFrom(wire.token_message(session.token))
        versions.state(request, self._source.speaker)
        self._lane.wish(request, self._source.speaks)
        return request

    @property
    def _transfer(self) -> pb.TransferRef:
        return pb.TransferRef() if self._request is None else self._request.transfer

    async def _stream(self) -> SourceEvent:
        stub = self._lane.stub(self._stub, self._transfer)
        self._streaming = asyncio.ensure_future(
            self._feed.run(stub, self._transfer, self._order.target, self._holding)
        )
        try:
            # However long it takes while it comes on, its turn at the wire included: what counts
            # begins with the last that came on before a break, be that a target that hung.
            with self._patience.resting():
                self._fed = await self._streaming
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            return self._failed(_cancelled(), SourceEvent.PUSH_FAILED)
        except PeerUnavailableError as error:
            why = await self._why(error)
            if why is error and self._patience.left():
                log.warning("move of %s: the link broke: %s", self._session.session_id, error)
                self._lane.broke()
                return SourceEvent.PUSH_CUT
            return self._failed(why, SourceEvent.PUSH_FAILED)
        except KvpackError as error:
            return self._failed(error, SourceEvent.PUSH_FAILED)
        return SourceEvent.PUSHED

    async def _why(self, error: PeerUnavailableError) -> NodeError:
        """What ended the stream. A write that meets the end of a call hides why it was ended."""
        try:
            request = pb.StatusRequest(transfer=self._transfer)
            status = await self._ask(self._stub.status, request, STATUS_S)
        except NodeError:
            return error
        if not status.reason:
            return error
        return PeerAnswerError(status.reason, f"node {self._order.target}: {status.detail}")

    async def _seal(self) -> SourceEvent:
        if not self._order.copy_as:
            self._session.phase = Phase.FROZEN
        self._report_progress()
        if self._fed is None:
            raise RuntimeError("sealing before streaming")
        fed, binding = self._fed, self._source.binding
        logits = fed.boundary.logits
        if logits is None:
            raise RuntimeError("a boundary call without logits")
        request = pb.SealRequest(
            transfer=self._transfer,
            manifest=fed.manifest,
            objects=len(fed.references),
            object_bytes=fed.object_bytes,
            boundary_digest=logits.digest(),
            # 0 by version 1.0, and then it is not sent.
            protocol_minor=self._minor or versions.FIRST,
        )
        if self._compatible:
            # The numerics differ: drift can only be measured on the logits themselves.
            request.boundary_logits = seal_component(
                binding.context, ChunkClass.FINAL_LOGITS, fed.position, 1, logits.data
            ).object
        try:
            fault_points.reach("source.seal.before")
            await self._ask(self._stub.seal, request, SEAL_S)
            fault_points.reach("source.seal.after")
        except PeerUnavailableError as error:
            if self._patience.left():
                log.warning("move of %s: no answer to Seal: %s", self._session.session_id, error)
                return SourceEvent.SEAL_CUT
            return self._failed(error, SourceEvent.SEAL_FAILED)
        except NodeError as error:
            return self._failed(error, SourceEvent.SEAL_FAILED)
        self._timeline.sealed_s = time.monotonic()
        return SourceEvent.SEALED

    async def _commit(self) -> SourceEvent:
        self._report_progress()
        try:
            fault_points.reach("source.commit.before")
            await self._ask_commit()
            fault_points.reach("source.commit.after")
        except NodeError as error:
            return self._failed(error, SourceEvent.COMMIT_FAILED)
        return SourceEvent.COMMIT_ANSWERED

    async def _read_owner(self) -> SourceEvent:
        sessions = self._source.sessions
        fault_points.reach("source.owner.before")
        try:
            entry = await sessions.directory.owner(self._session.session_id)
        except DirectoryError as error:
            return self._failed(error, SourceEvent.DIRECTORY_DOWN)
        fault_points.reach("source.owner.after")
        standing = whose(entry, sessions.node, self._token)
        if standing is Whose.UNKNOWN or entry is None:
            # Not "owned by another": a directory that was restored or lost may yet name us.
            unknown = DirectoryError(
                f"session {self._session.session_id}: the directory does not know the session, "
                "or is older than our token; frozen until it names an owner"
            )
            return self._failed(unknown, SourceEvent.DIRECTORY_DOWN)
        if standing is Whose.OTHERS:
            return SourceEvent.OWNER_OTHER
        # A raise whose reply was lost may have happened: start from the token that stands there.
        self._token = entry.token
        if self._failure is None:
            self._failure = TransferFailedError(
                f"node {self._order.target} answered, but does not own the session"
            )
        return SourceEvent.OWNER_SELF

    async def _raise(self) -> SourceEvent:
        sessions = self._source.sessions
        nonce = secrets.token_bytes(NONCE_BYTES)
        fault_points.reach("source.raise.before")
        try:
            self._session.token = await sessions.directory.transfer(
                self._session.session_id, self._token, sessions.node, nonce
            )
        except StaleTokenError:
            return SourceEvent.RAISE_LOST
        except DirectoryError as error:
            return self._failed(error, SourceEvent.DIRECTORY_DOWN)
        fault_points.reach("source.raise.after")
        return SourceEvent.RAISED

    async def _wait(self) -> SourceEvent:
        await asyncio.sleep(self._wait_s)
        self._wait_s = min(WAIT_MOST_S, 2 * self._wait_s)
        return await self._read_owner()

    async def _ask_status(self) -> SourceEvent:
        """What became of a Commit that was not answered. Asked for a bounded time."""
        patience = Patience(ASK_S)
        while patience.left():
            await patience.wait()
            await self._reconnect()
            try:
                await self._ask_commit()
            except PeerUnavailableError:
                continue
            except NodeError as error:
                if not await self._is_committed():
                    return self._failed(error, SourceEvent.TARGET_ABORTED)
            return SourceEvent.TARGET_COMMITTED
        silent = PeerUnavailableError(f"node {self._order.target}: does not say what became of it")
        return self._failed(silent, SourceEvent.TARGET_SILENT)

    async def _is_committed(self) -> bool:
        """Whether the target says so: after its restart it cannot answer a Commit, but Status."""
        try:
            request = pb.StatusRequest(transfer=self._transfer)
            status = await self._ask(self._stub.status, request, STATUS_S)
        except NodeError:
            return False
        return bool(status.state == pb.TRANSFER_STATE_COMMITTED)

    async def _finish(self) -> None:
        self._report_progress()

    async def _abort(self) -> None:
        fault_points.reach("source.abort.before")
        if self._transfer.number:
            try:
                await self._ask(self._stub.abort, pb.AbortRequest(transfer=self._transfer), ABORT_S)
            except NodeError as error:
                # The target's lease ends the transfer without us; nothing there can commit it.
                log.info("abort of %s: %s", self._session.session_id, error)

    async def _thaw(self) -> None:
        fault_points.reach("source.thaw.before")
        self._session.phase = Phase.ACTIVE
        await self._abort()

    async def _release(self) -> None:
        order = self._order
        fault_points.reach("source.release.before")
        self._source.sessions.forward(self._session.session_id, order.target, order.address)
        await self._source.sessions.drop(self._session)
        fault_points.reach("source.release.after")
        if self._reply is None:
            # Commit is idempotent: it answers again what it answered before.
            try:
                await self._ask_commit()
            except NodeError as error:
                log.warning("move of %s: %s", self._session.session_id, error)

    async def _ask_commit(self) -> None:
        request = pb.CommitRequest(transfer=self._transfer)
        self._reply = await self._ask(self._stub.commit, request, COMMIT_S)
        self._timeline.committed_s = time.monotonic()
        phases = self._reply.phases
        self._timeline.target = TargetTimes(
            phases.probe_s, phases.durable_s, phases.transfer_s, phases.swap_s
        )

    async def _ask(self, call: Callable[..., Any], request: Any, timeout_s: float) -> Any:  # noqa: ANN401
        return await wire.ask(call, request, timeout_s, self._order.target)

    def _failed(self, error: KvpackError, event: SourceEvent) -> SourceEvent:
        log.warning("move of %s: %s: %s", self._session.session_id, event.value, error)
        self._failure = self._failure or error
        return event

    def _came_on(self) -> None:
        self._patience.came_on()
        self._report_progress()

    def _report_progress(self) -> None:
        tape = self._feed.tape
        self._report(
            Progress(
                step=self._machine.state.value,
                computed_tokens=self._session.position,
                total_tokens=self._session.position if tape.cut is None else tape.cut,
                sent_payload_bytes=self._timeline.payload_bytes,
                total_payload_bytes=tape.state_bytes(LayerKind.FULL)
                + tape.state_bytes(LayerKind.SWA),
            )
        )


def _cancelled() -> TransferFailedError:
    return TransferFailedError("cancelled")
