"""From a pack in the page cache to planes that could decode, beside what that must cost at least.

At the least every byte is decrypted once and comes into a plane once: an AES-256-GCM pass and a
copy over as many bytes in memory, the copy into pages that were written before. mlx-lm's own load
of an equal cache checks nothing. Memory is kept between rounds as a node keeps it: the first
restore of a process touches fresh pages besides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.format.pack import KEYRING, LAYOUT, placed_chunks
from bench.format.speed import decrypt_pieces
from bench.format.turns import Row, Thing, in_turns
from kvpack.bundle import BundleReader
from kvpack.chunk import OpenedChunk, tile_of
from node.config import tune_malloc

FLOOR = "AES-256-GCM and a copy, 1 thread"
RESTORE = "restore to planes"
RESTORE_1 = "restore to planes, 1 thread"
LOAD = "mlx-lm load and eval"


def restored(path: Path, threads: int | None = None) -> Any:
    """A generation of the rows in the pack, every chunk opened and every row in its plane."""
    from bench.engine.models import NoNetwork
    from engine import Installer, PlaneLayout

    network = NoNetwork(LAYOUT, PlaneLayout.HEAD_MAJOR)
    with BundleReader.open(path, KEYRING) as reader:
        installer = Installer(network, reader.manifest.position)

        def place(opened: OpenedChunk) -> None:
            if opened.reference.has_rows:
                installer.scatter(tile_of(LAYOUT, opened))

        reader.pass_chunks(place, threads=threads)
        return installer.finish(reader.manifest.schedule)


def restore_things(path: Path, data: memoryview) -> list[Thing]:
    """Restoring the pack at ``path``, whose bytes are ``data``, and what it is compared with."""
    tune_malloc()
    chunks = placed_chunks(path)
    source = np.frombuffer(data, np.uint8)
    target = np.ones_like(source)

    def floor() -> None:
        decrypt_pieces(data, chunks)
        np.copyto(target, source)

    things = [
        Thing(FLOOR, floor),
        Thing(RESTORE, lambda: restored(path)),
        Thing(RESTORE_1, lambda: restored(path, threads=1)),
    ]
    with BundleReader.open(path, KEYRING) as reader:
        position = reader.manifest.position
    return things + _mlx_lm(path, position)


def _mlx_lm(path: Path, position: int) -> list[Thing]:
    """mlx-lm's way with a cache of the same shape; nothing where it is not installed."""
    try:
        import mlx.core as mx
        from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

        from bench.peers.mlx_lm import made_cache
    except ImportError:
        return []
    saved = path.with_name("cache.safetensors")
    caches = made_cache(position + 1)
    save_prompt_cache(str(saved), caches)
    caches.clear()

    def load() -> None:
        mx.eval([cache.state for cache in load_prompt_cache(str(saved))])

    return [Thing(LOAD, load)]


def restore_rows(path: Path, data: memoryview, rounds: int) -> list[Row]:
    """The rows of the table; ratios of speeds, so 0.5 is twice the time."""
    things = restore_things(path, data)
    found = in_turns(things, rounds)
    rows = [
        Row.of(found, RESTORE, FLOOR, 0.5, len(data)),
        Row.of(found, RESTORE_1, FLOOR, None, len(data)),
    ]
    if LOAD in found:
        rows.append(Row.of(found, RESTORE, LOAD, 1.0, len(data)))
    return rows
