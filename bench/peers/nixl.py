"""NIXL: UCX over TCP into the other process's registered memory; POSIX to a file and back."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import NOTHING, Variant

_TCP = (("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo"), ("NIXL_LOG_LEVEL", "ERROR"))
VARIANTS = {"ucx": Variant("NIXL, UCX over TCP", NOTHING, _TCP)}
FILE_VARIANTS = {"posix": Variant("NIXL, POSIX to a file and back", NOTHING, _TCP)}


def load() -> None:
    import nixl_cu12._api  # noqa: F401


def _agent(name: str, plugin: str) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=[plugin]))


def receive(link: Any, buffer: Any, variant: str) -> None:
    agent = _agent("target", "UCX")
    memory = [(buffer.ctypes.data, buffer.nbytes, 0, "")]
    agent.register_memory(memory, "DRAM")
    descriptors = agent.get_xfer_descs([entry[:3] for entry in memory], "DRAM")
    said = agent.get_agent_metadata(), agent.get_serialized_descs(descriptors)
    link.listening([base64.b64encode(one).decode() for one in said])
    link.used_s()


def send(address: Any, payload: Any, variant: str, folder: Path) -> Callable[[], None]:
    metadata, described = (base64.b64decode(one) for one in address)
    agent = _agent("source", "UCX")
    memory = [(payload.ctypes.data, payload.nbytes, 0, "")]
    agent.register_memory(memory, "DRAM")
    name = agent.add_remote_agent(metadata)
    name = name.decode() if isinstance(name, bytes) else name
    own = agent.get_xfer_descs([entry[:3] for entry in memory], "DRAM")
    transfer = agent.initialize_xfer("WRITE", own, agent.deserialize_descs(described), name)
    agent.make_connection(name)
    return lambda: _drive(agent, transfer)


def store(payload: Any, folder: Path, variant: str) -> tuple[dict[str, float], Any]:
    agent, back = _agent("files", "POSIX"), np.zeros_like(payload)
    back[::4096] = 1
    path = folder / "nixl.bin"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        files = [(0, payload.nbytes, descriptor, "")]
        agent.register_memory(files, "FILE")
        far = agent.get_xfer_descs([entry[:3] for entry in files], "FILE")
        seconds = {}
        for word, array in (("WRITE", payload), ("READ", back)):
            memory = [(array.ctypes.data, array.nbytes, 0, "")]
            agent.register_memory(memory, "DRAM")
            near = agent.get_xfer_descs([entry[:3] for entry in memory], "DRAM")
            transfer = agent.initialize_xfer(word, near, far, "files")
            start = time.perf_counter()
            _drive(agent, transfer)
            if word == "WRITE":
                os.fsync(descriptor)
            seconds[f"{word.lower()}_s"] = time.perf_counter() - start
        return seconds, back
    finally:
        os.close(descriptor)
        path.unlink()


def _drive(agent: Any, transfer: Any) -> None:
    state = agent.transfer(transfer)
    while state != "DONE":
        if state == "ERR":
            raise OSError("a NIXL transfer failed")
        state = agent.check_xfer_state(transfer)
