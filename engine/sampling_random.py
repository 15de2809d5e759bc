"""Random numbers as a value: a key and a counter, nothing else.

There is no global generator and no hidden state. Number ``i`` of a stream is a keyed BLAKE3 of
``i``, so a stream that travelled continues with the very number it would have given at home, on any
machine, whatever array library is installed there.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvpack.errors import LimitError
from kvpack.limits import check_range

KEY_BYTES: Final = 32

#: Seeds and counters are u64.
U64_MAX: Final = (1 << 64) - 1

_SEED_CONTEXT: Final = "kvpack 2026 engine sampling seed v1"
_UNIFORM_CONTEXT: Final = b"uniform\0"


@dataclass(frozen=True, slots=True, repr=False)
class RandomStream:
    """An endless stream of uniform numbers, standing at one of them.

    Number ``i`` is the first 8 bytes of BLAKE3 keyed with ``key`` over ``"uniform\\0"`` and ``i``
    as u64 little-endian; read as u64 little-endian, its upper 53 bits over 2^53.

    Attributes:
        key: 32 bytes. Whoever knows them knows the numbers to come.
        counter: Which number is next.

    Raises:
        LimitError: The key is not 32 bytes or the counter is no u64.
    """

    key: bytes
    counter: int = 0

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise LimitError("random.key", f"{KEY_BYTES} bytes", f"{len(self.key)} bytes")
        check_range("random.counter", self.counter, 0, U64_MAX)

    def __repr__(self) -> str:
        return f"RandomStream(counter={self.counter})"

    @classmethod
    def from_seed(cls, seed: int) -> RandomStream:
        """The stream that ``seed`` stands for; equal seeds give equal streams everywhere.

        Raises:
            LimitError: ``seed`` is no u64.
        """
        check_range("sampling.seed", seed, 0, U64_MAX)
        hasher = blake3(derive_key_context=_SEED_CONTEXT)
        return cls(hasher.update(seed.to_bytes(8, "little")).digest())

    @classmethod
    def fresh(cls) -> RandomStream:
        """A stream that nobody can predict."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def uniform(self) -> tuple[float, RandomStream]:
        """The next number, in [0, 1), and the stream after it."""
        message = _UNIFORM_CONTEXT + self.counter.to_bytes(8, "little")
        word = int.from_bytes(blake3(message, key=self.key).digest()[:8], "little")
        return (word >> 11) * 2.0**-53, RandomStream(self.key, self.counter + 1)
