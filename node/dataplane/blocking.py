"""Blocking reads and writes of whole frames, for the threads of the socket plane.

Threads and not the loop: a read fills its buffer in one call without the interpreter's lock, and
the next frame arrives while the loop opens the one before.
"""

from __future__ import annotations

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


def fill_large(connection: socket.socket, view: memoryview) -> None:
    """As :func:`fill`, but woken for each half MiB and not for each packet.

    The last half MiB of ``view`` is read without that: so as much is always still to come.

    Raises:
        OSError: As :func:`fill`.
    """
    if _WAKES_LATE and len(view) >= 2 * WAKE_BYTES:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, WAKE_BYTES)
        fill(connection, view[:-WAKE_BYTES])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        view = view[-WAKE_BYTES:]
    fill(connection, view)


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


def end(connection: socket.socket) -> None:
    """Wake whoever waits for it, on both ends."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
