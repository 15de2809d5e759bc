"""The listener of the plain gRPC plane: a second port without TLS, and one call on it.

The hello stands in the call's metadata, so nothing of a stream is read before its token was seen.
What gRPC itself parses before that (HTTP/2 frames, a compressed header of at most 1 KiB) it bounds
by these options; it knows no bound for each address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio

from node.config import Address
from node.dataplane.frames import TAG_BYTES, DisturbedError, Tags
from node.dataplane.intake import Intake
from node.dataplane.options import Plane
from node.errors import ListenError
from node.migration.wire import PIECE_BYTES_MAX

SERVICE: Final = "node.v1.Plane"
METHOD: Final = f"/{SERVICE}/Push"

#: Metadata of the call: the 48 bytes of a hello.
HELLO_KEY: Final = "kvpack-plane-bin"

_CONNECTIONS_MAX: Final = 20
_STREAMS_MAX: Final = 8
_METADATA_BYTES_MAX: Final = 1024

#: A connection that has said nothing for so long, or has no call for so long, is closed.
_WAIT_MS: Final = 5_000

#: Each call begins that time anew. So a connection of this age takes no new call; one that it has
#: goes on to its end.
_AGE_MS: Final = 20_000

_Context = grpc.aio.ServicerContext[Any, Any]


def _options() -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", PIECE_BYTES_MAX + TAG_BYTES),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", _CONNECTIONS_MAX),
        ("grpc.max_concurrent_streams", 1),
        ("grpc.max_metadata_size", _METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES_MAX),
        ("grpc.server_handshake_timeout_ms", _WAIT_MS),
        ("grpc.max_connection_idle_ms", _WAIT_MS),
        ("grpc.max_connection_age_ms", _AGE_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


class GrpcPlane:
    """One port. It is taken from the start, and answers once it is started.

    Raises:
        ListenError: The address cannot be bound.
    """

    def __init__(self, address: Address) -> None:
        self._server = grpc.aio.server(options=_options(), maximum_concurrent_rpcs=_STREAMS_MAX)
        try:
            port = self._server.add_insecure_port(str(address))
        except RuntimeError:
            port = 0
        if port == 0:
            raise ListenError(f"{address}: cannot listen there (in use, or not ours)")
        self.address = Address(address.host, port)

    async def start(self, intake: Intake) -> None:
        """Let in whoever shows a ticket of ``intake``."""
        intake.addresses[Plane.GRPC_PLAIN] = self.address

        async def push(messages: AsyncIterator[bytes], context: _Context) -> bytes:
            return await _push(intake, messages, context)

        handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(push)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Push": handler}),)
        )
        await self._server.start()

    async def close(self) -> None:
        """Close the port and every stream."""
        await self._server.stop(None)


async def _push(intake: Intake, messages: AsyncIterator[bytes], context: _Context) -> bytes:
    shown = [value for key, value in context.invocation_metadata() or () if key == HELLO_KEY]
    hello = shown[0] if len(shown) == 1 and isinstance(shown[0], bytes) else b""
    ticket = intake.admit(Plane.GRPC_PLAIN, hello)
    if ticket is not None:
        tags = Tags(ticket.frame_key)
        reading = _Reading(messages, tags)
        with intake.streaming():
            if await intake.take(ticket, reading.pieces(), reading.end):
                # Only wakes the source, which then asks over mTLS how much there is.
                return tags.taken()
    await context.abort(grpc.StatusCode.CANCELLED)
    raise RuntimeError("abort returned")


class _Reading:
    """The frames of one call, read by the task that made this."""

    def __init__(self, messages: AsyncIterator[bytes], tags: Tags) -> None:
        self._messages = messages
        self._tags = tags
        self._task = asyncio.current_task()
        self._waits = False
        self._ended = False

    def end(self) -> None:
        """Wait for no further message. What is done with one that came is not broken off."""
        self._ended = True
        if self._waits and self._task is not None:
            self._task.cancel()

    async def pieces(self) -> AsyncIterator[memoryview]:
        """The pieces up to the end of the stream.

        Raises:
            DisturbedError: It is not what the source wrote, or ended before its end.
        """
        while (message := await self._next()) is not None:
            view = memoryview(message)
            self._tags.require(view[:TAG_BYTES], view[TAG_BYTES:])
            if len(view) == TAG_BYTES:
                return
            yield view[TAG_BYTES:]
        raise DisturbedError("it ended early")

    async def _next(self) -> bytes | None:
        if self._ended:
            return None
        self._waits = True
        try:
            return await anext(self._messages, None)
        except asyncio.CancelledError:
            # By the source, by a node that stops, or by us: only then the call is answered.
            if not self._ended or self._task is None or self._task.uncancel():
                raise
            return None
        finally:
            self._waits = False
