"""The Directory service: this node's directory file, for the nodes of other machines.

Who calls is the name in its certificate. A node writes for itself alone: it becomes the owner by
claim, transfer and takeover, and it puts, releases and gives to a store only what it owns. A token
names one write, and a write has one owner, so looking who that is before the compare leaves no gap.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc.aio

from kvpack import limits
from kvpack.errors import KvpackError
from node.directory import WATCH_S_MAX, Ownership, OwnershipToken
from node.directory_messages import (
    incarnation_value,
    lease_message,
    nonce_value,
    owned_message,
    record_message,
    record_value,
    state_message,
)
from node.directory_sqlite import PAGE_MAX, SqliteDirectory
from node.errors import NodeBusyError, StaleTokenError
from node.migration.wire import token_message, token_value
from node.parked import store_owner
from node.pb.v1 import directory_pb2 as pb
from node.session import check_session_id
from node.status import refuse
from node.trust import Gate

_Context = grpc.aio.ServicerContext[Any, Any]

SERVICE: Final = "node.v1.Directory"

#: Calls that may wait for a change at once, from all nodes.
WATCHERS_MAX: Final = 64


class DirectoryService:
    """Translates calls to a :class:`SqliteDirectory`, under the caller's own name."""

    def __init__(self, directory: SqliteDirectory, gate: Gate) -> None:
        self._directory = directory
        self._gate = gate
        self._watchers = 0

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's handlers."""
        methods: dict[str, tuple[Callable[..., Awaitable[Any]], Any]] = {
            "State": (self._state, pb.StateRequest),
            "Owner": (self._owner, pb.OwnerRequest),
            "Watch": (self._watch, pb.WatchRequest),
            "Claim": (self._claim, pb.ClaimRequest),
            "Transfer": (self._transfer, pb.TransferRequest),
            "Takeover": (self._takeover, pb.TransferRequest),
            "Release": (self._release, pb.ReleaseRequest),
            "Put": (self._put, pb.PutRequest),
            "Published": (self._published, pb.PublishedRequest),
            "OwnedBy": (self._owned_by, pb.OwnedByRequest),
            "Register": (self._register, pb.LeaseRequest),
            "Renew": (self._renew, pb.LeaseRequest),
            "Expire": (self._expire, pb.LeaseRequest),
            "Lease": (self._lease, pb.LeaseQuery),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._answering(behaviour),
                request_deserializer=request.FromString,
                response_serializer=_serialize,
            )
            for name, (behaviour, request) in methods.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def _state(self, request: pb.StateRequest, caller: str) -> pb.DirectoryState:
        return state_message(await self._directory.state())

    async def _owner(self, request: pb.OwnerRequest, caller: str) -> pb.Record:
        session_id = check_session_id(request.session_id)
        return record_message(await self._directory.owner(session_id))

    async def _watch(self, request: pb.WatchRequest, caller: str) -> pb.Record:
        session_id = check_session_id(request.session_id)
        seen = record_value(request.seen, session_id)
        limits.check_range("watch.timeout", request.timeout_ms, 0, int(WATCH_S_MAX * 1000), "ms")
        if self._watchers >= WATCHERS_MAX:
            raise NodeBusyError(f"{self._watchers} calls wait for a change, as many as may")
        self._watchers += 1
        try:
            found = await self._directory.watch(session_id, seen, request.timeout_ms / 1000)
        finally:
            self._watchers -= 1
        return record_message(found)

    async def _claim(self, request: pb.ClaimRequest, caller: str) -> pb.TokenReply:
        session_id, nonce = check_session_id(request.session_id), nonce_value(request.nonce)
        return _token(await self._directory.claim(session_id, caller, nonce))

    async def _transfer(self, request: pb.TransferRequest, caller: str) -> pb.TokenReply:
        session_id, nonce = check_session_id(request.session_id), nonce_value(request.nonce)
        token, owner = token_value(request.token), caller
        if request.store:
            # Only who owns it may give it away.
            await self._require_callers(session_id, token, caller)
            owner = store_owner(request.store)
        return _token(await self._directory.transfer(session_id, token, owner, nonce))

    async def _takeover(self, request: pb.TransferRequest, caller: str) -> pb.TokenReply:
        session_id, nonce = check_session_id(request.session_id), nonce_value(request.nonce)
        token = token_value(request.token)
        return _token(await self._directory.takeover(session_id, token, caller, nonce))

    async def _release(self, request: pb.ReleaseRequest, caller: str) -> pb.ReleaseReply:
        session_id, token = check_session_id(request.session_id), token_value(request.token)
        await self._require_callers(session_id, token, caller)
        await self._directory.release(session_id, token)
        return pb.ReleaseReply()

    async def _put(self, request: pb.PutRequest, caller: str) -> pb.PutReply:
        session_id, token = check_session_id(request.session_id), token_value(request.token)
        await self._require_callers(session_id, token, caller)
        await self._directory.put(session_id, token, request.value)
        return pb.PutReply()

    async def _published(self, request: pb.PublishedRequest, caller: str) -> pb.PublishedReply:
        found = await self._directory.published(check_session_id(request.session_id))
        if found is None:
            return pb.PublishedReply()
        return pb.PublishedReply(token=token_message(found.token), value=found.value)

    async def _owned_by(self, request: pb.OwnedByRequest, caller: str) -> pb.OwnedByReply:
        node = limits.check_name("owned_by.node", request.node)
        if request.after:
            check_session_id(request.after)
        size = request.page_size or PAGE_MAX
        page = await self._directory.owned_page(node, request.after, size)
        return pb.OwnedByReply(entries=[owned_message(entry) for entry in page])

    async def _register(self, request: pb.LeaseRequest, caller: str) -> pb.DirectoryState:
        incarnation = incarnation_value(request.incarnation)
        ttl_s = request.ttl_ms / 1000
        return state_message(await self._directory.register(caller, incarnation, ttl_s))

    async def _renew(self, request: pb.LeaseRequest, caller: str) -> pb.DirectoryState:
        incarnation = incarnation_value(request.incarnation)
        ttl_s = request.ttl_ms / 1000
        return state_message(await self._directory.renew(caller, incarnation, ttl_s))

    async def _expire(self, request: pb.LeaseRequest, caller: str) -> pb.ExpireReply:
        await self._directory.expire(caller, incarnation_value(request.incarnation))
        return pb.ExpireReply()

    async def _lease(self, request: pb.LeaseQuery, caller: str) -> pb.LeaseReply:
        node = limits.check_name("lease.node", request.node)
        return lease_message(await self._directory.lease(node))

    async def _require_callers(self, session_id: str, token: OwnershipToken, caller: str) -> None:
        entry = await self._directory.owner(session_id)
        if isinstance(entry, Ownership) and entry.token == token and entry.node != caller:
            raise StaleTokenError(f"session {session_id}: node {caller} does not own it")

    def _answering(self, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def answer(request: Any, context: _Context) -> Any:  # noqa: ANN401 - any message
            try:
                caller = self._gate.admit(f"/{SERVICE}/", context).name
                return await behaviour(request, caller)
            except KvpackError as error:
                await refuse(context, error)

        return answer


def _token(token: OwnershipToken) -> pb.TokenReply:
    return pb.TokenReply(token=token_message(token))


def _serialize(message: Any) -> bytes:  # noqa: ANN401 - any message
    encoded: bytes = message.SerializeToString()
    return encoded
