"""One layer's keys and values in MLX memory, behind explicit origins.

SWA rings and full planes are the same code: a full plane is a ring that never wraps. Arrays that
come and go are always ``[1, kv_heads, rows, dim]``, as attention wants them, whatever the plane's
own layout. Updates go through slice assignment on the one reference that this class holds, so MLX
writes in place; whoever kept a view alive would force a copy of the whole plane at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.dtypes import HostArray, host_view, mlx_dtype, token_major
from engine.encodings import host_dtype
from engine.origins import Origins, PlaneLayout, physical_rows
from kvpack.layout import CacheLayout, Encoding


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """What a plane is made of, apart from its rows.

    Attributes:
        layer: Index of the layer, for errors.
        capacity: Rows that the plane can hold: the window, or the whole context.
        wraps: True for a ring.
        kv_heads: Key/value heads.
        key_dim: Elements per key head.
        value_dim: Elements per value head.
        encoding: Element type.
        layout: Axis order of the buffers.
    """

    layer: int
    capacity: int
    wraps: bool
    kv_heads: int
    key_dim: int
    value_dim: int
    encoding: Encoding
    layout: PlaneLayout

    @classmethod
    def of(cls, layout: CacheLayout, layer: int, plane_layout: PlaneLayout) -> PlaneShape:
        """The shape of the plane of ``layer`` under ``layout``."""
        shape = layout.layers[layer]
        window = shape.window_tokens
        context = layout.max_context_tokens
        return cls(
            layer=layer,
            capacity=context if window is None else min(window, context),
            # A ring as wide as the context is never full before the context is.
            wraps=window is not None and window < context,
            kv_heads=shape.kv_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            encoding=layout.encoding,
            layout=plane_layout,
        )

    def buffer_shape(self, rows: int, dim: int) -> tuple[int, int, int, int]:
        """Shape of a buffer of ``rows`` rows."""
        if self.layout is PlaneLayout.HEAD_MAJOR:
            return (1, self.kv_heads, rows, dim)
        return (1, rows, self.kv_heads, dim)

    @property
    def row_axis(self) -> int:
        """Axis of the buffer along which rows lie."""
        return 2 if self.layout is PlaneLayout.HEAD_MAJOR else 1


class Plane:
    """The rows of one layer.

    Attributes:
        shape: What the plane is made of.
        origins: Where its rows are.
        key: Buffer of the keys, or None while no row was ever written.
        value: Buffer of the values, likewise.
    """

    __slots__ = (
        "_dtype", "_key_row", "_row_axis", "_value_row", "key", "origins", "shape", "value",
    )  # fmt: skip

    def __init__(self, shape: PlaneShape) -> None:
        self.shape = shape
        # Asked for at every step of every layer.
        self._dtype = mlx_dtype(shape.encoding)
        self._row_axis = shape.row_axis
        self._key_row = (1, shape.kv_heads, 1, shape.key_dim)
        self._value_row = (1, shape.kv_heads, 1, shape.value_dim)
        self.origins = Origins(shape.layer, shape.capacity, wraps=shape.wraps)
        self.key: mx.array | None = None
        self.value: mx.array | None = None

    @classmethod
    def installed(cls, shape: PlaneShape, position: int, key: mx.array, value: mx.array) -> Plane:
        """A plane around filled buffers, as one that has seen ``position`` tokens would be.

        Raises:
            ContextLimitError: A plane that does not wrap cannot hold ``position`` rows.
            ValueError: A buffer does not have the size that a grown plane would have.
        """
        plane = cls(shape)
        plane.origins = Origins.restored(shape.layer, shape.capacity, position, wraps=shape.wraps)
        rows = physical_rows(plane.origins.length, shape.capacity)
        for buffer, dim in ((key, shape.key_dim), (value, shape.value_dim)):
            if buffer.shape != shape.buffer_shape(rows, dim):
                raise ValueError(f"layers[{shape.layer}]: buffer shape {buffer.shape}")
        plane.key, plane.value = key, value
        return plane

    @property
    def capacity(self) -> int:
        """Rows that the plane can hold."""
        return self.origins.capacity

    @property
    def length(self) -> int:
        """Live rows."""
        return self.origins.length

    @property
    def origin_logical(self) -> int:
        """Position of the oldest live row."""
        return self.origins.origin_logical

    @property
    def origin_physical(self) -> int:
        """Slot of the oldest live row."""
        return self.origins.origin_physical

    @property
    def layout(self) -> PlaneLayout:
        """Axis order of the buffers."""
        return self.shape.layout

    def arrays(self) -> tuple[mx.array, ...]:
        """The buffers that exist, for evaluation."""
        return () if self.key is None or self.value is None else (self.key, self.value)

    def append(self, position: int, key: mx.array, value: mx.array) -> int:
        """Write one row, ``[1, kv_heads, 1, dim]`` each, and return its slot.

        Raises:
            CacheDiscontinuity: ``position`` is not the next one. Nothing was written.
            ContextLimitError: The plane is full and does not wrap. Nothing was written.
            ValueError: Shape or dtype of a row is not the plane's. Nothing was written.
        """
        # As append_batch of one row does it, without the calls in between: this runs in every
        # layer at every step, and a tiny model's step is made of such things.
        dtype = self._dtype
        if (
            key.shape != self._key_row or value.shape != self._value_row
            or key.dtype != dtype or value.dtype != dtype
        ):  # fmt: skip
            self._require_rows(key, value, 1)
        slot = self.origins.append(position)
        keys, values = self.key, self.value
        if keys is None or values is None or keys.shape[self._row_axis] < self.origins.length:
            self._grow()
            keys, values = self._buffers()
        if self._row_axis == 2:
            row = slice(slot, slot + 1)
            keys[:, :, row], values[:, :, row] = key, value
        else:
            self._write(slot, key, value)
        return slot

    def append_batch(self, start: int, key: mx.array, value: mx.array) -> tuple[int, int]:
        """Write the rows of a chunk, ``[1, kv_heads, count, dim]`` each.

        Returns:
            ``(source_first, source_count)``: which rows of the chunk are live afterwards.

        Raises:
            CacheDiscontinuity: ``start`` is not the next position. Nothing was written.
            ContextLimitError: The plane is full and does not wrap. Nothing was written.
            ValueError: Shape or dtype of the rows is not the plane's. Nothing was written.
        """
        self._require_rows(key, value, key.shape[2])
        source_first, source_count = self.origins.append_batch(start, key.shape[2])
        self._grow()
        live = slice(source_first, source_first + source_count)
        self.replace(start + source_first, key[:, :, live], value[:, :, live])
        return source_first, source_count

    def replace(self, first: int, key: mx.array, value: mx.array) -> None:
        """Write rows ``[1, kv_heads, count, dim]`` each to the slots of live rows from ``first``.

        Raises:
            RowsNotLiveError: A row of the range is not live. Nothing was written.
        """
        for piece in list(self.origins.segments(first, key.shape[2])):
            rows = slice(piece.offset, piece.offset + piece.count)
            self._write(piece.physical, key[:, :, rows], value[:, :, rows])

    def span(self) -> tuple[mx.array, mx.array]:
        """All live rows in physical order, ``[1, kv_heads, length, dim]``, without a copy.

        For use within the call: the plane's next write may show through what is returned. A slot
        that was never written is not in it: while a ring fills, its live slots are the first ones.
        """
        key, value = self._buffers()
        length = self.origins.length
        if key.shape[self._row_axis] == length and self._row_axis == 2:
            # All of a buffer is the buffer: two operations less for a full ring at every step.
            return key, value
        return self._view(key, 0, length), self._view(value, 0, length)

    def ordered(self, first: int, count: int) -> tuple[mx.array, mx.array]:
        """Live rows ``[first, first + count)`` in logical order, ``[1, kv_heads, count, dim]``.

        Raises:
            RowsNotLiveError: A row of the range is not live.
        """
        pieces = list(self.origins.segments(first, count))
        key, value = self._buffers()
        keys = [self._view(key, piece.physical, piece.count) for piece in pieces]
        values = [self._view(value, piece.physical, piece.count) for piece in pieces]
        if len(pieces) == 1:
            return keys[0], values[0]
        return mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)

    def host_rows(self, first: int, count: int) -> tuple[bytes, bytes]:
        """Immutable copies of live rows: keys, then values, ``[count, kv_heads, dim]`` row-major.

        Raises:
            RowsNotLiveError: A row of the range is not live.
        """
        shape, word = self.shape, host_dtype(self.shape.encoding)
        keys = np.empty((count, shape.kv_heads, shape.key_dim), word)
        values = np.empty((count, shape.kv_heads, shape.value_dim), word)
        self.copy_rows(first, keys, values)
        return keys.tobytes(), values.tobytes()

    def copy_rows(self, first: int, keys: HostArray, values: HostArray) -> None:
        """Copy live rows from ``first`` on into host memory, ``[count, kv_heads, dim]`` each.

        The copy is made at once from memory that was evaluated, so later steps cannot tear it.

        Raises:
            RowsNotLiveError: A row of the range is not live. Nothing was copied.
        """
        pieces = list(self.origins.segments(first, len(keys)))
        for buffer, target in zip(self._buffers(), (keys, values), strict=True):
            rows = token_major(host_view(buffer, self.shape.encoding), self.layout)
            for piece in pieces:
                source = rows[piece.physical : piece.physical + piece.count]
                target[piece.offset : piece.offset + piece.count] = source

    def _buffers(self) -> tuple[mx.array, mx.array]:
        if self.key is None or self.value is None:
            raise RuntimeError(f"layers[{self.shape.layer}]: no row was ever written")
        return self.key, self.value

    def _require_rows(self, key: mx.array, value: mx.array, count: int) -> None:
        shape = self.shape
        for rows, dim in ((key, shape.key_dim), (value, shape.value_dim)):
            if rows.shape != (1, shape.kv_heads, count, dim) or rows.dtype != self._dtype:
                raise ValueError(
                    f"layers[{shape.layer}]: rows {rows.shape} {rows.dtype}, expected "
                    f"(1, {shape.kv_heads}, {count}, {dim}) {self._dtype}"
                )

    def _grow(self) -> None:
        """Give the buffers the memory that ``length`` implies. A plane that wrapped has it all.

        Memory that holds the rows is the memory they imply: rungs imply themselves.
        """
        present = 0 if self.key is None else self.key.shape[self._row_axis]
        if present >= self.origins.length and self.key is not None:
            return
        more = physical_rows(self.length, self.capacity) - present
        key = self._grown(self.key, more, self.shape.key_dim)
        value = self._grown(self.value, more, self.shape.value_dim)
        # Both or neither: the next growth looks at the keys alone.
        self.key, self.value = key, value

    def shrink(self) -> None:
        """Give back memory that ``length`` does not imply, after rows were taken back. Lazy.

        Kernels may be chosen by the size of a buffer (MLX's CUDA backend does), so a plane that
        grew for rows which were then rejected must not keep the larger one: a moved session, or
        one that never saw the block, would compute other bits. It costs a copy of the plane, once
        for a block that crossed a growth step.
        """
        rows = physical_rows(self.length, self.capacity)
        if self.key is None or self.value is None or self.key.shape[self._row_axis] <= rows:
            return
        if rows == 0:
            self.key = self.value = None
            return
        kept = (slice(None),) * self._row_axis + (slice(0, rows),)
        self.key, self.value = mx.contiguous(self.key[kept]), mx.contiguous(self.value[kept])

    def _grown(self, buffer: mx.array | None, more_rows: int, dim: int) -> mx.array:
        fresh = mx.zeros(self.shape.buffer_shape(more_rows, dim), self._dtype)
        if buffer is None:
            return fresh
        return mx.concatenate([buffer, fresh], axis=self._row_axis)

    def _write(self, slot: int, key: mx.array, value: mx.array) -> None:
        keys, values = self._buffers()
        slots = slice(slot, slot + key.shape[2])
        if self._row_axis == 2:
            keys[:, :, slots], values[:, :, slots] = key, value
        else:
            keys[:, slots] = key.transpose(0, 2, 1, 3)
            values[:, slots] = value.transpose(0, 2, 1, 3)

    def _view(self, buffer: mx.array, slot: int, count: int) -> mx.array:
        if self._row_axis == 2:
            return buffer[:, :, slot : slot + count]
        return buffer[:, slot : slot + count].transpose(0, 2, 1, 3)
