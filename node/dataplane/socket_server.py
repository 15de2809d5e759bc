"""The listener of the socket plane: who may wait there, for how long, and what is read of them.

Before a connection has shown a token exactly the 48 bytes of a hello are read of it, within 5 s,
from at most 16 connections at once and 4 of one address. Whoever is beyond that, or shows anything
else, is closed without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Final

from node.config import Address
from node.dataplane import blocking
from node.dataplane.frames import HELLO_BYTES, Tags
from node.dataplane.intake import Intake, read_piece
from node.dataplane.options import Plane
from node.dataplane.socket_frames import FrameReader
from node.dataplane.tickets import Ticket
from node.errors import ListenError

log = logging.getLogger(__name__)

#: How long a connection may take over its hello.
HELLO_S: Final = 5.0

#: Connections that have not shown a token yet: in all, and of one address.
WAITING_MAX: Final = 16
WAITING_PER_ADDRESS: Final = 4

#: Where the process has no descriptors left, others may free some until then.
_PAUSE_S: Final = 0.2


class SocketPlane:
    """One listener. It has its port from the start, and lets nobody in before it is started.

    Raises:
        ListenError: The address cannot be bound.
    """

    def __init__(self, address: Address) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._listener = socket.create_server(
                (address.host, address.port), family=family, backlog=WAITING_MAX
            )
        except OSError as error:
            raise ListenError(f"{address}: cannot listen there ({error.strerror})") from error
        self._listener.setblocking(False)
        self.address = Address(address.host, self._listener.getsockname()[1])
        self._waiting: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, intake: Intake) -> None:
        """Let in whoever shows a ticket of ``intake``."""
        intake.addresses[Plane.SOCKET] = self.address
        self._spawn(self._accept(intake))

    async def close(self) -> None:
        """Close the port and every stream."""
        self._listener.close()
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, intake: Intake) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, place = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("data plane: cannot accept: %s", error.strerror)
                await asyncio.sleep(_PAUSE_S)
                continue
            host = str(place[0])
            if self._waiting.total() >= WAITING_MAX or self._waiting[host] >= WAITING_PER_ADDRESS:
                connection.close()
                intake.refused()
                continue
            self._waiting[host] += 1
            self._spawn(self._serve(intake, connection, host))

    async def _serve(self, intake: Intake, connection: socket.socket, host: str) -> None:
        with contextlib.closing(connection):
            try:
                hello = await _read_hello(connection)
            finally:
                self._waiting[host] -= 1
                self._waiting += Counter()  # Forgets addresses of which nobody waits.
            ticket = intake.admit(Plane.SOCKET, hello)
            if ticket is not None:
                with intake.streaming():
                    await _take(intake, ticket, connection)


async def _read_hello(connection: socket.socket) -> bytes:
    """At most a hello's bytes; fewer where the connection gave no more in time."""
    loop, hello = asyncio.get_running_loop(), b""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(HELLO_S):
            while len(hello) < HELLO_BYTES:
                more = await loop.sock_recv(connection, HELLO_BYTES - len(hello))
                if not more:
                    break
                hello += more
    return hello


async def _take(intake: Intake, ticket: Ticket, connection: socket.socket) -> None:
    blocking.prepare(connection)
    tags = Tags(ticket.frame_key)
    reader = FrameReader(connection, tags, read_piece)
    try:
        if not await intake.take_bursts(ticket, reader.bursts(), lambda: blocking.end(connection)):
            return
        # Only wakes the source, which then asks over mTLS how much there is.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(connection.sendall, tags.taken())
    finally:
        await reader.close()
