"""The raw logits of one position, as host bytes that two processes can compare."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvpack.errors import LayoutMismatchError
from kvpack.layout import Encoding


@dataclass(frozen=True, slots=True, repr=False)
class Logits:
    """One value per vocabulary entry, in the model's own dtype.

    Attributes:
        encoding: Element type.
        data: ``[vocab_size]``, little-endian.

    Raises:
        LayoutMismatchError: ``data`` is empty or not a whole number of elements.
    """

    encoding: Encoding
    data: bytes

    def __post_init__(self) -> None:
        size = self.encoding.element_bytes
        if not self.data or len(self.data) % size:
            raise LayoutMismatchError("logits.data_bytes", f"a multiple of {size}", len(self.data))

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
        return int(np.argmax(self.values()))

    def digest(self) -> bytes:
        """32 bytes: BLAKE3 of the encoding's name and the raw logits."""
        return blake3(self.encoding.value.encode() + b"\0" + self.data).digest()


def split_logits(words: mx.array, encoding: Encoding) -> tuple[Logits, ...]:
    """The logits after each token of a call, copied from ``words`` ``[1, count, vocab_size]``.

    Args:
        words: Evaluated, and of a type that numpy knows.
        encoding: What the bytes are.
    """
    data = np.array(words, copy=False).tobytes()
    size = len(data) // words.shape[1]
    return tuple(
        Logits(encoding, data[first : first + size]) for first in range(0, len(data), size)
    )
