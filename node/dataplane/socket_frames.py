"""Frames off a socket: a thread reads them, another one takes them, and the loop hears of it.

The reading thread is at most ``BUFFERS`` pieces ahead: a target that does not come on stops
reading, and TCP stops the source. A buffer is filled again only when its piece was taken. The
loop lends a thread to take them for a moment at a time: a change between the two for each chunk
would cost a tenth of what opening it costs, and the loop has others to serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from kvpack.errors import KvpackError
from node.dataplane import blocking
from node.dataplane.blocking import FLOOR_BYTES_PER_S
from node.dataplane.frames import FRAME_BYTES, DisturbedError, Tags, read_frame_header
from node.migration.streams import Burst, Take
from node.migration.wire import Piece

#: One is being filled and one opened; the others let neither wait for the other's last bytes.
BUFFERS: Final = 4

#: A frame that has begun may take this long, and as long as its piece takes at a crawl.
#: Between two frames the source may be computing: that ends with the transfer's lease.
FRAME_S: Final = 30.0

#: How often it is looked whether a frame is late. Not by the kernel's timer for a read: that begins
#: anew with each byte on some systems, and with each read on all of them.
_LOOK_S: Final = 1.0

#: For so long the loop lends a thread; and a thread with nothing to do waits for the next frame.
_BURST_S: Final = 0.05
_LINGER_S: Final = 0.002


@dataclass(frozen=True, slots=True, repr=False)
class _Arrived:
    """One frame whose tag was right; ``length`` 0 is the end."""

    buffer: bytearray
    length: int


class FrameReader:
    """The frames of one connection, until their end or until something is wrong with them.

    Args:
        connection: Connected, and past its hello.
        tags: Of the stream.
        decode: Reads a piece.
    """

    def __init__(
        self, connection: socket.socket, tags: Tags, decode: Callable[[memoryview], Piece]
    ) -> None:
        self._connection = connection
        self._tags = tags
        self._decode = decode
        self._loop = asyncio.get_running_loop()
        self._free: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[_Arrived | Exception] = queue.SimpleQueue()
        self._left: bytearray | None = None
        self._waits = False
        self._ended = False
        self._refused: KvpackError | None = None
        self._changed = asyncio.Event()
        self._wakes = blocking.Wakes(connection)
        self._ahead = b""
        self._late_s = math.inf
        self._look = self._loop.call_later(_LOOK_S, self._end_late)
        self._thread = threading.Thread(target=self._read_all, name="data plane", daemon=True)
        for _ in range(BUFFERS):
            self._free.put(bytearray())

    async def bursts(self) -> AsyncIterator[Burst]:
        """The pieces in order, some at a time.

        Raises:
            DisturbedError: In a burst: the stream broke, or is not what the source wrote.
            KvpackError: Between two: a frame of the source's holds no piece.
        """
        self._thread.start()
        while not self._ended:
            await self._some()
            yield self._burst
            if self._refused is not None:
                raise self._refused

    async def close(self) -> None:
        """End the connection and the thread."""
        self._look.cancel()
        if not self._ended:
            # After its end the source waits for an answer alone, which a reset might destroy.
            blocking.reset_when_closed(self._connection)
        blocking.end(self._connection)
        self._free.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    async def _some(self) -> None:
        """Wait for a frame."""
        self._changed.clear()
        # In this order: the thread looks whether anybody waits after it has put its frame there.
        self._waits = True
        if self._arrived.empty():
            await self._changed.wait()
        self._waits = False

    async def _burst(self, take: Take) -> Piece | None:
        return await asyncio.to_thread(self._take_some, take)

    def _take_some(self, take: Take) -> Piece | None:
        if self._left is not None:
            self._free.put(self._left)
            self._left = None
        until_s = time.monotonic() + _BURST_S
        while time.monotonic() < until_s:
            try:
                arrived = self._arrived.get(timeout=_LINGER_S)
            except queue.Empty:
                break
            if isinstance(arrived, Exception):
                raise DisturbedError(str(arrived)) from arrived
            if not arrived.length:
                self._ended = True
                break
            try:
                piece = self._decode(memoryview(arrived.buffer)[: arrived.length])
            except KvpackError as error:
                self._refused = error
                break
            if not take(piece):
                self._left = arrived.buffer
                return piece
            self._free.put(arrived.buffer)
        return None

    def _read_all(self) -> None:
        try:
            while (buffer := self._free.get()) is not None:
                arrived = self._read(buffer)
                self._tell(arrived)
                if not arrived.length:
                    return
        except (OSError, DisturbedError) as error:
            self._tell(error)
        except Exception as error:  # noqa: BLE001 - untold, who takes would wait for ever.
            # Such as no memory for a buffer.
            self._tell(DisturbedError(f"cannot be read here ({type(error).__name__})"))

    def _read(self, buffer: bytearray) -> _Arrived:
        length, tag = self._read_header()
        self._late_s = time.monotonic() + FRAME_S + length / FLOOR_BYTES_PER_S
        if len(buffer) < length + FRAME_BYTES:
            buffer = bytearray(length + FRAME_BYTES)
        with memoryview(buffer) as view:
            room = view[: length + FRAME_BYTES]
            got = blocking.fill_and_peek(self._connection, self._wakes, room, length)
            self._late_s = math.inf
            with view[:length] as piece:
                self._tags.require(tag, piece)
            self._ahead = bytes(view[length:got])
        return _Arrived(buffer, length)

    def _read_header(self) -> tuple[int, bytes]:
        """What stands before the next piece; some of it came with the piece before.

        It is not read before that piece's own tag was right, nor before there is a buffer for its
        piece: until then nobody waits for it.
        """
        ahead, self._ahead = self._ahead, b""
        if len(ahead) == FRAME_BYTES:
            return read_frame_header(ahead)
        header = bytearray(FRAME_BYTES)
        header[: len(ahead)] = ahead
        got = len(ahead)
        self._wakes.after(1)
        with memoryview(header) as view:
            if not got:
                got = self._connection.recv_into(view)
            self._late_s = time.monotonic() + FRAME_S
            if not got:
                raise ConnectionAbortedError("ended early")
            blocking.fill(self._connection, view[got:])
        return read_frame_header(bytes(header))

    def _end_late(self) -> None:
        if time.monotonic() > self._late_s:
            blocking.end(self._connection)
        self._look = self._loop.call_later(_LOOK_S, self._end_late)

    def _tell(self, arrived: _Arrived | Exception) -> None:
        self._arrived.put(arrived)
        if self._waits:
            self._waits = False
            # The loop may be gone where a process ends at once.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._changed.set)
