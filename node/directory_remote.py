"""The ``grpc:`` directory: another node's, over the same pinned channel as everything else.

A refusal that the other node gave a reason word for is that error here, too. What fails without
one says nothing about a write: it is :class:`DirectoryAmbiguousError`, and the caller settles it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final, TypeVar

import grpc.aio
from google.protobuf.message import Message

from kvpack.errors import FormatError, KvpackError, LimitError
from node import errors
from node.config import Address
from node.credentials import Credentials, CredentialsSource, Role
from node.directory import (
    WATCH_S_MAX,
    DirectoryState,
    NodeLease,
    Ownership,
    OwnershipToken,
    Published,
    Record,
    check_value,
    lease_ms,
)
from node.directory_messages import (
    lease_value,
    owned_value,
    record_message,
    record_value,
    state_value,
)
from node.errors import (
    CredentialsError,
    DirectoryAmbiguousError,
    DirectoryError,
    PeerAnswerError,
    UsageError,
)
from node.migration.wire import peer_error, token_message, token_value
from node.parked import identity_of
from node.pb.v1 import directory_pb2 as pb
from node.trust import open_channel

_T = TypeVar("_T")

SERVICE: Final = "node.v1.Directory"

#: A look waits for no writer.
LOOK_S: Final = 5.0

#: A write may wait for another one (:data:`node.database.BUSY_TIMEOUT_S`) and for the disk.
WRITE_S: Final = 8.0

#: Entries of one page.
PAGE: Final = 500

#: Reason words that say: nothing was changed. Each one comes back as the error that it was.
_REFUSALS: Final[Mapping[str, type[KvpackError]]] = {
    kind.reason: kind
    for kind in (
        errors.SessionExistsError,
        errors.StaleTokenError,
        errors.LeaseLiveError,
        errors.LeaseLostError,
        errors.NodeBusyError,
        errors.DirectoryError,
        errors.DirectoryAmbiguousError,
        errors.DirectoryWentBackError,
        errors.UsageError,
    )
}
_INVALID: Final = frozenset({LimitError.reason, FormatError.reason})

#: Codes by which gRPC itself says that no handler ran.
_NOT_DONE: Final = frozenset({grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED})


class RemoteDirectory:
    """A :class:`node.directory.Directory` that lies on another node.

    Args:
        source: This node's credentials; the channel is opened again when they change.
        peer: Name of the node that serves the directory.
        address: Where it listens.

    Raises:
        CredentialsError: That node is not pinned.
    """

    def __init__(self, source: CredentialsSource, peer: str, address: Address) -> None:
        source.current().peer(peer, Role.NODE)
        self._source = source
        self._peer = peer
        self._address = address
        self._opened: tuple[Credentials, grpc.aio.Channel] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def state(self) -> DirectoryState:
        reply = await self._look("State", pb.StateRequest(), pb.DirectoryState)
        return _checked(state_value, reply)

    async def owner(self, session_id: str) -> Record | None:
        request = pb.OwnerRequest(session_id=session_id)
        return _read_record(await self._look("Owner", request, pb.Record), session_id)

    async def watch(self, session_id: str, seen: Record | None, timeout_s: float) -> Record | None:
        timeout_s = max(0.0, min(timeout_s, WATCH_S_MAX))
        request = pb.WatchRequest(
            session_id=session_id, seen=record_message(seen), timeout_ms=round(timeout_s * 1000)
        )
        reply = await self._look("Watch", request, pb.Record, timeout_s + LOOK_S)
        return _read_record(reply, session_id)

    async def claim(self, session_id: str, node: str, nonce: bytes) -> OwnershipToken:
        self._require_own(node)
        request = pb.ClaimRequest(session_id=session_id, nonce=nonce)
        return _read_token(await self._write("Claim", request, pb.TokenReply))

    async def transfer(
        self, session_id: str, token: OwnershipToken, node: str, nonce: bytes
    ) -> OwnershipToken:
        store = identity_of(node)
        if store is None:
            return await self._take("Transfer", session_id, token, node, nonce)
        request = pb.TransferRequest(
            session_id=session_id, token=token_message(token), nonce=nonce, store=store
        )
        return _read_token(await self._write("Transfer", request, pb.TokenReply))

    async def takeover(
        self, session_id: str, token: OwnershipToken, node: str, nonce: bytes
    ) -> OwnershipToken:
        return await self._take("Takeover", session_id, token, node, nonce)

    async def release(self, session_id: str, token: OwnershipToken) -> None:
        request = pb.ReleaseRequest(session_id=session_id, token=token_message(token))
        await self._write("Release", request, pb.ReleaseReply)

    async def put(self, session_id: str, token: OwnershipToken, value: bytes) -> None:
        value = check_value(value)
        request = pb.PutRequest(session_id=session_id, token=token_message(token), value=value)
        await self._write("Put", request, pb.PutReply)

    async def published(self, session_id: str) -> Published | None:
        request = pb.PublishedRequest(session_id=session_id)
        reply = await self._look("Published", request, pb.PublishedReply)
        if not reply.HasField("token"):
            return None
        return Published(_checked(token_value, reply.token), reply.value)

    async def owned_by(self, node: str) -> list[Ownership]:
        found: list[Ownership] = []
        while True:
            after = found[-1].session_id if found else ""
            request = pb.OwnedByRequest(node=node, after=after, page_size=PAGE)
            reply = await self._look("OwnedBy", request, pb.OwnedByReply)
            page = [_checked(owned_value, entry) for entry in reply.entries]
            ids = [after, *(entry.session_id for entry in page)]
            if any(low >= high for low, high in pairwise(ids)):
                # Else a peer could keep us here for ever.
                raise DirectoryError(f"directory on {self._peer}: a page out of order")
            found += page
            if len(page) < PAGE:
                return found

    async def register(self, node: str, incarnation: bytes, ttl_s: float) -> DirectoryState:
        return await self._lease_write("Register", node, incarnation, ttl_s)

    async def renew(self, node: str, incarnation: bytes, ttl_s: float) -> DirectoryState:
        return await self._lease_write("Renew", node, incarnation, ttl_s)

    async def expire(self, node: str, incarnation: bytes) -> None:
        self._require_own(node)
        await self._write("Expire", pb.LeaseRequest(incarnation=incarnation), pb.ExpireReply)

    async def lease(self, node: str) -> NodeLease | None:
        return lease_value(await self._look("Lease", pb.LeaseQuery(node=node), pb.LeaseReply), node)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened[1].close()
            self._opened = None
        for task in self._closing:
            task.cancel()

    async def _take(
        self, method: str, session_id: str, token: OwnershipToken, node: str, nonce: bytes
    ) -> OwnershipToken:
        self._require_own(node)
        request = pb.TransferRequest(session_id=session_id, token=token_message(token), nonce=nonce)
        return _read_token(await self._write(method, request, pb.TokenReply))

    async def _lease_write(
        self, method: str, node: str, incarnation: bytes, ttl_s: float
    ) -> DirectoryState:
        self._require_own(node)
        request = pb.LeaseRequest(incarnation=incarnation, ttl_ms=lease_ms(ttl_s))
        return _checked(state_value, await self._write(method, request, pb.DirectoryState))

    def _require_own(self, node: str) -> None:
        own = self._source.current(max_age_s=1.0).name
        if node != own:
            raise UsageError(f"directory on {self._peer}: node {own} cannot write for node {node}")

    async def _look(
        self, method: str, request: Message, reply: type[Message], timeout_s: float = LOOK_S
    ) -> Any:  # noqa: ANN401 - the reply of whichever call it is
        try:
            return await self._call(method, reply)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            found = peer_error(error, self._peer)
            if isinstance(found, PeerAnswerError):
                raise _refusal(found, DirectoryError) from None
            raise DirectoryError(f"directory: {found}") from None

    async def _write(self, method: str, request: Message, reply: type[Message]) -> Any:  # noqa: ANN401
        try:
            return await self._call(method, reply)(request, timeout=WRITE_S)
        except grpc.aio.AioRpcError as error:
            found = peer_error(error, self._peer)
            if isinstance(found, PeerAnswerError):
                raise _refusal(found, DirectoryAmbiguousError) from None
            if error.code() in _NOT_DONE:
                raise DirectoryError(f"directory: {found}") from None
            raise DirectoryAmbiguousError(f"directory: {found}") from None

    def _call(self, method: str, reply: type[Message]) -> Any:  # noqa: ANN401
        return self._channel().unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=_serialize,
            response_deserializer=reply.FromString,
        )

    def _channel(self) -> grpc.aio.Channel:
        """The channel for the credentials of now: a renewed certificate needs another one."""
        present = self._source.current(max_age_s=1.0)
        if self._opened is not None:
            credentials, channel = self._opened
            if credentials is present:
                return channel
            # What is asked over the old one may still be answered, a watch included.
            task = asyncio.ensure_future(channel.close(WATCH_S_MAX + LOOK_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        try:
            peer = present.peer(self._peer, Role.NODE)
        except CredentialsError as error:
            raise DirectoryError(f"directory: {error}") from error
        self._opened = (present, open_channel(present, peer, self._address))
        return self._opened[1]


def _refusal(answer: PeerAnswerError, unknown: type[DirectoryError]) -> KvpackError:
    """The error that the other node's reason word stands for."""
    if answer.peer_reason in _INVALID:
        return UsageError(str(answer))
    kind = _REFUSALS.get(answer.peer_reason, unknown)
    return kind(str(answer))


def _read_record(message: pb.Record, session_id: str) -> Record | None:
    try:
        return record_value(message, session_id)
    except (FormatError, LimitError) as error:
        raise DirectoryError(f"directory: {error}") from error


def _read_token(reply: pb.TokenReply) -> OwnershipToken:
    try:
        return token_value(reply.token)
    except LimitError as error:
        # The write was done, but what it gave is not known.
        raise DirectoryAmbiguousError(f"directory: {error}") from error


def _checked(read: Callable[[Any], _T], message: Message) -> _T:
    try:
        return read(message)
    except (FormatError, LimitError) as error:
        raise DirectoryError(f"directory: {error}") from error


def _serialize(message: Any) -> bytes:  # noqa: ANN401 - any message
    encoded: bytes = message.SerializeToString()
    return encoded
