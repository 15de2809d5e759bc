"""Bare sockets: what the machine's TCP, and its TLS 1.3 in Python, can do. Nothing is framed."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers import MUTUAL, NOTHING, Variant, certificates

VARIANTS = {
    "tcp": Variant("raw TCP", NOTHING),
    "tls": Variant("TLS 1.3 of Python's ssl, both certificates", MUTUAL),
}

#: The fastest size that was measured, for both.
PIECE_BYTES = 1 << 20


def load() -> None:
    """Always here."""


def receive(link: Any, buffer: Any, variant: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        link.listening(listener.getsockname()[1])
        stream, _ = listener.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if variant == "tls":
        context = certificates.context(link.folder / "certificates", "target")
        stream = context.wrap_socket(stream, server_side=True)
    view, at = memoryview(buffer), 0
    with stream:
        while at < len(view) and (count := stream.recv_into(view[at : at + PIECE_BYTES])):
            at += count
        stream.sendall(b"k")


def send(address: int, payload: Any, variant: str, folder: Path) -> Callable[[], None]:
    stream = socket.create_connection(("127.0.0.1", address))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if variant == "tls":
        context = certificates.context(folder / "certificates", "source")
        stream = context.wrap_socket(stream, server_hostname="target")
    view = memoryview(payload)

    def work() -> None:
        for start in range(0, len(view), PIECE_BYTES):
            stream.sendall(view[start : start + PIECE_BYTES])
        if stream.recv(1) != b"k":
            raise OSError("the socket was closed")

    return work
