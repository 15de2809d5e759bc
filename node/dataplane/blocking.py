"""Blocking reads and writes of whole frames, for the threads of the socket plane.

Threads and not the loop: a read fills its buffer in one call without the interpreter's lock, and
the next frame arrives while the loop opens the one before.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
from typing import Final

#: A peer that neither sends nor takes a byte of a frame for so long is gone.
STALL_S: Final = 30.0

#: A piece may take as long as it takes at this crawl besides: 1 Mbit/s.
FLOOR_BYTES_PER_S: Final = 128 << 10

#: So much lies ready before a thread that waits for more of a piece is woken. A wake for each
#: packet is a quarter of what the way through the kernel costs both ends. Elsewhere than on Linux
#: the option also holds a read back, which is not wanted.
WAKE_BYTES: Final = 512 << 10
_WAKES_LATE: Final = sys.platform == "linux"

#: Unanswered probes between frames, where nothing may be sent for as long as a prompt takes.
_IDLE_S: Final = 20
_PROBES: Final = 3


def prepare(connection: socket.socket) -> None:
    """Make a connected socket blocking, with bounds on what it waits for."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)
    for option, value in (
        (idle, _IDLE_S),
        (getattr(socket, "TCP_KEEPINTVL", None), _IDLE_S // 2),
        (getattr(socket, "TCP_KEEPCNT", None), _PROBES),
    ):
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    limit(connection, socket.SO_SNDTIMEO, STALL_S)


def limit(connection: socket.socket, option: int, seconds: float) -> None:
    """Bound one direction by the kernel's own timer: Python's would cost a poll for each call."""
    whole = int(seconds)
    timeval = struct.pack("@ll", whole, int(1e6 * (seconds - whole)))
    connection.setsockopt(socket.SOL_SOCKET, option, timeval)


def fill(connection: socket.socket, view: memoryview) -> None:
    """Read until ``view`` is full.

    Raises:
        OSError: The connection broke or ended.
    """
    got = 0
    while got < len(view):
        count = connection.recv_into(view[got:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionAbortedError("ended early")
        got += count


class Wakes:
    """After how many bytes a thread that waits for a connection is woken, as it was set last.

    Set again only where it changes: a stream whose next bytes are always there sets it once.

    Args:
        connection: Connected and blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._bytes = 1
        self._readable: select.poll | None = None

    def after(self, size_bytes: int) -> None:
        """Wake whoever waits from now on when so many bytes are there. So many must still come."""
        if size_bytes != self._bytes and _WAKES_LATE:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
            self._bytes = size_bytes

    def wait(self) -> None:
        """Wait for as many bytes as were set, or for an end, and take none of them.

        A read would take what is there, and wait for the rest as if it were so many bytes again.
        """
        if self._readable is None:
            self._readable = select.poll()
            self._readable.register(self._connection, select.POLLIN)
        self._readable.poll()


def fill_and_peek(connection: socket.socket, wakes: Wakes, view: memoryview, length: int) -> int:
    """Read the next ``length`` bytes to ``view``, and beyond them what is there already.

    It waits for the ``length`` bytes alone, and is woken for each half MiB of them and not for each
    packet. What lies beyond is the beginning of what comes next, if that has come: whoever reads it
    in the same call spares a call and a change of threads.

    Args:
        connection: To read.
        wakes: Of ``connection``.
        view: Not shorter than ``length``. It takes no byte more than it has room for.
        length: Must be read.

    Returns:
        Bytes read, of which ``length`` were asked for.

    Raises:
        OSError: As :func:`fill`.
    """
    if length < WAKE_BYTES or not _WAKES_LATE:
        wakes.after(1)
        fill(connection, view[:length])
        return length
    # The last half MiB is read apart: so as much is always still to come, or is there. The read
    # before it waits for the end of its part alone, behind which that half MiB still comes.
    wakes.after(WAKE_BYTES)
    got = length - WAKE_BYTES
    fill(connection, view[:got])
    wakes.wait()
    flags: int = socket.MSG_DONTWAIT
    while got < length:
        # Of a kernel that is short of memory less is there, and of one that lied nothing.
        with contextlib.suppress(BlockingIOError):
            count = connection.recv_into(view[got:], 0, flags)
            if not count:
                raise ConnectionAbortedError("ended early")
            got += count
        if got < length:
            wakes.after(1)
            flags = 0
    return got


def send(connection: socket.socket, header: bytes, piece: bytes | memoryview) -> None:
    """Write a header and a piece, which is not copied.

    Raises:
        OSError: The connection broke, or no byte was taken within its bound.
    """
    sent = connection.sendmsg((header, piece))
    if sent < len(header):
        connection.sendall(header[sent:])
        sent = len(header)
    if sent < len(header) + len(piece):
        connection.sendall(memoryview(piece)[sent - len(header) :])


def has_ended(connection: socket.socket) -> bool:
    """Whether a peer that has nothing to say yet has spoken, or ended. Waits for nobody."""
    # Its thread may close it meanwhile.
    descriptor = connection.fileno()
    if descriptor < 0:
        return True
    looking = select.poll()
    looking.register(descriptor, select.POLLIN)
    return bool(looking.poll(0))


def reset_when_closed(connection: socket.socket) -> None:
    """Let closing it end all at the peer, too, where that waits for room to write.

    An end alone does not wake it, and where all that came was read, closing is no more than that.
    """
    # Not every system lets what was shut down be set.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))


def end(connection: socket.socket) -> None:
    """Wake whoever waits for it here, and at the peer whoever reads."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
