"""A TCP link in user space: slow, late, cut and healed, or one that stops carrying anything.

It knows bytes, not packets: loss cannot be had here (``packets`` has that).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence

from node.config import Address

READ_BYTES = 1 << 14

#: With the sockets' own buffers about 300 KiB are on their way at most.
QUEUE_READS = 8
BUFFER_BYTES = 1 << 16


class Link:
    """Carries connections to ``target``.

    Args:
        target: Where to.
        cuts: Bytes towards the target after which a connection breaks, one by one; later ones hold.
        delay_s: One way, for every byte.
        bytes_per_s: Towards the target; 0 for as fast as it goes.
    """

    def __init__(
        self,
        target: Address,
        cuts: Sequence[int] = (),
        *,
        delay_s: float = 0.0,
        bytes_per_s: float = 0.0,
    ) -> None:
        self.target = target
        self.cuts = list(cuts)
        self.delay_s = delay_s
        self.bytes_per_s = bytes_per_s
        self.carries = asyncio.Event()
        self.carries.set()
        self.broken = 0
        self.carried = 0

    @contextlib.asynccontextmanager
    async def open(self):
        """The address to connect to instead."""
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        try:
            yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accepted(self, reader, writer) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader, writer) -> None:
        budget = self.cuts.pop(0) if self.cuts else None
        ours = writer.get_extra_info("socket")
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        try:
            there, back = await asyncio.open_connection(self.target.host, self.target.port)
        except OSError:
            writer.transport.abort()
            return
        ways = [
            asyncio.ensure_future(self._carry(reader, back, budget, self.bytes_per_s)),
            asyncio.ensure_future(self._carry(there, writer, None, 0.0)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            writer.transport.abort()
            back.transport.abort()

    async def _carry(self, reader, writer, budget, bytes_per_s) -> None:
        # What is on its way is bounded: a sender must feel that nobody reads.
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUE_READS)
        loop = asyncio.get_running_loop()
        carrier = asyncio.ensure_future(self._deliver(line, writer))
        try:
            while data := await reader.read(READ_BYTES):
                if budget is not None:
                    budget -= len(data)
                    if budget < 0:
                        self.broken += 1
                        return
                if bytes_per_s:
                    await asyncio.sleep(len(data) / bytes_per_s)
                await line.put((loop.time() + self.delay_s, data))
            await line.join()
        except OSError:
            return
        finally:
            carrier.cancel()

    async def _deliver(self, line, writer) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await line.get()
            await self.carries.wait()
            await asyncio.sleep(max(0.0, due - loop.time()))
            self.carried += len(data)
            writer.write(data)
            await writer.drain()
            line.task_done()
