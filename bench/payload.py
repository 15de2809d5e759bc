"""Bytes to work on: random ones, which no compressor gains on, as many as a cache has."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvpack.layout import LayerKind
from node.bench.geometry import cut_bytes, muse_glimmer

_PIECE_BYTES = 64 << 20


def kv_bytes(tokens: int) -> int:
    """Of the reference geometry's cache for a prompt of so many tokens."""
    return cut_bytes(muse_glimmer(), tokens).kv_bytes


def noise_file(path: Path, byte_count: int) -> Path:
    """A file of that many random bytes: as halves, every bit of them is random."""
    random = np.random.default_rng(9)
    with path.open("wb") as file:
        for start in range(0, byte_count, _PIECE_BYTES):
            count = min(_PIECE_BYTES, byte_count - start)
            file.write(
                random.integers(0, 1 << 64, -(-count // 8), np.uint64).view(np.uint8)[:count]
            )
    return path


def layer_kinds() -> list[LayerKind]:
    """Of the reference geometry, in order."""
    return [layer.kind for layer in muse_glimmer().layers]
