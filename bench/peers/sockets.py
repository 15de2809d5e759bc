"""Bare sockets: what the machine's TCP, and its TLS 1.3 in Python, can do. Nothing is framed.

``tcp_sealed`` is the least that a push over a sealed socket takes: each message is read into one
warm buffer and opened where it belongs. No frame, no reference, no rows out of a tile.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers import MUTUAL, NOTHING, Variant, certificates, messages

VARIANTS = {
    "tcp": Variant("raw TCP", NOTHING),
    "tls": Variant("TLS 1.3 of Python's ssl, both certificates", MUTUAL),
    "tcp_sealed": Variant("raw TCP, messages opened", messages.SEALED),
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
    with stream:
        (_read_sealed if variant == "tcp_sealed" else _read)(stream, buffer)
        stream.sendall(b"k")


def _read(stream: socket.socket, buffer: Any) -> None:
    view, at = memoryview(buffer), 0
    while at < len(view) and (count := stream.recv_into(view[at : at + PIECE_BYTES])):
        at += count


def _read_sealed(stream: socket.socket, buffer: Any) -> None:
    place = messages.placing(buffer, sealed=True)
    warm = memoryview(bytearray(messages.MESSAGE_BYTES + messages.TAG_BYTES))
    for start in range(0, len(buffer), messages.MESSAGE_BYTES):
        size = min(messages.MESSAGE_BYTES, len(buffer) - start) + messages.TAG_BYTES
        if stream.recv_into(warm, size, socket.MSG_WAITALL) != size:
            return
        place(warm[:size])


def send(address: int, payload: Any, variant: str, folder: Path) -> Callable[[], None]:
    stream = socket.create_connection(("127.0.0.1", address))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if variant == "tls":
        context = certificates.context(folder / "certificates", "source")
        stream = context.wrap_socket(stream, server_hostname="target")
    view = memoryview(payload)
    pieces: Any = [view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]
    if variant == "tcp_sealed":
        pieces = messages.cut(payload, sealed=True)

    def work() -> None:
        for piece in pieces:
            stream.sendall(piece)
        if stream.recv(1) != b"k":
            raise OSError("the socket was closed")

    return work
