"""A plane's buffer while it is filled from the host, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.device_copy import DeviceBuffer, Writer
from engine.device_route import copier
from engine.dtypes import HostArray, host_fill_works, host_view, mlx_dtype, token_major
from engine.encodings import host_dtype
from engine.origins import physical_rows
from engine.planes import PlaneShape

#: Keys and values of one plane.
Buffers = tuple["HostBuffer | DeviceBuffer", "HostBuffer | DeviceBuffer"]


class HostBuffer:
    """A buffer that the host writes into.

    Args:
        shape: Of the plane.
        rows: That the buffer has.
        dim: Elements of a head.
        array: Zeros of that size, evaluated, nobody else's; None where the host cannot fill them.
    """

    __slots__ = ("_array", "_dim", "_host", "_rows", "_shape")

    def __init__(self, shape: PlaneShape, rows: int, dim: int, array: mx.array | None) -> None:
        self._shape = shape
        self._dim = dim
        self._array = array
        if array is None:
            size = shape.buffer_shape(rows, dim)
            self._host: HostArray = np.zeros(size, host_dtype(shape.encoding))
        else:
            self._host = host_view(array, shape.encoding)
        #: ``[rows, kv_heads, dim]``
        self._rows = token_major(self._host, shape.layout)

    def write(self, slot: int, rows: HostArray, writer: Writer | None) -> None:
        """Copy rows ``[count, kv_heads, dim]`` to ``slot`` and those after it."""
        self._rows[slot : slot + len(rows)] = rows

    def resized(self, rows: int) -> HostBuffer:
        """A buffer of at least as many rows that holds the same ones; itself where none is new."""
        held = len(self._rows)
        if rows == held:
            return self
        array = None
        if self._array is not None:
            array = mx.zeros(self._shape.buffer_shape(rows, self._dim), self._array.dtype)
            mx.eval(array)
        larger = HostBuffer(self._shape, rows, self._dim, array)
        larger._rows[:held] = self._rows
        return larger

    def take(self) -> mx.array:
        """The filled array. Drop this buffer then: its host view bars MLX from writing in place."""
        if self._array is not None:
            return self._array
        return mx.array(self._host).view(mlx_dtype(self._shape.encoding))


def new_buffers(shapes: Sequence[PlaneShape], position: int) -> list[Buffers]:
    """Buffers of planes after ``position`` tokens.

    Their memory is asked for at once: each evaluation costs about as much as 1 MiB of zeros.
    """
    copies = copier()
    held = [physical_rows(min(position, shape.capacity), shape.capacity) for shape in shapes]
    sizes = [
        (shape, rows, dim)
        for shape, rows in zip(shapes, held, strict=True)
        for dim in (shape.key_dim, shape.value_dim)
    ]
    buffers: list[HostBuffer | DeviceBuffer]
    if copies is not None:
        buffers = [copies.buffer(*size) for size in sizes]
    elif host_fill_works():
        arrays = [
            mx.zeros(s.buffer_shape(rows, dim), mlx_dtype(s.encoding)) for s, rows, dim in sizes
        ]
        mx.eval(arrays)
        buffers = [HostBuffer(*size, array) for size, array in zip(sizes, arrays, strict=True)]
    else:
        buffers = [HostBuffer(*size, None) for size in sizes]
    return list(zip(buffers[::2], buffers[1::2], strict=True))
