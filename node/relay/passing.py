"""The asking end: a request about a session that another node owns goes there, and back.

What may be done twice is asked again: a connection that never came about, a node that says the
session is not there any more (421, before it did anything), and what only reads. All else is asked
once; where no answer came nobody knows what was done, and the client is told so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import grpc.aio

from node.client import WORK_S
from node.config import Address
from node.directory import Directory, Ownership
from node.errors import CredentialsError, SessionMovedError
from node.http.access import Call
from node.http.body import read_body
from node.http.errors import ApiError
from node.http.hangup import ClientGone, unless_gone, watching
from node.http.limits import WRITE_S
from node.parked import identity_of
from node.pb.v1 import relay_pb2 as pb
from node.placement.publishing import read_node
from node.relay.messages import REQUEST_HEADERS, SERVICE, Headers, Passed, header_values
from node.relay.values import Here

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

#: How long a session is followed that is being handed over, until the client is to come again.
FOLLOW_S: Final = 10.0

#: How long the owner may take to let itself be connected to.
CONNECT_S: Final = 5.0

#: Between two looks at who owns it.
PAUSE_S: Final = 0.2

#: 421: that node is not the one to ask either.
_MISDIRECTED: Final = 421

#: What a node answers that does not pass requests on for this one, or has no HTTP port.
_NOT_FOR_US: Final = frozenset({grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED})


class _Unsent(Exception):
    """Nothing was done there: it may be asked again."""


class Relay:
    """Passes requests on.

    Args:
        node: This one.
        directory: Who owns what, and where nodes say they are.
        connect: Opens a channel to another node.
        tenant: The only one whose requests are passed on.
    """

    def __init__(
        self,
        node: str,
        directory: Directory,
        connect: Callable[[str, Address], grpc.aio.Channel],
        tenant: str,
    ) -> None:
        self._node = node
        self._directory = directory
        self._connect = connect
        self._tenant = tenant
        #: Requests that were answered by another node.
        self.passed = 0

    async def pass_on(self, call: Call, moved: SessionMovedError) -> ASGIApp | Here | None:
        """The owner's answer; HERE: this node owns it by now; None: it cannot be passed on.

        Raises:
            ApiError: 503 with ``Retry-After``: the owner is away, or changes all the time.
            DirectoryError: Nobody can be asked who the owner is.
            ClientGone: The client hung up.
        """
        if call.tenant != self._tenant:
            return None
        passed = await _passed(call)
        return await unless_gone(call.request.receive, self._follow(passed, moved))

    async def _follow(self, passed: Passed, moved: SessionMovedError) -> ASGIApp | Here | None:
        end_s = time.monotonic() + FOLLOW_S
        owner = moved.owner
        while True:
            place = await self._where(moved)
            if place is None or isinstance(place, Here):
                return place
            owner, address = place
            try:
                return await self._ask(owner, address, passed)
            except _Unsent as unsent:
                if time.monotonic() >= end_s:
                    raise _away(owner, str(unsent)) from None
            except CredentialsError:
                # Not pinned here: the client may still know the way.
                return None
            await asyncio.sleep(PAUSE_S)

    async def _where(self, moved: SessionMovedError) -> tuple[str, Address] | Here | None:
        """The owner and its address. None: a store has it, nobody, or a node that says nothing."""
        record = await self._directory.owner(moved.session_id)
        if not isinstance(record, Ownership) or identity_of(record.node) is not None:
            return None
        if record.node == self._node:
            return Here.HERE
        state = await read_node(self._directory, record.node)
        if state is None:
            return None
        if state.is_away:
            raise _away(record.node, "its lease is over")
        return record.node, Address.parse(state.address)

    async def _ask(self, owner: str, address: Address, passed: Passed) -> ASGIApp | None:
        """One try.

        Raises:
            _Unsent: Nothing was done there.
            ApiError: Nobody knows what was done.
        """
        channel = self._connect(owner, address)
        answer: RelayedAnswer | None = None
        try:
            try:
                async with asyncio.timeout(CONNECT_S):
                    await channel.channel_ready()
            except TimeoutError:
                raise _Unsent("it cannot be reached") from None
            method = channel.stream_stream(
                f"/{SERVICE}/Call",
                request_serializer=pb.RelayPiece.SerializeToString,
                response_deserializer=pb.RelayPart.FromString,
            )
            replies = method(passed.pieces(), timeout=WORK_S)
            start = await _start(replies, owner, passed)
            if start is None:
                return None
            self.passed += 1
            answer = RelayedAnswer(channel, replies, start, owner)
            return answer
        finally:
            if answer is None:
                await channel.close()


async def _start(replies: Any, owner: str, passed: Passed) -> pb.RelayStart | None:  # noqa: ANN401
    """The start of an answer; None: the owner does not answer for this node."""
    try:
        part = await replies.read()
    except grpc.aio.AioRpcError as error:
        if error.code() in _NOT_FOR_US:
            log.info("node %s does not answer for this one: %s", owner, error.code().name)
            return None
        if passed.method == "GET":
            raise _Unsent("it broke off") from None
        raise _away(owner, "it broke off; what it did is not known") from None
    if part is grpc.aio.EOF or not part.HasField("start"):
        raise _away(owner, "it gave no answer")
    start: pb.RelayStart = part.start
    if start.status == _MISDIRECTED:
        raise _Unsent("it does not own it any more")
    return start


class RelayedAnswer:
    """The owner's answer as an ASGI application. It ends the call in every case."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        replies: Any,  # noqa: ANN401 - gRPC's
        start: pb.RelayStart,
        owner: str,
    ) -> None:
        self._channel = channel
        self._replies = replies
        self.status = int(start.status)
        self.headers: Headers = [
            *(one for one in header_values(start.headers) if one[0] != b"x-kvpack-node"),
            (b"x-kvpack-node", owner.encode()),
        ]
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what comes, as it comes. An answer that breaks off is cut off: it is not whole.

        Raises:
            ClientGone: The client went, or does not read.
        """
        begin = {"type": "http.response.start", "status": self.status, "headers": self.headers}
        try:
            async with watching(receive) as leaving:
                await _write(send, begin)
                async for part in self._parts(leaving):
                    await _write(
                        send, {"type": "http.response.body", "body": part, "more_body": True}
                    )
                await _write(send, {"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._replies.cancel()
            await self._channel.close()

    async def _parts(self, leaving: asyncio.Task[None]) -> AsyncIterator[bytes]:
        while True:
            reading = asyncio.ensure_future(self._replies.read())
            try:
                await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    raise ClientGone
                part = reading.result()
            except grpc.aio.AioRpcError as error:
                log.warning("node %s broke an answer off: %s", self._owner, error.code().name)
                raise ClientGone from None
            finally:
                reading.cancel()
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                    await reading
            if part is grpc.aio.EOF:
                return
            yield bytes(part.body)


async def _passed(call: Call) -> Passed:
    """The request of ``call``; its body is kept by the door."""
    request = call.request
    body = b"" if request.method in ("GET", "HEAD") else await read_body(request)
    headers = tuple(one for one in request.headers.raw if one[0] in REQUEST_HEADERS)
    method = "GET" if request.method == "HEAD" else request.method
    scope = request.scope
    return Passed(method, scope["raw_path"], scope["query_string"], headers, call.tenant, body)


async def _write(send: Send, message: MutableMapping[str, Any]) -> None:
    try:
        async with asyncio.timeout(WRITE_S):
            await send(message)
    except TimeoutError:
        raise ClientGone from None


def _away(owner: str, why: str) -> ApiError:
    return ApiError(
        503, "owner_away", f"node {owner} owns the session: {why}",
        headers={"Retry-After": "1", "x-kvpack-node": owner},
    )  # fmt: skip
