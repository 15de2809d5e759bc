"""Which way rows go between planes and host: plain copies on CUDA, host views everywhere else.

Plain copies rest on things that MLX does not promise: that its runtime is the one in this process,
and that an array which was shown to the host stays memory that the runtime can name. So they are
tried once, on small planes of every kind, and wherever anything is not as expected rows go through
host views, as they always did. The bytes are the same, so no fingerprint tells.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from engine import backend
from engine.device_copy import DeviceCopier, gathered
from engine.device_memory import cuda_memory
from engine.dtypes import host_view
from engine.encodings import host_dtype
from engine.errors import BackendError
from engine.origins import Origins, PlaneLayout
from engine.planes import Plane, PlaneShape
from engine.tile_runs import TileRun
from kvpack.layout import Encoding

log = logging.getLogger(__name__)


class _Way:
    """What was asked for instead of the usual way, if anything."""

    asked = False
    copies: DeviceCopier | None = None


def copier() -> DeviceCopier | None:
    """What copies rows here; None where MLX's host views are the way."""
    return _Way.copies if _Way.asked else _copier_for(backend.backend_name())


@contextmanager
def going_by(copies: DeviceCopier | None) -> Iterator[None]:
    """Let rows go by ``copies`` for a while, None for host views: to compare the ways.

    Of the whole process, so only where one thread computes. An installer is used up within it.
    """
    before = (_Way.asked, _Way.copies)
    _Way.asked, _Way.copies = True, copies
    try:
        yield
    finally:
        _Way.asked, _Way.copies = before


@functools.cache
def _copier_for(name: str) -> DeviceCopier | None:
    if name != "cuda":
        return None
    try:
        made = DeviceCopier(cuda_memory())
        self_test(made)
    except BackendError as error:
        log.warning("rows are copied through host views, which is slower: %s", error)
        return None
    log.info("rows are copied by %s", made.name)
    return made


def self_test(made: DeviceCopier) -> None:
    """Write rows and read them back, both ways, around a ring's end; compare with host views.

    Raises:
        BackendError: A byte differs, or something refuses.
    """
    for layout in PlaneLayout:
        for encoding in Encoding:
            _test_plane(made, PlaneShape(0, 24, True, 2, 16, 8, encoding, layout))


def _test_plane(made: DeviceCopier, shape: PlaneShape) -> None:
    word = host_dtype(shape.encoding)
    position = shape.capacity + 10
    # Every byte differs from its neighbours, and no pattern is an infinity or none of a number.
    mask = 0x3BFF if word.itemsize == 2 else 0x3F7FFFFF
    wanted = [
        (np.arange(1, position * shape.kv_heads * dim + 1, dtype=np.uint64) * 2654435761 & mask)
        .astype(word)
        .reshape(position, shape.kv_heads, dim)
        for dim in (shape.key_dim, shape.value_dim)
    ]
    origins = Origins.restored(0, shape.capacity, position, wraps=True)
    buffers = [made.buffer(shape, shape.capacity, rows.shape[2]) for rows in wanted]
    with made.writing(sum(rows.nbytes for rows in wanted)) as writer:
        for buffer, rows in zip(buffers, wanted, strict=True):
            for piece in origins.segments(origins.origin_logical, origins.length):
                first = origins.origin_logical + piece.offset
                buffer.write(piece.physical, rows[first : first + piece.count], writer)
    plane = Plane.installed(shape, position, buffers[0].take(), buffers[1].take())
    blocks, count = 3, 8
    size = sum(count * shape.kv_heads * rows.shape[2] * rows.itemsize for rows in wanted)
    run = TileRun((0,), origins.origin_logical, count, size, tuple(range(blocks)))
    staged = gathered([plane], run)
    mx.eval(staged)
    expected = b"".join(
        rows[first : first + count].tobytes()
        for first in range(origins.origin_logical, position, count)
        for rows in wanted
    )
    if host_view(staged, shape.encoding).tobytes() != expected:
        raise BackendError("rows that were copied to the GPU are not those that were sent")
    if b"".join(part.tobytes() for part in made.read_runs([plane], [run])) != expected:
        raise BackendError("rows that were copied from the GPU are not those that are there")
