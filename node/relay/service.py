"""The owner's end: a request that another node passed on, answered by this node's own routes.

Whoever calls is pinned as a client, which may do all of this over the Session service anyway: so
passing on gives nobody a right that it did not have. It speaks for the one tenant whose key both
nodes hold, and never for an administrator. What is answered here is never passed on again, so no
request goes round in a circle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import grpc.aio

from kvpack.errors import KvpackError
from node.errors import NodeBusyError, PeerRefusedError
from node.pb.v1 import relay_pb2 as pb
from node.relay.messages import SERVICE, Passed, answer_start, read_passed, split
from node.relay.values import RELAYED, Relayed
from node.status import refuse
from node.trust import Gate
from node.unexpected import unexpected

if TYPE_CHECKING:
    from starlette.types import ASGIApp

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]

#: Requests of other nodes that are answered at once.
CALLS_MAX: Final = 128

#: How long another node may take to send one whole.
RECEIVE_S: Final = 30.0

#: Parts that wait for the other node to read.
_PARTS: Final = 4


class RelayService:
    """Answers what other nodes pass on.

    Args:
        app: This node's routes, with its door.
        gate: Who may.
        tenant: The one that other nodes may speak for.
    """

    def __init__(self, app: ASGIApp, gate: Gate, tenant: str) -> None:
        self._app = app
        self._gate = gate
        self._tenant = tenant
        self._calls = 0

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's handlers."""
        call = grpc.stream_stream_rpc_method_handler(
            self._call,
            request_deserializer=pb.RelayPiece.FromString,
            response_serializer=pb.RelayPart.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Call": call})

    async def _call(
        self, pieces: AsyncIterator[pb.RelayPiece], context: _Context
    ) -> AsyncIterator[pb.RelayPart]:
        try:
            caller = self._gate.admit(f"/{SERVICE}/Call", context).name
            if self._calls >= CALLS_MAX:
                raise NodeBusyError(f"{self._calls} requests of other nodes are answered now")
            passed = await _received(pieces)
            if passed.tenant != self._tenant:
                raise PeerRefusedError(f"{caller}: speaks for tenant {passed.tenant!r}")
        except KvpackError as error:
            await refuse(context, error)
        self._calls += 1
        try:
            async for part in _answered(self._app, passed, Relayed(self._tenant, caller)):
                yield part
        finally:
            self._calls -= 1


async def _received(pieces: AsyncIterator[pb.RelayPiece]) -> Passed:
    try:
        async with asyncio.timeout(RECEIVE_S):
            return await read_passed(pieces)
    except TimeoutError:
        raise NodeBusyError(f"a request was not passed on within {RECEIVE_S:.0f} s") from None


async def _answered(app: ASGIApp, passed: Passed, relayed: Relayed) -> AsyncIterator[pb.RelayPart]:
    """What ``app`` sends, until it ends; whoever stops reading ends it."""
    parts: asyncio.Queue[pb.RelayPart] = asyncio.Queue(_PARTS)
    unread = [{"type": "http.request", "body": passed.body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return unread.pop()
        # A caller that hangs up cancels the task, and with it whoever waits here.
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await parts.put(answer_start(message["status"], message.get("headers", ())))
        for part in split(bytes(message.get("body", b""))):
            await parts.put(pb.RelayPart(body=part))

    task = asyncio.ensure_future(app(_scope(passed, relayed), receive, send))
    try:
        while not (task.done() and parts.empty()):
            waiting = asyncio.ensure_future(parts.get())
            try:
                await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    yield waiting.result()
            finally:
                waiting.cancel()
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (failure := task.exception()) is not None:
            # The answer was a 500, made by the door; why is for this node's log.
            log.error("a request of node %s failed: %s", relayed.node, unexpected(failure))


def _scope(passed: Passed, relayed: Relayed) -> dict[str, Any]:
    """The request, as ASGI has it."""
    length = (b"content-length", str(len(passed.body)).encode())
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": passed.method,
        "scheme": "http",
        "path": passed.path,
        "raw_path": passed.raw_path,
        "query_string": passed.query,
        "root_path": "",
        "headers": [*passed.headers, length],
        "client": None,
        "server": None,
        RELAYED: relayed,
    }
