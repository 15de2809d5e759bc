"""Rows that nobody computed: each one is a function of layer, role and position.

A row is a random one of its layer and role, to each word of which the position times an odd number
is added. So a row that went to another place, or was cut, shows; no compressor gains on them; and
making or checking them costs one pass over memory.

:class:`SampleRows` are rows that a model did compute, of which there are fewer: they are repeated,
each layer from another place on. A compressor finds in them what it finds in a cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvpack.errors import LayoutMismatchError
from kvpack.layout import CacheLayout, LayerKind
from node.errors import UsageError

Rows = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint64]

_WORD_BYTES: Final = 8

#: 2^64 over the golden ratio: neighbouring positions differ in every byte.
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)

#: Rows made or compared at a time: 128 KiB of a usual row, so that the work stays in cache.
_BLOCK_ROWS: Final = 256

#: Positions by which a layer's rows are further on in a sample than those of the one of its kind
#: before: more than a chunk has, so that none has the same rows twice.
_SAMPLE_STEP: Final = 263


class RowSource:
    """Makes the rows of one layout."""

    def __init__(self, layout: CacheLayout, seed: int = 1) -> None:
        random = np.random.default_rng(seed)
        #: Of what they are made: two ends that make other rows have no session in common.
        self.name = b"kvnode bench rows" + seed.to_bytes(8, "little")
        self._row_bytes = layout.key_row_bytes(0)
        self._bases = [
            tuple(
                random.integers(0, 1 << 64, -(-size // _WORD_BYTES), np.uint64)
                for size in (layout.key_row_bytes(i), layout.value_row_bytes(i))
            )
            for i in range(len(layout.layers))
        ]

    def warm(self) -> None:
        """Make one row, so that nothing is loaded for the first time later on."""
        self.fill(0, 0, 0, np.empty((1, self._row_bytes), np.uint8))

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


class SampleRows(RowSource):
    """Rows of a sample, repeated.

    A sample is a NumPy archive of two arrays, ``full`` and ``swa``: halves
    ``[2, count, elements]``, keys first, one row after another as a cache has them.

    Raises:
        UsageError: ``path`` is no such file.
        LayoutMismatchError: A row of ``layout`` has another size than those of the sample.
    """

    def __init__(self, layout: CacheLayout, path: Path) -> None:
        kinds = {"full": LayerKind.FULL, "swa": LayerKind.SWA}
        try:
            with np.load(path, allow_pickle=False) as read:
                arrays = {kind: _sample(read[name]) for name, kind in kinds.items()}
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"--rows {path}: expected arrays full and swa: {error}") from error
        self._samples = [arrays[layer.kind] for layer in layout.layers]
        self._starts = [0] * len(layout.layers)
        for kind in kinds.values():
            for number, layer in enumerate(layout.layers_of(kind)):
                self._starts[layer] = number * _SAMPLE_STEP
        self._row_bytes = layout.key_row_bytes(0)
        digest = blake3()
        for kind in kinds.values():
            digest.update(arrays[kind].reshape(-1).data)
        self.name = b"kvnode bench sample" + digest.digest()
        for layer, sample in enumerate(self._samples):
            for size in (layout.key_row_bytes(layer), layout.value_row_bytes(layer)):
                if size != sample.shape[2]:
                    raise LayoutMismatchError(f"layers[{layer}].row_bytes", sample.shape[2], size)

    def fill(self, layer: int, role: int, first_position: int, rows: Rows) -> None:
        """Copy the rows from ``first_position`` on, as :meth:`RowSource.fill` makes them."""
        sample, done = self._samples[layer][role], 0
        at = (first_position + self._starts[layer]) % len(sample)
        while done < len(rows):
            run = min(len(rows) - done, len(sample) - at)
            rows[done : done + run] = sample[at : at + run]
            done, at = done + run, 0


def _sample(array: npt.NDArray[np.generic]) -> Rows:
    """``[2, count, row_bytes]``.

    Raises:
        ValueError: It is none of halves, or is empty.
    """
    if array.dtype.itemsize != 2 or array.ndim != 3 or len(array) != 2 or not array.size:
        raise ValueError(f"halves [2, count, elements], not {array.dtype} {array.shape}")
    return np.ascontiguousarray(array).view(np.uint8)


def _steps(first_position: int, count: int) -> _Words:
    positions = np.arange(first_position, first_position + count, dtype=np.uint64)
    return (positions * _STEP)[:, None]
