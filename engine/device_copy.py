"""Rows between planes in a GPU's memory and tiles in the host's, by plain copies.

Reading. The rows of several tiles are gathered on the GPU, in the tiles' own order, into one of
three staging arrays; from there they are one copy into host memory. While one array is copied out,
the next is filled and the one after it is asked for. The planes are only read, by the same kind of
operation that attention reads them with: nothing of the host's ever touches their pages, so the
next step finds them in place.

Writing. A buffer that is being installed belongs to nobody else and is evaluated, so rows go into
it by address, from any thread. Heads are set apart on the host, in page-locked memory.

Whether rows go this way is decided in :mod:`engine.device_route`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np

from engine.device_memory import (
    PINNED_BYTES,
    SLAB_BYTES,
    DeviceMemory,
    HostBytes,
    HostPool,
    Lane,
)
from engine.dtypes import HostArray, mlx_dtype
from engine.errors import BackendError
from engine.origins import PlaneLayout, Segment
from engine.planes import Plane, PlaneShape
from engine.tile_runs import TileRun, tile_runs
from kvpack.layout import CacheLayout
from kvpack.snapshot import TileSpec

#: Bytes of one of a thread's staging arrays, in the GPU's memory.
STAGING_BYTES: Final = 16 << 20

#: One is copied out, one is being filled, one is asked for.
_STAGES: Final = 3

_WORD: Final = 2
_SPARE_WORDS: Final = 4096


@dataclass(slots=True)
class _Stage:
    """A staging array and the copies out of it."""

    array: mx.array
    lane: Lane
    run: TileRun | None = None


class DeviceCopier:
    """Copies rows by ``memory``.

    Attributes:
        name: What copies, for the log.
        pool: Where tiles lie on the host.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        staging_bytes: int = STAGING_BYTES,
        pinned_bytes: int = PINNED_BYTES,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        """Take the host's part of the memory; the GPU's follows when a thread first reads.

        Raises:
            BackendError: The runtime refuses.
        """
        self.name = memory.name
        self.pool = HostPool(memory, pinned_bytes, slab_bytes)
        self._memory = memory
        self._staging_bytes = staging_bytes
        self._writes = memory.lane()
        # MLX binds streams to threads: what one thread stages no other one may fill.
        self._local = threading.local()

    def fits(self, layout: CacheLayout, spec: TileSpec) -> bool:
        """Whether a tile can be staged; every tile of a pack can."""
        return spec.data_bytes(layout) <= self._staging_bytes

    def read(
        self, planes: Sequence[Plane], layout: CacheLayout, specs: Sequence[TileSpec]
    ) -> list[HostBytes]:
        """The rows of ``specs``, each in memory of its own, as a tile has them.

        On the thread of the model that the planes belong to.

        Raises:
            LayoutMismatchError: A spec names a layer that does not exist or is of another kind.
            RowsNotLiveError: A row was overwritten or is not computed yet.
            BackendError: The runtime refuses to copy.
        """
        return self.read_runs(planes, tile_runs(layout, specs, self._staging_bytes))

    def read_runs(self, planes: Sequence[Plane], runs: Sequence[TileRun]) -> list[HostBytes]:
        """As :meth:`read`, of what is grouped already; by the tiles' indices.

        Raises:
            RowsNotLiveError: As for :meth:`read`, also BackendError.
        """
        stages = self._stages()
        ordinary = _Ordinary(sum(run.tile_bytes * len(run.indices) for run in runs))
        found: dict[int, HostBytes] = {}
        before: _Stage | None = None
        try:
            for turn, run in enumerate(runs):
                stage = stages[turn % _STAGES]
                # What was copied out of this array must be gone before it is filled again.
                stage.lane.wait()
                words = gathered(planes, run).view(mx.uint16)
                stage.array[: words.size] = words
                stage.run = run
                del words
                mx.async_eval(stage.array)  # type: ignore[no-untyped-call]
                # Only now: the card fills this one while the one before it is waited for.
                if before is not None:
                    self._begin(before, ordinary, found)
                before = stage
            if before is not None:
                self._begin(before, ordinary, found)
        finally:
            # Also after an error: nobody may free memory that is being copied into.
            for stage in stages:
                stage.lane.wait()
        # MLX keeps what a call read for a moment after its end, and a plane that somebody else
        # still holds is copied by the next step.
        mx.synchronize()
        return [found[index] for index in sorted(found)]

    def _begin(self, stage: _Stage, ordinary: _Ordinary, found: dict[int, HostBytes]) -> None:
        """Begin to copy what is staged, its tiles one behind the other."""
        run = stage.run
        if run is None:
            raise RuntimeError("nothing is staged")
        mx.eval(stage.array)
        size = run.tile_bytes * len(run.indices)
        data = self.pool.take_pinned(size)
        if data is None:
            data = ordinary.take(size)
        else:
            ordinary.spare(size)
        for number, index in enumerate(run.indices):
            found[index] = data[number * run.tile_bytes : (number + 1) * run.tile_bytes]
        if size:
            stage.lane.to_host(data.ctypes.data, address_of(stage.array), size)

    def _stages(self) -> list[_Stage]:
        stages: list[_Stage] | None = getattr(self._local, "stages", None)
        if stages is None:
            stages = [self._new_stage() for _ in range(_STAGES)]
            self._local.stages = stages
        return stages

    def _new_stage(self) -> _Stage:
        # More words than are ever filled: an update of the whole would be the array's successor,
        # in memory of its own, instead of going into this one. MLX updates in place only what is
        # not much smaller than its memory, and memory that was used before may be larger.
        mx.clear_cache()
        array = mx.zeros((self._staging_bytes // _WORD + _SPARE_WORDS,), mx.uint16)
        mx.eval(array)
        self.address(array)
        return _Stage(array, self._memory.lane())

    @contextmanager
    def writing(self, size: int) -> Iterator[Writer]:
        """A writer for ``size`` bytes of rows; all of them have arrived when the block ends.

        Any thread may write, but not two of them into the same rows.
        """
        scratch = self.pool.take(size)
        writer = Writer(self._writes, scratch)
        try:
            yield writer
        finally:
            self._writes.wait()

    def buffer(self, shape: PlaneShape, rows: int, dim: int) -> DeviceBuffer:
        """A plane's buffer of zeros, to be written into. On the model's thread.

        Raises:
            BackendError: It is not memory that rows can be copied into.
        """
        array = mx.zeros(shape.buffer_shape(rows, dim), mlx_dtype(shape.encoding))
        return DeviceBuffer(self, shape, dim, array)

    def address(self, array: mx.array) -> int:
        """Where an evaluated array lies.

        Raises:
            BackendError: It is not memory that rows can be copied from and to.
        """
        address = address_of(array)
        if not self._memory.reaches(address):
            raise BackendError("MLX's arrays are not memory that both host and GPU can name")
        return address


class _Ordinary:
    """Ordinary memory of one read, in one piece: the system gives large pieces in large pages."""

    __slots__ = ("_left", "_memory", "_used")

    def __init__(self, size: int) -> None:
        self._left = size
        self._memory: HostBytes | None = None
        self._used = 0

    def spare(self, size: int) -> None:
        """So much was found elsewhere."""
        if self._memory is None:
            self._left -= size

    def take(self, size: int) -> HostBytes:
        """The next ``size`` bytes."""
        if self._memory is None:
            self._memory = np.empty(self._left, np.uint8)
        self._used += size
        return self._memory[self._used - size : self._used]


class Writer:
    """Rows on their way into buffers, through memory that is used up from its start to its end."""

    __slots__ = ("_lane", "_scratch", "_used")

    def __init__(self, lane: Lane, scratch: HostBytes) -> None:
        self._lane = lane
        self._scratch = scratch
        self._used = 0

    def put(self, destination: int, rows: HostArray) -> None:
        """Begin to copy ``rows``, whatever their strides, to an address, one after the other."""
        end = self._used + rows.nbytes
        piece = self._scratch[self._used : end]
        if len(piece) != rows.nbytes:
            raise RuntimeError("more rows than the writer was made for")
        piece.view(rows.dtype).reshape(rows.shape)[:] = rows
        self._lane.to_device(destination, piece.ctypes.data, rows.nbytes)
        self._used = end


class DeviceBuffer:
    """A plane's buffer that nobody but its installer refers to, and the host never touches."""

    __slots__ = ("_address", "_array", "_copies", "_dim", "_shape")

    def __init__(self, copies: DeviceCopier, shape: PlaneShape, dim: int, array: mx.array) -> None:
        mx.eval(array)
        self._copies = copies
        self._shape = shape
        self._dim = dim
        self._array = array
        self._address = copies.address(array) if array.size else 0

    def write(self, slot: int, rows: HostArray, writer: Writer | None) -> None:
        """Begin to copy rows ``[count, kv_heads, dim]`` to ``slot`` and those after it.

        Raises:
            RuntimeError: Without a writer.
            BackendError: The runtime refuses.
        """
        if writer is None:
            raise RuntimeError("rows of a buffer in a GPU's memory need a writer")
        shape, head_bytes = self._shape, self._dim * rows.itemsize
        if shape.layout is PlaneLayout.TOKEN_MAJOR:
            writer.put(self._address + slot * shape.kv_heads * head_bytes, rows)
            return
        held = self._array.shape[shape.row_axis]
        for head in range(shape.kv_heads):
            writer.put(self._address + (head * held + slot) * head_bytes, rows[:, head])

    def resized(self, rows: int) -> DeviceBuffer:
        """A buffer of at least as many rows that begins with these; itself where none is new.

        On the model's thread.

        Raises:
            BackendError: It is not memory that rows can be copied into.
        """
        shape, axis = self._shape, self._shape.row_axis
        more = rows - self._array.shape[axis]
        if not more:
            return self
        fresh = mx.zeros(shape.buffer_shape(more, self._dim), self._array.dtype)
        joined = mx.concatenate([self._array, fresh], axis=axis)
        return DeviceBuffer(self._copies, shape, self._dim, joined)

    def take(self) -> mx.array:
        """The filled array. Drop this buffer then."""
        return self._array


def address_of(array: mx.array) -> int:
    """Where an evaluated array lies. Its pages are not touched, and no view is kept."""
    words = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return int(np.array(words, copy=False).ctypes.data)


def gathered(planes: Sequence[Plane], run: TileRun) -> mx.array:
    """The tiles of ``run``, one after the other, as one flat array. Lazy."""
    parts = []
    for plane in (planes[layer] for layer in run.layers):
        # First: a plane without rows has no buffers either.
        pieces = list(plane.origins.segments(run.first_position, run.token_count))
        shape = plane.shape
        for buffer, dim in zip(plane.arrays(), (shape.key_dim, shape.value_dim), strict=True):
            parts.append(_blocks(pieces, shape, buffer, dim, run))
    if len({part.shape for part in parts}) > 1:
        # Heads of unlike size lie side by side only once they are flat, which costs a copy each.
        parts = [part.reshape(part.shape[0], -1) for part in parts]
    return mx.concatenate(parts, axis=1).reshape(-1)


def _blocks(
    pieces: Sequence[Segment], shape: PlaneShape, buffer: mx.array, dim: int, run: TileRun
) -> mx.array:
    """The rows of ``run`` in one buffer: ``[tiles, 1, block_tokens, kv_heads, dim]``. Lazy."""
    heads, held = shape.kv_heads, buffer.shape[shape.row_axis]
    if shape.layout is PlaneLayout.HEAD_MAJOR:
        row, head = dim, held * dim
    else:
        row, head = heads * dim, dim
    tiles, count = len(run.indices), run.block_tokens
    if len(pieces) == 1:
        offset = pieces[0].physical * row
        sizes, strides = (tiles, 1, count, heads, dim), (count * row, count * row, row, head, 1)
        return mx.as_strided(buffer, sizes, strides, offset)
    # Around the ring's end: in two parts, which are then one behind the other.
    parts = [
        mx.as_strided(buffer, (piece.count, heads, dim), (row, head, 1), piece.physical * row)
        for piece in pieces
    ]
    return mx.concatenate(parts, axis=0).reshape(tiles, 1, count, heads, dim)
