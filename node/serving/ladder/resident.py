"""Opened chunks in memory, each once, whoever shares it: least recently used ones go first.

A chunk's seal id names its bytes under one tenant's key, so a chunk that is found here is the one
that was asked for, and no tenant can ask for another's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvpack.limits import check_range

_BYTES_MAX = 1 << 50


class Resident:
    """A bounded cache of plaintext by seal id. Any thread may use it.

    Args:
        bytes_max: Plaintext bytes held at most; 0 holds nothing.

    Raises:
        LimitError: The bound is outside its range.
    """

    def __init__(self, bytes_max: int) -> None:
        check_range("resident_bytes", bytes_max, 0, _BYTES_MAX, "bytes")
        self._bytes_max = bytes_max
        self._held: OrderedDict[bytes, bytes | memoryview] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def used_bytes(self) -> int:
        """Plaintext that is held."""
        return self._used_bytes

    def get(self, seal_id: bytes) -> bytes | memoryview | None:
        """The plaintext of a chunk, or None. It counts as used now."""
        with self._lock:
            data = self._held.get(seal_id)
            if data is not None:
                self._held.move_to_end(seal_id)
            return data

    def put(self, seal_id: bytes, data: bytes | memoryview) -> None:
        """Hold the plaintext of a chunk, which nobody changes any more."""
        if len(data) > self._bytes_max:
            return
        with self._lock:
            if seal_id in self._held:
                self._held.move_to_end(seal_id)
                return
            self._held[seal_id] = data
            self._used_bytes += len(data)
            while self._used_bytes > self._bytes_max:
                _, oldest = self._held.popitem(last=False)
                self._used_bytes -= len(oldest)

    def clear(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            self._held.clear()
            self._used_bytes = 0
