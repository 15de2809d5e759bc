"""Rows that nobody computed: each one is a function of layer, role and position.

A row is a random one of its layer and role, to each word of which the position times an odd number
is added. So a row that went to another place, or was cut, shows; no compressor gains on them; and
making or checking them costs one pass over memory.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvpack.layout import CacheLayout

Rows = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint64]

_WORD_BYTES: Final = 8

#: 2^64 over the golden ratio: neighbouring positions differ in every byte.
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)

#: Rows made or compared at a time: 128 KiB of a usual row, so that the work stays in cache.
_BLOCK_ROWS: Final = 256


class RowSource:
    """Makes the rows of one layout."""

    def __init__(self, layout: CacheLayout, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._bases = [
            tuple(
                random.integers(0, 1 << 64, -(-size // _WORD_BYTES), np.uint64)
                for size in (layout.key_row_bytes(i), layout.value_row_bytes(i))
            )
            for i in range(len(layout.layers))
        ]

    def warm(self) -> None:
        """Make one row, so that nothing is loaded for the first time later on."""
        self.fill(0, 0, 0, np.empty((1, self._bases[0][0].nbytes), np.uint8))

    def fill(self, layer: int, role: int, first_position: int, rows: Rows) -> None:
        """Make the rows from ``first_position`` on.

        Args:
            layer: Which layer.
            role: 0 for keys, 1 for values.
            first_position: Position of the first row.
            rows: ``[count, row_bytes]``, written.
        """
        base = self._bases[layer][role]
        for start in range(0, len(rows), _BLOCK_ROWS):
            block = rows[start : start + _BLOCK_ROWS]
            if block.shape[1] % _WORD_BYTES == 0 and block.flags.c_contiguous:
                words = block.view(np.uint64)
                np.add(base, _steps(first_position + start, len(block)), out=words)
            else:
                made = base + _steps(first_position + start, len(block))
                block[:] = made.view(np.uint8)[:, : block.shape[1]]

    def count_equal(self, layer: int, role: int, first_position: int, rows: Rows) -> int:
        """How many of ``rows`` ``[count, row_bytes]`` are those from ``first_position`` on."""
        equal = 0
        made = np.empty((_BLOCK_ROWS, rows.shape[1]), np.uint8)
        for start in range(0, len(rows), _BLOCK_ROWS):
            block = rows[start : start + _BLOCK_ROWS]
            expected = made[: len(block)]
            self.fill(layer, role, first_position + start, expected)
            equal += int((block == expected).all(axis=1).sum())
        return equal


def _steps(first_position: int, count: int) -> _Words:
    positions = np.arange(first_position, first_position + count, dtype=np.uint64)
    return (positions * _STEP)[:, None]
