"""ZeroMQ PUSH/PULL, plain and with CURVE: messages of 1 MiB, copied into place."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import KEYS, NOTHING, Variant

VARIANTS = {
    "plain": Variant("ZeroMQ PUSH/PULL", NOTHING),
    "curve": Variant("ZeroMQ PUSH/PULL, CURVE", KEYS),
}
PIECE_BYTES = 1 << 20
_QUEUE = 64
_CONNECT_S = 0.3


def load() -> None:
    import zmq

    if not zmq.has("curve"):
        raise ImportError("this pyzmq has no CURVE")


def receive(link: Any, buffer: Any, variant: str) -> None:
    import zmq

    context = zmq.Context()
    pull, done = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.setsockopt(zmq.RCVHWM, _QUEUE)
    public = b""
    if variant == "curve":
        public, secret = zmq.curve_keypair()
        pull.curve_server, pull.curve_publickey, pull.curve_secretkey = True, public, secret
    ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (pull, done)]
    link.listening([*ports, public.decode()])
    at = 0
    while at < len(buffer):
        message = pull.recv(copy=False).buffer
        buffer[at : at + len(message)] = np.frombuffer(message, np.uint8)
        at += len(message)
    done.send(b"k")


def send(address: Any, payload: Any, variant: str, folder: Path) -> Callable[[], None]:
    import zmq

    port, done_port, server_key = address
    context = zmq.Context()
    push, done = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.setsockopt(zmq.SNDHWM, _QUEUE)
    if server_key:
        push.curve_serverkey = server_key.encode()
        push.curve_publickey, push.curve_secretkey = zmq.curve_keypair()
    push.connect(f"tcp://127.0.0.1:{port}")
    done.connect(f"tcp://127.0.0.1:{done_port}")
    # Connections are made in the background, and nothing says when they are.
    time.sleep(_CONNECT_S)
    view = memoryview(payload)

    def work() -> None:
        for start in range(0, len(view), PIECE_BYTES):
            push.send(view[start : start + PIECE_BYTES], copy=False)
        done.recv()

    return work
