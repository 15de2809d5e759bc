"""Copies between a GPU's memory and the host's by the driver's own copy engine.

MLX shows an array to the host as memory that both can touch, and the pages follow whoever touches
them: reading rows that way is slow, and the plane's pages are then no longer where attention wants
them. A plain copy moves bytes and leaves the pages. MLX offers none, so it is asked of the CUDA
runtime, and only of the one that MLX has loaded already: nothing is searched for, no file opened.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.errors import BackendError

#: Page-locked host memory of a process, for tiles on their way: the card reaches it directly.
#: Whoever finds none of it free gets ordinary memory, which is slower and no more than before.
PINNED_BYTES: Final = 32 << 20

#: One piece of it: a tile is about as large.
SLAB_BYTES: Final = 2 << 20

#: The runtimes that MLX's wheels are built with.
_RUNTIMES: Final = ("libcudart.so.13", "libcudart.so.12")

_TO_DEVICE, _TO_HOST = 1, 2
_NON_BLOCKING = 1
_MANAGED = 3

HostBytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Lane:
    """Copies that run one after the other, beside those of other lanes.

    Attributes:
        to_host: Begin to copy: ``(destination, source, bytes)``, addresses.
        to_device: Likewise, the other way.
        wait: Return when every copy that was begun has ended.
    """

    to_host: Callable[[int, int, int], None]
    to_device: Callable[[int, int, int], None]
    wait: Callable[[], None]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What copies are made with.

    Attributes:
        name: For the log.
        lane: A new lane.
        pinned: Take so many bytes of page-locked host memory and keep them for good: the address,
            or 0 where there is none.
        reaches: Whether an address is memory that these copies know how to read and write.
    """

    name: str
    lane: Callable[[], Lane]
    pinned: Callable[[int], int]
    reaches: Callable[[int], bool]


class HostPool:
    """Host memory for rows on their way, given out and taken back; bounded, then ordinary memory.

    Any thread may take, and memory comes back by itself when nobody refers to it any more.
    """

    __slots__ = ("_busy", "_first", "_lock", "_slab_bytes")

    def __init__(self, memory: DeviceMemory, total_bytes: int, slab_bytes: int) -> None:
        self._slab_bytes = slab_bytes
        count = total_bytes // slab_bytes
        self._first = memory.pinned(count * slab_bytes) if count else 0
        self._busy = [not self._first] * count
        self._lock = threading.Lock()

    @property
    def free_slabs(self) -> int:
        """Pieces that nobody holds."""
        return self._busy.count(False)

    def take(self, size: int) -> HostBytes:
        """Writable memory of ``size`` bytes; what is in it is left over from others."""
        words = self.take_pinned(size)
        return np.empty(size, np.uint8) if words is None else words

    def take_pinned(self, size: int) -> HostBytes | None:
        """As :meth:`take`, page-locked; None where no such piece is free."""
        count = -(-size // self._slab_bytes)
        with self._lock:
            first = self._find(count) if count else None
            if first is None:
                return None
            self._busy[first : first + count] = [True] * count
        address = self._first + first * self._slab_bytes
        piece = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        words: HostBytes = np.frombuffer(piece, np.uint8)
        # Views keep ``words``, so this runs when the last of them is gone. Not at exit: the memory
        # goes with the process.
        weakref.finalize(words, self._free, first, count).atexit = False
        return words

    def _find(self, count: int) -> int | None:
        """The first of ``count`` free pieces side by side."""
        free = 0
        for index, busy in enumerate(self._busy):
            free = 0 if busy else free + 1
            if free == count:
                return index + 1 - count
        return None

    def _free(self, first: int, count: int) -> None:
        # Without the lock: a collection may run this on a thread that holds it, and a list's
        # items are set one by one.
        for index in range(first, first + count):
            self._busy[index] = False


def cuda_memory() -> DeviceMemory:
    """Copies by the CUDA runtime that this process has loaded.

    Raises:
        BackendError: There is none, or it lacks what is needed.
    """
    return _Runtime().memory()


class _Runtime:
    """The few functions of the CUDA runtime that are needed, with their arguments' types."""

    def __init__(self) -> None:
        library = _loaded_runtime()
        word, size, status = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        kinds: dict[str, list[Any]] = {
            "cudaStreamCreateWithFlags": [word, ctypes.c_uint],
            "cudaStreamSynchronize": [word],
            "cudaMemcpyAsync": [word, word, size, status, word],
            "cudaHostAlloc": [word, size, ctypes.c_uint],
            "cudaPointerGetAttributes": [word, word],
            "cudaGetLastError": [],
        }
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in kinds.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise BackendError(f"the CUDA runtime has no {name}") from error
            function.argtypes, function.restype = arguments, status
            self._functions[name] = function

    def memory(self) -> DeviceMemory:
        return DeviceMemory("cudaMemcpyAsync", self._lane, self._pinned, self._is_managed)

    def _call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401  as the runtime takes them
        code = self._functions[name](*arguments)
        if code:
            # Asked for once, or the next caller of the runtime, MLX included, would be told.
            self._functions["cudaGetLastError"]()
            raise BackendError(f"{name}: CUDA error {code}")

    def _lane(self) -> Lane:
        # Apart from MLX's own streams: what it computes meanwhile does not wait for a copy.
        stream = ctypes.c_void_p()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(stream), _NON_BLOCKING)

        def copy(kind: int) -> Callable[[int, int, int], None]:
            def begin(destination: int, source: int, size: int) -> None:
                self._call("cudaMemcpyAsync", destination, source, size, kind, stream)

            return begin

        return Lane(copy(_TO_HOST), copy(_TO_DEVICE), lambda: self._wait(stream))

    def _wait(self, stream: ctypes.c_void_p) -> None:
        self._call("cudaStreamSynchronize", stream)

    def _pinned(self, size: int) -> int:
        address = ctypes.c_void_p()
        try:
            self._call("cudaHostAlloc", ctypes.byref(address), size, 0)
        except BackendError:
            return 0
        return address.value or 0

    def _is_managed(self, address: int) -> bool:
        # An int for the kind comes first; the rest grew from release to release.
        attributes = (ctypes.c_int * 64)()
        try:
            self._call("cudaPointerGetAttributes", attributes, address)
        except BackendError:
            return False
        return int(attributes[0]) == _MANAGED


def _loaded_runtime() -> ctypes.CDLL:
    """The runtime that is in this process already; it is not loaded for this."""
    loaded_only = getattr(os, "RTLD_NOLOAD", None)
    if loaded_only is not None:
        for name in _RUNTIMES:
            try:
                return ctypes.CDLL(name, mode=loaded_only | os.RTLD_NOW)
            except OSError:
                continue
    raise BackendError("no CUDA runtime is loaded in this process")
