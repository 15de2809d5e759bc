"""Mooncake's transfer engine over TCP: one write into the other process's registered memory.

Its wheel needs libibverbs1, librdmacm1 and libnuma1 of the system, also for TCP alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers import NOTHING, Variant

VARIANTS = {
    "tcp": Variant("Mooncake transfer engine, TCP", NOTHING),
    "tcp_pieces": Variant("Mooncake transfer engine, TCP, 64 pieces", NOTHING, pieces=64),
}


def load() -> None:
    import mooncake.engine  # noqa: F401


def _engine(memory: Any) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise OSError("TransferEngine.initialize failed")
    if engine.register_memory(memory.ctypes.data, memory.nbytes):
        raise OSError("TransferEngine.register_memory failed")
    return engine


def receive(link: Any, buffer: Any, variant: str) -> None:
    engine = _engine(buffer)
    link.listening([f"127.0.0.1:{engine.get_rpc_port()}", buffer.ctypes.data])
    link.used_s()


def send(address: Any, payload: Any, variant: str, folder: Path) -> Callable[[], None]:
    session, target = address
    engine, size = _engine(payload), payload.nbytes
    start, pieces = payload.ctypes.data, VARIANTS[variant].pieces
    # Connects.
    _require(engine.transfer_sync_write(session, start, target, 4096))
    step = -(-size // pieces)
    offsets = range(0, size, step)

    def work() -> None:
        if pieces == 1:
            _require(engine.transfer_sync_write(session, start, target, size))
            return
        lengths = [min(step, size - offset) for offset in offsets]
        sources, targets = [start + o for o in offsets], [target + o for o in offsets]
        _require(engine.batch_transfer_sync_write(session, sources, targets, lengths))

    return work


def _require(code: int) -> None:
    if code:
        raise OSError(f"a transfer failed with {code}")
