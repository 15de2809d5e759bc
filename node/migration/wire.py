"""Speaking to another node: pieces by hand, the rest by its generated classes, every byte counted.

A chunk travels in a protobuf message with one field set. The generated classes would copy its
payload twice on each end, so the envelope (tag and length) is written and read by hand here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from kvpack import limits
from kvpack.chunk import OBJECT_BYTES_MAX
from kvpack.errors import FormatError
from node.directory import OwnershipToken
from node.errors import PeerAnswerError, PeerUnavailableError
from node.pb.v1 import migration_pb2 as pb
from node.pb.v1 import ownership_pb2

SERVICE: Final = "node.v1.Migration"

#: gRPC puts a flag byte and a four-byte length before every message.
GRPC_PREFIX_BYTES: Final = 5

#: Trailing metadata: the stable word of an error, beside its status code.
REASON_KEY: Final = "kvpack-reason"

#: Beside it, where known: who owns the session now and where it listens; when to come again.
OWNER_KEY: Final = "kvpack-owner"
OWNER_ADDRESS_KEY: Final = "kvpack-owner-address"
RETRY_AFTER_KEY: Final = "kvpack-retry-after-ms"

#: The largest chunk object and its envelope. Chunks aim at 2 MiB; the widest rows make 4 MiB.
PIECE_BYTES_MAX: Final = OBJECT_BYTES_MAX + 16

#: A piece without an object: a transfer's name is the longest of them.
SMALL_BYTES_MAX: Final = 64

_TAG_OBJECT: Final = 0x12  # field 2, length-delimited

#: Bytes of a seal id: one BLAKE3 digest.
SEAL_ID_BYTES: Final = 32

_Reply = TypeVar("_Reply")


class Meter:
    """Counts serialized messages, both directions, with gRPC's own prefix."""

    def __init__(self) -> None:
        self.wire_bytes = 0

    def sent(self, encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        """``encode``, counted."""

        def counted(message: Any) -> bytes:  # noqa: ANN401 - whatever encode takes
            encoded = encode(message)
            self.wire_bytes += len(encoded) + GRPC_PREFIX_BYTES
            return encoded

        return counted

    def received(self, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """``decode``, counted."""

        def counted(encoded: bytes) -> Any:  # noqa: ANN401 - whatever decode makes
            self.wire_bytes += len(encoded) + GRPC_PREFIX_BYTES
            return decode(encoded)

        return counted


class MigrationStub:
    """The client's end of the Migration service over one channel, with a meter."""

    def __init__(self, channel: grpc.aio.Channel, meter: Meter) -> None:
        def unary(name: str, request: type[Message], reply: type[Message]) -> Any:  # noqa: ANN401
            return channel.unary_unary(
                f"/{SERVICE}/{name}",
                request_serializer=meter.sent(request.SerializeToString),
                response_deserializer=meter.received(reply.FromString),
            )

        self.prepare = unary("Prepare", pb.PrepareRequest, pb.PrepareReply)
        self.seal = unary("Seal", pb.SealRequest, pb.SealReply)
        self.commit = unary("Commit", pb.CommitRequest, pb.CommitReply)
        self.abort = unary("Abort", pb.AbortRequest, pb.AbortReply)
        self.status = unary("Status", pb.StatusRequest, pb.StatusReply)
        self.push = channel.stream_unary(
            f"/{SERVICE}/Push",
            request_serializer=meter.sent(_as_it_is),
            response_deserializer=meter.received(pb.PushReply.FromString),
        )


async def ask(call: Callable[..., Any], request: Message, timeout_s: float, peer: str) -> Any:  # noqa: ANN401 - the reply of whichever call it is
    """Make a unary call with a deadline.

    Raises:
        PeerUnavailableError: No answer, or not one that says what became of the request.
        PeerAnswerError: The peer refused, and said why.
    """
    try:
        return await call(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise peer_error(error, peer) from None


def peer_error(error: grpc.aio.AioRpcError, peer: str) -> PeerAnswerError | PeerUnavailableError:
    """The error of ours that a failed call stands for. Without a reason word nobody answered."""
    trailer = {k: v for k, v in error.trailing_metadata() or () if isinstance(v, str)}
    if REASON_KEY in trailer:
        reason = trailer.pop(REASON_KEY)
        return PeerAnswerError(reason, f"node {peer}: {error.details()}", trailer)
    return PeerUnavailableError(f"node {peer}: {error.code().name.lower()}")


def encode_open(transfer: pb.TransferRef) -> bytes:
    """The first piece of a stream."""
    return pb.Piece(open=transfer).SerializeToString()


def encode_object(chunk: bytes) -> bytes:
    """The piece that carries one chunk object."""
    return object_frame(len(chunk)) + chunk


def object_frame(object_bytes: int) -> bytes:
    """What stands before a chunk object of so many bytes in its piece."""
    return bytes((_TAG_OBJECT,)) + _varint(object_bytes)


def encode_held(seal_id: bytes) -> bytes:
    """The piece that stands for a chunk object which the target holds."""
    return pb.Piece(held=seal_id).SerializeToString()


def encode_cut(position: int) -> bytes:
    """The piece that names the cut of a growing transfer."""
    return pb.Piece(cut=position).SerializeToString()


@dataclass(frozen=True, slots=True)
class Held:
    """In place of a chunk object: the target holds the one with this seal id, 32 bytes."""

    seal_id: bytes

    def __post_init__(self) -> None:
        limits.check_range("piece.held", len(self.seal_id), SEAL_ID_BYTES, SEAL_ID_BYTES, "bytes")


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of a growing transfer, in tokens."""

    position: int

    def __post_init__(self) -> None:
        limits.check_range("piece.cut", self.position, 1, limits.POSITION_MAX, "tokens")


Piece = memoryview | Held | Cut


def decode_piece(message: bytes | memoryview) -> pb.TransferRef | Piece:
    """Read one piece; of a chunk object, a view of it inside ``message``.

    Raises:
        FormatError: Not exactly one field, or an over-long length.
        LimitError: A value is outside its range.
    """
    if len(message) > PIECE_BYTES_MAX:
        raise FormatError("piece", f"<= {PIECE_BYTES_MAX} bytes", len(message))
    if message[:1] != bytes((_TAG_OBJECT,)):
        return _decode_small(bytes(message[: SMALL_BYTES_MAX + 1]))
    length, start = _read_varint(message, 1)
    if length != len(message) - start or length == 0:
        raise FormatError("piece.object", f"{len(message) - start} bytes", length)
    return memoryview(message)[start:]


def transfer_ref(epoch: int, number: int) -> pb.TransferRef:
    """The name of a transfer within its source."""
    return pb.TransferRef(epoch=epoch, number=number)


def token_message(token: OwnershipToken) -> ownership_pb2.OwnershipToken:
    """``token`` as a message."""
    return ownership_pb2.OwnershipToken(
        directory_id=token.directory_id, generation=token.generation, revision=token.revision
    )


def token_value(message: ownership_pb2.OwnershipToken) -> OwnershipToken:
    """The token that ``message`` stands for.

    Raises:
        LimitError: A field is missing or outside its range.
    """
    return OwnershipToken(message.directory_id, message.generation, message.revision)


def _as_it_is(encoded: bytes) -> bytes:
    return encoded


def _decode_small(message: bytes) -> pb.TransferRef | Held | Cut:
    try:
        piece = pb.Piece.FromString(message)
    except DecodeError as error:
        raise FormatError("piece", "one field", "other bytes") from error
    which = piece.WhichOneof("piece")
    if which in (None, "object") or piece.SerializeToString(deterministic=True) != message:
        raise FormatError("piece", "one field alone", "none, more or other fields")
    if which == "held":
        return Held(piece.held)
    return Cut(piece.cut) if which == "cut" else piece.open


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: bytes | memoryview, offset: int) -> tuple[int, int]:
    """``(value, next offset)`` of a minimal varint below 2^28."""
    value = 0
    for shift in range(0, 28, 7):
        byte = message[offset : offset + 1]
        if not byte:
            break
        offset += 1
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            if byte[0] == 0 and shift:
                break
            return value, offset
    raise FormatError("piece.object", "a minimal length below 2^28", "another")
