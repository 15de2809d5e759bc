"""What the system counted of a move: bytes of TCP sockets of this process, both directions.

gRPC does not say which sockets it has, but they are files of this process, and Linux tells of each
how many bytes its other end acknowledged and how many came: TLS and HTTP/2 are in it, headers of
TCP and IP are not. Sockets are looked at while they are open and never held: a second handle on one
would keep it in gRPC's own poll set after gRPC let go of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

#: Between two looks. What comes between the last one and the end of the connection is not seen: the
#: goodbye, and at times the answer to Commit.
LOOK_S: Final = 0.005

#: Looks at what was found, for each look for more of them.
_LOOKS: Final = 20

#: ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` of ``struct tcp_info``.
_COUNTERS: Final = struct.Struct("=120xQQ")

_FILES: Final = Path("/proc/self/fd")


class SocketBytes:
    """Counts the connections of this process to one host that are opened while it watches.

    All files of the process are looked through now and then, since each of them costs a change of
    threads where others compute; those that were found are asked often.

    Attributes:
        total: Bytes of all of them so far; None where the system does not tell.
    """

    def __init__(self, host: str) -> None:
        self._known = sys.platform == "linux"
        self._hosts = _addresses(host) if self._known else frozenset()
        self._seen: dict[int, int] = {}
        self._files: dict[int, int] = {}
        self._before: frozenset[int] = frozenset()
        self._find()
        self._before = frozenset(self._files.values())
        self._files = {}

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
            self._find()
            for _ in range(_LOOKS):
                self.look()
                await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Note how far each connection that was found is."""
        for file, inode in list(self._files.items()):
            with contextlib.suppress(OSError, struct.error):
                # The number of a file that was closed goes to the next one.
                if os.fstat(file).st_ino == inode:
                    self._seen[inode] = max(self._count(file), self._seen.get(inode, 0))
                    continue
            del self._files[file]

    def _find(self) -> None:
        """Look through all files for connections; a socket's inode no other one gets meanwhile."""
        self._files = {}
        for file in _FILES.iterdir() if self._known else ():
            with contextlib.suppress(OSError):
                number = int(file.name)
                found = os.fstat(number)
                is_new = stat.S_ISSOCK(found.st_mode) and found.st_ino not in self._before
                if is_new and self._is_ours(number):
                    self._files[number] = found.st_ino

    def _is_ours(self, file: int) -> bool:
        with _borrowed(file) as one:
            if one.type != socket.SOCK_STREAM or one.family not in _INTERNET:
                return False
            return one.getpeername()[0] in self._hosts

    @staticmethod
    def _count(file: int) -> int:
        with _borrowed(file) as one:
            told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size)
        acknowledged, received = _COUNTERS.unpack(told)
        return int(acknowledged + received)


@contextlib.contextmanager
def _borrowed(file: int) -> Iterator[socket.socket]:
    borrowed = socket.socket(fileno=file)
    try:
        yield borrowed
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
