"""What the system counted of a move: bytes of TCP sockets of this process, both directions.

gRPC does not say which sockets it has, but they are files of this process, and Linux tells of each
how many bytes its other end acknowledged and how many came: TLS and HTTP/2 are in it, headers of
TCP and IP are not. Sockets are looked at while they are open and never held: a second handle on one
would keep it in gRPC's own poll set after gRPC let go of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

#: Between two looks. What comes between the last one and the end of the connection is not seen: the
#: goodbye, and at times the answer to Commit.
LOOK_S: Final = 0.005

#: ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` of ``struct tcp_info``.
_COUNTERS: Final = struct.Struct("=120xQQ")

_FILES: Final = Path("/proc/self/fd")


class SocketBytes:
    """Counts the connections of this process to one host that are opened while it watches.

    Attributes:
        total: Bytes of all of them so far; None where the system does not tell.
    """

    def __init__(self, host: str) -> None:
        self._known = sys.platform == "linux"
        self._hosts = _addresses(host) if self._known else frozenset()
        self._seen: dict[str, int] = {}
        self._before = set(self._look())

    @property
    def total(self) -> int | None:
        """Bytes so far."""
        return sum(self._seen.values()) if self._known and self._seen else None

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look again and again until the block ends."""
        task = asyncio.create_task(self._watch()) if self._known else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.wait({task})

    async def _watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Note how far each connection is."""
        for name, count in self._look().items():
            if name not in self._before:
                self._seen[name] = max(count, self._seen.get(name, 0))

    def _look(self) -> dict[str, int]:
        """Bytes by the socket's name, which no other one gets while this process runs."""
        found: dict[str, int] = {}
        for file in _FILES.iterdir() if self._known else ():
            with contextlib.suppress(OSError, struct.error):
                name = str(file.readlink())
                if name.startswith("socket:"):
                    count = self._count(int(file.name))
                    if count is not None:
                        found[name] = count
        return found

    def _count(self, file: int) -> int | None:
        borrowed = socket.socket(fileno=file)
        try:
            if borrowed.type != socket.SOCK_STREAM or borrowed.family not in _INTERNET:
                return None
            if borrowed.getpeername()[0] not in self._hosts:
                return None
            told = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size)
            acknowledged, received = _COUNTERS.unpack(told)
            return int(acknowledged + received)
        finally:
            # It is gRPC's.
            borrowed.detach()


_INTERNET: Final = (socket.AF_INET, socket.AF_INET6)


def _addresses(host: str) -> frozenset[str]:
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None)}
    except OSError:
        found = {host}
    return frozenset(found | {f"::ffff:{one}" for one in found if ":" not in one})
