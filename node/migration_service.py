"""The Migration service: messages to values, calls, values to messages. Decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from kvpack.errors import FormatError, KvpackError
from node.errors import InventoryError
from node.migration.journal import TransferKey
from node.migration.messages import read_inventory, read_key, read_offer
from node.migration.table import TargetState
from node.migration.target import Transfers
from node.migration.versions import answer
from node.migration.wire import SERVICE, Piece, decode_piece, token_message
from node.pb.v1 import migration_pb2 as pb
from node.status import refuse
from node.trust import Gate

if TYPE_CHECKING:
    from node.dataplane.intake import Intake

_Context = grpc.aio.ServicerContext[Any, Any]

_STATES: Final = {
    TargetState.OPEN: pb.TRANSFER_STATE_OPEN,
    TargetState.SEALED: pb.TRANSFER_STATE_SEALED,
    TargetState.PROBING: pb.TRANSFER_STATE_SEALED,
    TargetState.PUBLISHING: pb.TRANSFER_STATE_SEALED,
    TargetState.TRANSFERRING: pb.TRANSFER_STATE_UNSETTLED,
    TargetState.UNSETTLED: pb.TRANSFER_STATE_UNSETTLED,
    TargetState.COMMITTED: pb.TRANSFER_STATE_COMMITTED,
    TargetState.ABORTED: pb.TRANSFER_STATE_ABORTED,
}


class MigrationService:
    """Who calls is taken from the certificate; what is said is checked by the values."""

    def __init__(self, transfers: Transfers, gate: Gate, intake: Intake | None = None) -> None:
        self._transfers = transfers
        self._gate = gate
        self._intake = intake

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's handlers. Pieces arrive as the bytes they are, and are read by hand."""
        unary: dict[str, tuple[Callable[..., Awaitable[Any]], Any]] = {
            "Prepare": (self.prepare, pb.PrepareRequest),
            "Seal": (self.seal, pb.SealRequest),
            "Commit": (self.commit, pb.CommitRequest),
            "Abort": (self.abort, pb.AbortRequest),
            "Status": (self.status, pb.StatusRequest),
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                _answering(behaviour),
                request_deserializer=request.FromString,
                response_serializer=_serialize,
            )
            for name, (behaviour, request) in unary.items()
        }
        handlers["Push"] = grpc.stream_unary_rpc_method_handler(
            _answering(self.push), request_deserializer=None, response_serializer=_serialize
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def prepare(self, request: pb.PrepareRequest, context: _Context) -> pb.PrepareReply:
        peer = self._gate.admit(f"/{SERVICE}/", context)
        offer = read_offer(request, peer.name)
        inbound = await self._transfers.prepare(offer)
        exact = pb.CONTINUATION_EXACT if inbound.exact else pb.CONTINUATION_COMPATIBLE
        receiver = inbound.receiver
        reply = pb.PrepareReply(
            received_objects=receiver.objects,
            continuation=exact,
            durable_objects=receiver.durable_objects,
            held_seal_ids=receiver.held_seal_ids,
        )
        answer(reply, inbound.minor)
        if self._intake is not None:
            ticket = self._intake.offer(peer, offer.key, inbound.minor, offer.data_plane)
            if ticket is not None:
                reply.plane.CopyFrom(ticket)
        return reply

    async def push(self, pieces: AsyncIterator[bytes], context: _Context) -> pb.PushReply:
        opening: TransferKey | None = None
        async for message in pieces:
            first = decode_piece(message)
            if not isinstance(first, pb.TransferRef):
                raise FormatError("pieces[0]", "the name of a transfer", "another piece")
            opening = read_key(first, self._caller(context))
            break
        if opening is None:
            raise FormatError("pieces[0]", "the name of a transfer", "an empty stream")
        held = await self._transfers.push(opening, _objects(pieces))
        return pb.PushReply(received_objects=held)

    async def seal(self, request: pb.SealRequest, context: _Context) -> pb.SealReply:
        held = await self._transfers.seal(
            self._key(request.transfer, context), read_inventory(request)
        )
        return pb.SealReply(objects=held)

    async def commit(self, request: pb.CommitRequest, context: _Context) -> pb.CommitReply:
        outcome = await self._transfers.commit(self._key(request.transfer, context))
        times = outcome.times
        return pb.CommitReply(
            token=token_message(outcome.token),
            first_token=outcome.first.token_id,
            first_index=outcome.first.index,
            continuation=(pb.CONTINUATION_EXACT if outcome.exact else pb.CONTINUATION_COMPATIBLE),
            drift=outcome.drift,
            phases=pb.PhaseTimes(
                probe_s=times.probe_s,
                durable_s=times.durable_s,
                transfer_s=times.transfer_s,
                swap_s=times.swap_s,
            ),
        )

    async def abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortReply:
        state = await self._transfers.abort(self._key(request.transfer, context))
        return pb.AbortReply(state=_STATES[state])

    async def status(self, request: pb.StatusRequest, context: _Context) -> pb.StatusReply:
        key = self._key(request.transfer, context)
        standing = await self._transfers.status(key)
        reply = pb.StatusReply(
            state=_STATES[standing.state], received_objects=self._transfers.received(key)
        )
        if standing.owner is not None:
            reply.owner = standing.owner.node
            reply.token.CopyFrom(token_message(standing.owner.token))
        if standing.failure is not None:
            reply.reason, reply.detail = standing.failure.reason, str(standing.failure)
        return reply

    def _caller(self, context: _Context) -> str:
        return self._gate.admit(f"/{SERVICE}/", context).name

    def _key(self, transfer: pb.TransferRef, context: _Context) -> TransferKey:
        return read_key(transfer, self._caller(context))


async def _objects(pieces: AsyncIterator[bytes]) -> AsyncIterator[Piece]:
    async for message in pieces:
        piece = decode_piece(message)
        if isinstance(piece, pb.TransferRef):
            raise InventoryError("a stream names its transfer once")
        yield piece


def _answering(behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def answer(request: Any, context: _Context) -> Any:  # noqa: ANN401 - any message
        try:
            return await behaviour(request, context)
        except KvpackError as error:
            await refuse(context, error)

    return answer


def _serialize(message: Any) -> bytes:  # noqa: ANN401 - any message
    encoded: bytes = message.SerializeToString()
    return encoded
