"""One stream over the plain gRPC plane, as the feed writes it.

Whatever the call says of its end is hearsay: anybody on the wire may have written it. So a failure
here is never more than a broken link; what became of the transfer is asked over mTLS.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio

from node.dataplane.frames import DisturbedError, Tags
from node.dataplane.grpc_server import HELLO_KEY, METHOD
from node.dataplane.offered import Offered
from node.errors import PeerUnavailableError
from node.migration.wire import Meter
from node.pb.v1 import migration_pb2 as pb

_OPTIONS: Final = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # A proxy of the environment's is not the peer.
    ("grpc.enable_http_proxy", 0),
]

#: Channels that are being closed.
_closing: set[asyncio.Task[None]] = set()


class GrpcCall:
    """A stream, opened by its first write: that piece names the transfer, the ticket does it here.

    Args:
        offered: The ticket.
        taken: Asks over mTLS how many objects the target has.
        meter: Counts the bytes.
        timeout_s: For the whole stream.
    """

    reached = True

    def __init__(
        self,
        offered: Offered,
        taken: Callable[[], Awaitable[int]],
        meter: Meter,
        timeout_s: float,
    ) -> None:
        self._offered = offered
        self._taken = taken
        self._meter = meter
        self._timeout_s = timeout_s
        self._tags = Tags(offered.frame_key)
        self._channel = grpc.aio.insecure_channel(str(offered.address), options=_OPTIONS)
        self._call: Any = None

    async def write(self, piece: bytes | memoryview) -> None:
        """Write a piece.

        Raises:
            PeerUnavailableError: The stream broke.
        """
        if self._call is None:
            push = self._channel.stream_unary(
                METHOD,
                request_serializer=self._meter.sent(_as_it_is),
                response_deserializer=self._meter.received(_as_it_is),
            )
            hello = ((HELLO_KEY, self._offered.hello()),)
            self._call = push(timeout=self._timeout_s, metadata=grpc.aio.Metadata(*hello))
            return
        async with self._hearsay():
            await self._call.write(b"".join((self._tags.next(piece), piece)))

    async def done_writing(self) -> None:
        """Say that this was all."""
        async with self._hearsay():
            await self._call.write(self._tags.next(b""))
            await self._call.done_writing()

    def __await__(self) -> Generator[Any, None, pb.PushReply]:
        return self._answer().__await__()

    def done(self) -> bool:
        """Whether the stream has ended, however."""
        return self._call is not None and bool(self._call.done())

    def cancel(self) -> None:
        """End the stream; nothing happens where it has ended."""
        if self._call is not None:
            self._call.cancel()
        task = asyncio.ensure_future(self._channel.close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    async def _answer(self) -> pb.PushReply:
        async with self._hearsay():
            self._tags.require_taken(await self._call)
        return pb.PushReply(received_objects=await self._taken())

    @asynccontextmanager
    async def _hearsay(self) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            # Its code tells a closed port from a stream that was ended; no word of it is believed.
            raise self._broken(error.code().name.lower()) from None
        except (asyncio.InvalidStateError, grpc.aio.UsageError, DisturbedError):
            raise self._broken("ended early") from None

    def _broken(self, why: str) -> PeerUnavailableError:
        return PeerUnavailableError(f"{self._offered.where}: {why}")


def _as_it_is(encoded: bytes) -> bytes:
    return encoded
