"""One stream over the socket plane, as the feed writes it: like a call of gRPC, without its copies.

A thread sends, and is a few pieces behind. It asks for more only when it is about to run out: the
loop is woken for every fourth piece, not for each. So what is bounded is not how long a write waits
for room, but how long the thread takes over each piece: by the measure of the target, which allows
1 Mbit/s.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final

from node.config import Address
from node.dataplane import blocking
from node.dataplane.frames import HELLO_BYTES, TAKEN_BYTES, DisturbedError, Tags
from node.dataplane.offered import Offered
from node.errors import PeerUnavailableError
from node.migration.wire import Meter
from node.pb.v1 import migration_pb2 as pb

#: How long the target may take to let a connection come about.
CONNECT_S: Final = 5.0

#: Pieces that wait for the sending thread, at most, and at how few of them the loop is woken.
_AHEAD: Final = 6
_LOW: Final = 2

#: How often it is looked whether the thread is late.
_LOOK_S: Final = 1.0

_Item = tuple[bytes, bytes | memoryview]


class SocketCall:
    """A stream, opened by its first write: that piece names the transfer, the ticket does it here.

    Args:
        offered: The ticket.
        taken: Asks over mTLS how many objects the target has.
        meter: Counts the bytes.

    Attributes:
        sent_s: When each piece after the first was handed to the kernel, in order, by
            ``time.monotonic()``. Who reads a moment takes it out.
        reached: Whether somebody answered at the ticket's address.
    """

    def __init__(self, offered: Offered, taken: Callable[[], Awaitable[int]], meter: Meter) -> None:
        self._offered = offered
        self._taken = taken
        self._meter = meter
        self._tags = Tags(offered.frame_key)
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._waits = False
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._answered: asyncio.Future[bytes] = self._loop.create_future()
        self._connection: socket.socket | None = None
        self._late_s = math.inf
        self._look: asyncio.TimerHandle | None = None
        self.sent_s: deque[float] = deque()
        self.reached = False

    async def write(self, piece: bytes | memoryview) -> None:
        """Hand a piece over, which is sent from where it lies; returns when there is room.

        Raises:
            PeerUnavailableError: The stream broke, or the target does not read any more.
        """
        if self._connection is None:
            await self._open()
            return
        await self._put(piece)

    def require_open(self) -> None:
        """Look whether what was written may yet be sent, and more. Not after the last piece.

        Raises:
            PeerUnavailableError: The stream broke, or the target does not read any more.
        """
        if self._answered.done():
            raise self._why()
        # The target speaks once, when it has everything. The thread hears of an end only when it
        # sends.
        if self._connection is not None and blocking.has_ended(self._connection):
            raise self._broken(ConnectionAbortedError("ended early"))

    async def done_writing(self) -> None:
        """Say that this was all."""
        await self._put(b"")

    def __await__(self) -> Generator[Any, None, pb.PushReply]:
        return self._answer().__await__()

    def cancel(self) -> None:
        """End the stream; nothing happens where it has ended."""
        if self._look is not None:
            self._look.cancel()
        if self._connection is not None:
            blocking.end(self._connection)
        self._queue.put(None)
        self._answered.cancel()

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await _connect(self._offered.address)
                self.reached = True
                try:
                    await self._loop.sock_sendall(connection, self._offered.hello())
                    blocking.prepare(connection)
                except BaseException:
                    connection.close()
                    raise
        except (OSError, UnicodeError) as error:
            # A name that cannot be one, too: the address is the target's word.
            raise self._broken(error) from None
        self._connection = connection
        self._meter.wire_bytes += HELLO_BYTES
        self._look = self._loop.call_later(_LOOK_S, self._end_late)
        threading.Thread(
            target=self._send_all, args=(connection,), name="data plane", daemon=True
        ).start()

    async def _put(self, piece: bytes | memoryview) -> None:
        while self._queue.qsize() >= _AHEAD and not self._answered.done():
            self._room.clear()
            # In this order: the thread looks whether anybody waits after it has taken a piece.
            self._waits = True
            if self._queue.qsize() > _LOW:
                await self._room.wait()
        self.require_open()
        header = self._tags.frame_header(piece)
        self._meter.wire_bytes += len(header) + len(piece)
        self._queue.put((header, piece))

    async def _answer(self) -> pb.PushReply:
        try:
            self._tags.require_taken(await asyncio.shield(self._answered))
        except (OSError, DisturbedError) as error:
            raise self._broken(error) from None
        self._meter.wire_bytes += TAKEN_BYTES
        return pb.PushReply(received_objects=await self._taken())

    def _why(self) -> PeerUnavailableError:
        failure = None if self._answered.cancelled() else self._answered.exception()
        return self._broken(failure or ConnectionAbortedError("ended early"))

    def _broken(self, error: BaseException) -> PeerUnavailableError:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return PeerUnavailableError(f"{self._offered.where}: {why}")

    def _send_all(self, connection: socket.socket) -> None:
        with contextlib.closing(connection):
            try:
                while (item := self._queue.get()) is not None:
                    if self._waits and self._queue.qsize() <= _LOW:
                        self._waits = False
                        self._tell(self._room.set)
                    header, piece = item
                    self._allow(len(piece))
                    blocking.send(connection, header, piece)
                    self.sent_s.append(time.monotonic())
                    self._late_s = math.inf
                    if not piece:
                        # What the kernel holds has yet to cross the link.
                        self._allow(connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
                        answer = bytearray(TAKEN_BYTES)
                        blocking.fill(connection, memoryview(answer))
                        self._late_s = math.inf
                        self._tell(self._note, bytes(answer))
                        return
            except OSError as error:
                self._tell(self._fail, error)
            except Exception as error:  # noqa: BLE001 - untold, who writes would wait for ever.
                self._tell(self._fail, ConnectionAbortedError(type(error).__name__))

    def _allow(self, size_bytes: int) -> None:
        self._late_s = time.monotonic() + blocking.STALL_S + size_bytes / blocking.FLOOR_BYTES_PER_S

    def _end_late(self) -> None:
        if self._connection is not None and time.monotonic() > self._late_s:
            self._fail(TimeoutError("does not read any more"))
            blocking.end(self._connection)
            return
        self._look = self._loop.call_later(_LOOK_S, self._end_late)

    def _tell(self, what: Callable[..., Any], *arguments: object) -> None:
        # The loop may be gone where a process ends at once.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what, *arguments)

    def _note(self, answer: bytes) -> None:
        if not self._answered.done():
            self._answered.set_result(answer)

    def _fail(self, error: OSError) -> None:
        if not self._answered.done():
            self._answered.set_exception(error)
            self._answered.exception()  # Whether or not somebody asks.
        self._room.set()


async def _connect(address: Address) -> socket.socket:
    """A connected socket, not blocking.

    Raises:
        OSError: Nobody listens there, or there is no such host.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, place = found[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        await loop.sock_connect(connection, place)
    except BaseException:
        connection.close()
        raise
    return connection
