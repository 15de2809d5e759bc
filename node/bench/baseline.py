"""The yardsticks: the same bytes through bare sockets between the same two processes.

One is TLS 1.3, the other nothing at all: what a plain data plane is measured by. With TLS both
ends show their certificates and check the other's, as the real path does. Nothing is sealed,
nothing framed, nothing installed: what this reaches is what the machines can do in Python.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from node import enroll
from node.config import Address
from node.errors import PeerUnavailableError
from node.trust import PinnedPeer

#: Written and read at a time; the fastest size measured for Python's own TLS.
PIECE_BYTES: Final = 1 << 20

#: A connection, or a piece of it, that takes longer has been given up by the other end.
WAIT_S: Final = 30.0

_DONE: Final = b"\x01"


class BaselineSink:
    """Listens for one connection of ``peer``, takes ``total_bytes``, and answers with one byte.

    With no ``credentials`` it is a plain socket, and whoever connects first is measured.
    """

    def __init__(
        self, credentials: Path | None, host: str, peer: PinnedPeer, total_bytes: int
    ) -> None:
        self._context = (
            None if credentials is None else _context(ssl.PROTOCOL_TLS_SERVER, credentials)
        )
        self._peer = peer
        self._total_bytes = total_bytes
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1)
        self._listener.settimeout(WAIT_S)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._take, name="baseline", daemon=True).start()

    def _take(self) -> None:
        try:
            with self._listener:
                plain, _ = self._listener.accept()
            plain.settimeout(WAIT_S)
            with self._wrapped(plain) as stream:
                buffer = memoryview(bytearray(PIECE_BYTES))
                left = self._total_bytes
                while left and (count := stream.recv_into(buffer[: min(left, PIECE_BYTES)])):
                    left -= count
                if not left:
                    stream.sendall(_DONE)
        except OSError:
            # The caller sees its own end of it, and says so.
            return

    def _wrapped(self, plain: socket.socket) -> socket.socket:
        if self._context is None:
            return plain
        stream = self._context.wrap_socket(plain, server_side=True)
        _require_pinned(stream, self._peer)
        return stream


def send_baseline(
    credentials: Path | None, peer: PinnedPeer, address: Address, pieces: Sequence[bytes]
) -> float:
    """Send ``pieces`` and wait until they have arrived; gives the seconds, handshake left out.

    With no ``credentials`` over a plain socket.

    Raises:
        PeerUnavailableError: The connection broke, or is not the pinned peer's.
    """
    try:
        plain = socket.create_connection((address.host, address.port), WAIT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with _to_peer(plain, credentials, peer) as stream:
            start = time.monotonic()
            for piece in pieces:
                view = memoryview(piece)
                for first in range(0, len(view), PIECE_BYTES):
                    stream.sendall(view[first : first + PIECE_BYTES])
            if stream.recv(1) != _DONE:
                raise PeerUnavailableError(f"node {peer.name}: the baseline's socket was closed")
            return time.monotonic() - start
    except OSError as error:
        raise PeerUnavailableError(f"node {peer.name}: the baseline's socket: {error}") from error


def _to_peer(plain: socket.socket, credentials: Path | None, peer: PinnedPeer) -> socket.socket:
    if credentials is None:
        return plain
    context = _context(ssl.PROTOCOL_TLS_CLIENT, credentials)
    stream = context.wrap_socket(plain, server_hostname=peer.name)
    _require_pinned(stream, peer)
    return stream


def _context(protocol: int, credentials: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(credentials / enroll.AUTHORITY_CERTIFICATE)
    context.load_cert_chain(credentials / enroll.NODE_CERTIFICATE, credentials / enroll.NODE_KEY)
    return context


def _require_pinned(stream: ssl.SSLSocket, peer: PinnedPeer) -> None:
    leaf = stream.getpeercert(binary_form=True) or b""
    if hashlib.sha256(leaf).digest() != peer.digest:
        raise ConnectionRefusedError("another certificate than the pinned one")
