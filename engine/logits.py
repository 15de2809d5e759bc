"""The raw logits of one position, as host bytes that two processes can compare."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvpack.errors import LayoutMismatchError
from kvpack.layout import Encoding


class Row(Protocol):
    """Logits that lie somewhere else than in the host's memory."""

    def read(self) -> bytes:
        """Their bytes, ``[vocab_size]``, little-endian."""


class Logits:
    """One value per vocabulary entry, in the model's own dtype.

    A value: what it says never changes. Logits that a call left in MLX's memory are copied to the
    host when somebody first asks for them; the greedy token alone needs no copy.

    Attributes:
        encoding: Element type.

    Raises:
        LayoutMismatchError: ``data`` is empty or not a whole number of elements.
    """

    __slots__ = ("_best", "_data", "_row", "encoding")

    def __init__(self, encoding: Encoding, data: bytes) -> None:
        """Logits whose bytes are at hand: ``[vocab_size]``, little-endian."""
        size = encoding.element_bytes
        if not data or len(data) % size:
            raise LayoutMismatchError("logits.data_bytes", f"a multiple of {size}", len(data))
        self.encoding = encoding
        self._data: bytes | None = data
        self._best: int | None = None
        self._row: Row | None = None

    @classmethod
    def left_in(cls, row: Row, encoding: Encoding, best: int) -> Logits:
        """Logits that stay where a call left them until somebody asks."""
        logits = cls.__new__(cls)
        logits.encoding, logits._data, logits._best, logits._row = encoding, None, best, row
        return logits

    @property
    def data(self) -> bytes:
        """``[vocab_size]``, little-endian."""
        row = self._row
        if self._data is None and row is not None:
            # Data before row: another thread may ask at the same time, and either finds one.
            self._data = row.read()
            self._row = None
        return self._data or b""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Logits):
            return NotImplemented
        return self.encoding is other.encoding and self.data == other.data

    def __hash__(self) -> int:
        return hash((self.encoding, self.data))

    def __repr__(self) -> str:
        return f"Logits({self.encoding.value}, {len(self.data)} bytes)"

    def values(self) -> npt.NDArray[np.float32]:
        """The logits as float32, exactly: every half-precision value has one."""
        if self.encoding is Encoding.F32LE:
            return np.frombuffer(self.data, dtype="<f4")
        if self.encoding is Encoding.F16LE:
            return np.frombuffer(self.data, dtype="<f2").astype(np.float32)
        # A bfloat16 is the upper half of a float32.
        return (np.frombuffer(self.data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)

    def argmax(self) -> int:
        """The greedy token; the lowest id among equals."""
        if self._best is None:
            self._best = int(np.argmax(self.values()))
        return self._best

    def digest(self) -> bytes:
        """32 bytes: BLAKE3 of the encoding's name and the raw logits."""
        return blake3(self.encoding.value.encode() + b"\0" + self.data).digest()
