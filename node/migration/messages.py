"""What the other node asks for, as values that check themselves. The services only translate."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from kvpack import limits
from kvpack.errors import FormatError
from kvpack.header import Header, decode_header
from kvpack.identity import NumericsFingerprint
from kvpack.wire import decode_numerics
from node.directory import NONCE_BYTES, OwnershipToken
from node.migration.journal import TransferKey
from node.migration.versions import Speaker, read_minors
from node.migration.wire import token_value
from node.pb.v1 import migration_pb2 as pb
from node.session import check_session_id

DIGEST_BYTES: Final = 32

#: 16 chunks of 65,536 token ids: a message below gRPC's limit, and eight times the longest context.
TOKEN_CHUNKS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Offer:
    """A Prepare, checked field by field; nothing in it is believed yet.

    Attributes:
        key: Names the transfer; its source is from the caller's certificate.
        digest: SHA-256 of the message: what makes a second one "the same".
        session_id: The session's name here.
        copy: The session is to be this node's own; the source keeps its.
        token: What the source says it owns the session by; None for a copy.
        header_bytes: The bundle header as it stands.
        header: The same, read.
        numerics: On what the source computes.
        position: Tokens of the cut; of a growing transfer, at least so many.
        accept_compatible: Consent to a continuation that is not bit-exact.
        growing: The cut is named later, in the stream.
        token_chunks: TOKEN_IDS chunk objects, by which a delta is found; not opened yet.
        request: The message as it came: what a restart has to know of it.
        speaker: What the source speaks.
        data_plane: The data plane that it asks for, as the message has it.
    """

    key: TransferKey
    digest: bytes
    session_id: str
    copy: bool
    token: OwnershipToken | None
    header_bytes: bytes
    header: Header
    numerics: NumericsFingerprint
    position: int
    accept_compatible: bool
    growing: bool
    token_chunks: tuple[bytes, ...]
    request: bytes
    speaker: Speaker
    data_plane: int = 0

    @property
    def claim_nonce(self) -> bytes:
        """Marks the write by which the target of a copy claims its own session."""
        return nonce_of(self.key, hashlib.sha256(b"claim" + self.digest).digest())

    @property
    def nonce(self) -> bytes:
        """Marks the directory write of this transfer and of no other, even after a restart."""
        return nonce_of(self.key, self.digest)


def nonce_of(key: TransferKey, digest: bytes) -> bytes:
    """The nonce of a transfer, from what the journal keeps of it."""
    name = f"{key.source}/{key.epoch}/{key.number}/".encode()
    return hashlib.sha256(name + digest).digest()[:NONCE_BYTES]


def read_offer(request: pb.PrepareRequest, source: str) -> Offer:
    """Read a Prepare that ``source`` sent.

    Raises:
        FormatError: A part is malformed, or the mode is none that this node offers.
        LimitError: A field is outside its range.
    """
    if request.mode not in (pb.MODE_MOVE, pb.MODE_COPY):
        raise FormatError("prepare.mode", "MODE_MOVE or MODE_COPY", request.mode)
    copy = request.mode == pb.MODE_COPY
    if copy == request.HasField("token"):
        raise FormatError("prepare.token", "one in a move, none in a copy", "the opposite")
    limits.check_range(
        "prepare.token_chunks", len(request.token_chunks), 0, TOKEN_CHUNKS_MAX, "chunks"
    )
    header = decode_header(request.pack_header)
    if request.transfer.epoch != header.epoch:
        raise FormatError("prepare.transfer.epoch", header.epoch, request.transfer.epoch)
    # The last token of the context must be left for the boundary call.
    limits.check_range(
        "prepare.position", request.position, 1, header.layout.max_context_tokens - 1, "tokens"
    )
    encoded = request.SerializeToString(deterministic=True)
    return Offer(
        key=read_key(request.transfer, source),
        digest=hashlib.sha256(encoded).digest(),
        session_id=check_session_id(request.session_id),
        copy=copy,
        token=None if copy else token_value(request.token),
        header_bytes=request.pack_header,
        header=header,
        numerics=decode_numerics(request.numerics),
        position=request.position,
        accept_compatible=request.accept_compatible,
        growing=request.growing,
        token_chunks=tuple(request.token_chunks),
        request=encoded,
        speaker=Speaker(source, read_minors(request.protocol), request.node_version),
        data_plane=request.data_plane,
    )


def read_key(transfer: pb.TransferRef, source: str) -> TransferKey:
    """The transfer's full name; whose number it is comes from the certificate.

    Raises:
        LimitError: A field is outside its range.
    """
    return TransferKey(transfer.epoch, source, transfer.number)


@dataclass(frozen=True, slots=True)
class Inventory:
    """A Seal: what the source says it pushed, and what its boundary call gave.

    Attributes:
        digest: SHA-256 of the message.
        manifest: Stored manifest bytes and MAC.
        objects: Chunk objects.
        object_bytes: Their bytes.
        boundary_digest: 32 bytes over the boundary call's logits.
        boundary_logits: FINAL_LOGITS chunk object, or empty.
        minor: The version by which it says that all was sent.
    """

    digest: bytes
    manifest: bytes
    objects: int
    object_bytes: int
    boundary_digest: bytes
    boundary_logits: bytes
    minor: int

    def __post_init__(self) -> None:
        length = len(self.boundary_digest)
        limits.check_range("seal.boundary_digest", length, DIGEST_BYTES, DIGEST_BYTES, "bytes")


def read_inventory(request: pb.SealRequest) -> Inventory:
    """Read a Seal.

    Raises:
        LimitError: A field is outside its range.
    """
    return Inventory(
        digest=hashlib.sha256(request.SerializeToString(deterministic=True)).digest(),
        manifest=request.manifest,
        objects=request.objects,
        object_bytes=request.object_bytes,
        boundary_digest=request.boundary_digest,
        boundary_logits=request.boundary_logits,
        minor=request.protocol_minor,
    )
