"""Plain copies between the device's memory and the host's: what everything is measured against."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from engine.device_copy import DeviceCopier, address_of
from engine.device_memory import DeviceMemory, Lane, cuda_memory
from engine.errors import BackendError

PIECE_BYTES = 64 << 20

#: Memory that stands in for page-locked memory stays until the end, as that does.
_kept: list[ctypes.Array[ctypes.c_char]] = []


def host_memory() -> DeviceMemory:
    """Copies by the processor, for a machine without CUDA: there an array lies on the host."""

    def memory_of(size: int) -> int:
        _kept.append((ctypes.c_char * size)())
        return ctypes.addressof(_kept[-1])

    def copy(destination: int, source: int, size: int) -> None:
        ctypes.memmove(destination, source, size)

    return DeviceMemory(
        "memmove", lambda: Lane(copy, copy, lambda: None), memory_of, lambda address: True
    )


def memory_here() -> DeviceMemory:
    """The CUDA runtime's copies, or the processor's where MLX computes there."""
    if mx.default_device() == mx.cpu:
        return host_memory()
    return cuda_memory()


class PlainCopies:
    """Copies of one device array of ``PIECE_BYTES``, again and again, up to some number of bytes.

    The array was shown to the host once and never touched by it, as staged rows are.
    """

    def __init__(self, memory: DeviceMemory, total_bytes: int) -> None:
        size = min(PIECE_BYTES, total_bytes)
        self._size, self._times = size, max(1, total_bytes // size)
        self.total_bytes = self._size * self._times
        self._array = mx.random.randint(0, 255, (size,), mx.uint32).astype(mx.uint8)
        mx.eval(self._array)
        self._device = address_of(self._array)
        self._lane = memory.lane()
        self._pinned = memory.pinned(size)
        self._pageable = np.zeros(size, np.uint8)

    def _all(self, copy: Callable[[int, int, int], None], to: int, source: int) -> None:
        for _ in range(self._times):
            copy(to, source, self._size)
        self._lane.wait()

    def to_pinned(self) -> None:
        self._all(self._lane.to_host, self._pinned, self._device)

    def to_pageable(self) -> None:
        """To ordinary memory whose pages are there already."""
        self._all(self._lane.to_host, self._pageable.ctypes.data, self._device)

    def to_fresh(self) -> None:
        """To ordinary memory as it comes, as a cut that is kept needs it."""
        pieces = [np.empty(self._size, np.uint8) for _ in range(self._times)]
        for piece in pieces:
            self._lane.to_host(piece.ctypes.data, self._device, self._size)
        self._lane.wait()

    def from_pinned(self) -> None:
        self._all(self._lane.to_device, self._device, self._pinned)

    def from_pageable(self) -> None:
        self._all(self._lane.to_device, self._device, self._pageable.ctypes.data)


def torch_copies(total_bytes: int) -> dict[str, Callable[[], None]]:
    """The same by PyTorch, from memory of its own; empty without PyTorch and a CUDA device."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    size = min(4 * PIECE_BYTES, total_bytes)
    times = max(1, total_bytes // size)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    device.fill_(3)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pageable = torch.zeros(size, dtype=torch.uint8)

    def copying(to: object) -> Callable[[], None]:
        def work() -> None:
            for _ in range(times):
                to.copy_(device)  # type: ignore[attr-defined]
            torch.cuda.synchronize()

        return work

    return {"torch_to_pinned": copying(pinned), "torch_to_pageable": copying(pageable)}


def copier_here(memory: DeviceMemory) -> DeviceCopier:
    """What the engine uses on CUDA, and the same of the processor elsewhere.

    Raises:
        BackendError: The engine's own test of it fails.
    """
    from engine import device_route

    usual = device_route.copier()
    if usual is not None:
        return usual
    if mx.default_device() != mx.cpu:
        raise BackendError("plain copies do not work here; the log says why")
    made = DeviceCopier(memory)
    device_route.self_test(made)
    return made
