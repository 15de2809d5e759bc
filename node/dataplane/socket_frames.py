"""Frames off a socket, read by a thread into a few buffers that are used again and again.

The thread is at most ``BUFFERS`` pieces ahead: a target that does not come on stops reading, and
TCP stops the source. A buffer is filled again only when its piece was taken.
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
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from node.dataplane import blocking
from node.dataplane.frames import FRAME_BYTES, DisturbedError, Tags, read_frame_header
from node.migration.wire import PIECE_BYTES_MAX

#: One is being filled and one opened; a third lets neither wait for the other's last bytes.
BUFFERS: Final = 3

#: A frame that has begun may take this long, and as long as its piece takes at a crawl: 1 Mbit/s.
#: Between two frames the source may be computing: that ends with the transfer's lease.
FRAME_S: Final = 30.0
FLOOR_BYTES_PER_S: Final = 128 << 10

#: How often it is looked whether a frame is late. Not by the kernel's timer for a read: that begins
#: anew with each byte on some systems, and with each read on all of them.
_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True, repr=False)
class _Arrived:
    """One frame whose tag was right; ``length`` 0 is the end."""

    buffer: memoryview
    length: int


class FrameReader:
    """The frames of one connection, until their end or until something is wrong with them.

    Args:
        connection: Connected, and past its hello.
        tags: Of the stream.
    """

    def __init__(self, connection: socket.socket, tags: Tags) -> None:
        self._connection = connection
        self._tags = tags
        self._loop = asyncio.get_running_loop()
        self._free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._arrived: deque[_Arrived | Exception] = deque()
        self._changed = asyncio.Event()
        self._late_s = math.inf
        self._look = self._loop.call_later(_LOOK_S, self._end_late)
        self._thread = threading.Thread(target=self._read_all, name="data plane", daemon=True)
        for _ in range(BUFFERS):
            self._free.put(memoryview(bytearray(PIECE_BYTES_MAX)))

    async def pieces(self) -> AsyncIterator[memoryview]:
        """The pieces in order, each until the next one is asked for.

        Raises:
            DisturbedError: The stream broke, or is not what the source wrote.
        """
        self._thread.start()
        while True:
            arrived = await self._next()
            if isinstance(arrived, Exception):
                raise DisturbedError(str(arrived)) from arrived
            if not arrived.length:
                return
            yield arrived.buffer[: arrived.length]
            self._free.put(arrived.buffer)

    async def close(self) -> None:
        """End the connection and the thread."""
        self._look.cancel()
        blocking.end(self._connection)
        self._free.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    async def _next(self) -> _Arrived | Exception:
        while not self._arrived:
            self._changed.clear()
            await self._changed.wait()
        return self._arrived.popleft()

    def _read_all(self) -> None:
        try:
            while (buffer := self._free.get()) is not None:
                arrived = self._read(buffer)
                self._tell(arrived)
                if not arrived.length:
                    return
        except (OSError, DisturbedError) as error:
            self._tell(error)

    def _read(self, buffer: memoryview) -> _Arrived:
        header = buffer[:FRAME_BYTES]
        got = self._connection.recv_into(header)
        self._late_s = time.monotonic() + FRAME_S
        if not got:
            raise ConnectionAbortedError("ended early")
        blocking.fill(self._connection, header[got:])
        length, tag = read_frame_header(header)
        self._late_s += length / FLOOR_BYTES_PER_S
        piece = buffer[:length]
        blocking.fill(self._connection, piece)
        self._late_s = math.inf
        self._tags.require(tag, piece)
        return _Arrived(buffer, length)

    def _end_late(self) -> None:
        if time.monotonic() > self._late_s:
            blocking.end(self._connection)
        self._look = self._loop.call_later(_LOOK_S, self._end_late)

    def _tell(self, arrived: _Arrived | Exception) -> None:
        # The loop may be gone where a process ends at once.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._note, arrived)

    def _note(self, arrived: _Arrived | Exception) -> None:
        self._arrived.append(arrived)
        self._changed.set()
