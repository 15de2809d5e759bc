"""Directory values as messages and back. Values check themselves; nothing else is decided here."""

from __future__ import annotations

from kvpack import limits
from kvpack.errors import FormatError
from node.directory import (
    INCARNATION_BYTES,
    NONCE_BYTES,
    DirectoryState,
    NodeLease,
    Ownership,
    Record,
    Released,
)
from node.migration.wire import token_message, token_value
from node.pb.v1 import directory_pb2 as pb
from node.session import check_session_id


def record_message(record: Record | None) -> pb.Record:
    """``record`` as a message; None is the empty one."""
    if record is None:
        return pb.Record()
    if isinstance(record, Ownership):
        return pb.Record(owned=owned_message(record))
    return pb.Record(
        released=pb.Tombstone(
            session_id=record.session_id,
            last_node=record.last_node,
            token=token_message(record.token),
            released_revision=record.released_revision,
        )
    )


def owned_message(entry: Ownership) -> pb.Owned:
    """``entry`` as a message."""
    return pb.Owned(
        session_id=entry.session_id,
        node=entry.node,
        token=token_message(entry.token),
        nonce=entry.nonce,
    )


def record_value(message: pb.Record, session_id: str) -> Record | None:
    """What ``message`` says of ``session_id``.

    Raises:
        FormatError: It is of another session.
        LimitError: A field is missing or outside its range.
    """
    kind = message.WhichOneof("record")
    if kind is None:
        return None
    found = message.owned.session_id if kind == "owned" else message.released.session_id
    if found != session_id:
        raise FormatError("record.session_id", "the session that was asked for", "another")
    if kind == "owned":
        return owned_value(message.owned)
    released = message.released
    limits.check_name("record.last_node", released.last_node)
    limits.check_range("record.released_revision", released.released_revision, 1, (1 << 63) - 1)
    return Released(
        session_id, released.last_node, token_value(released.token), released.released_revision
    )


def owned_value(message: pb.Owned) -> Ownership:
    """The entry that ``message`` stands for.

    Raises:
        LimitError: A field is missing or outside its range.
    """
    limits.check_name("record.node", message.node)
    return Ownership(
        check_session_id(message.session_id),
        message.node,
        token_value(message.token),
        nonce_value(message.nonce),
    )


def state_message(state: DirectoryState) -> pb.DirectoryState:
    """``state`` as a message."""
    return pb.DirectoryState(
        directory_id=state.directory_id, generation=state.generation, revision=state.revision
    )


def state_value(message: pb.DirectoryState) -> DirectoryState:
    """The state that ``message`` stands for.

    Raises:
        LimitError: A field is missing or outside its range.
    """
    return DirectoryState(message.directory_id, message.generation, message.revision)


def lease_message(lease: NodeLease | None) -> pb.LeaseReply:
    """``lease`` as a message."""
    if lease is None:
        return pb.LeaseReply()
    # Rounded up: a lease that still runs is not shown as over.
    left_ms = int(-(-lease.left_s * 1000 // 1))
    return pb.LeaseReply(known=True, incarnation=lease.incarnation, left_ms=left_ms)


def lease_value(message: pb.LeaseReply, node: str) -> NodeLease | None:
    """The lease of ``node`` that ``message`` stands for."""
    if not message.known:
        return None
    return NodeLease(node, message.incarnation, message.left_ms / 1000)


def nonce_value(nonce: bytes) -> bytes:
    """Return ``nonce`` if it is one.

    Raises:
        LimitError: It has another length.
    """
    limits.check_range("directory.nonce", len(nonce), NONCE_BYTES, NONCE_BYTES, "bytes")
    return nonce


def incarnation_value(incarnation: bytes) -> bytes:
    """Return ``incarnation`` if it is one.

    Raises:
        LimitError: It has another length.
    """
    length = len(incarnation)
    limits.check_range("lease.incarnation", length, INCARNATION_BYTES, INCARNATION_BYTES, "bytes")
    return incarnation
