"""Rows back into planes: a detached generation, built from tiles in any order.

Memory is taken when the installer is made, so a target can refuse early. Nothing live is touched:
the generation exists only once every row arrived, and publishing it is the owner's swap.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.dtypes import (
    HostArray,
    host_dtype,
    host_fill_works,
    host_view,
    mlx_dtype,
    token_major,
)
from engine.generation import Generation, Network
from engine.origins import Origins, physical_rows
from engine.planes import Plane, PlaneShape
from kvpack.errors import LayoutMismatchError
from kvpack.identity import CallSchedule
from kvpack.limits import check_range
from kvpack.snapshot import Tile, TileSpec


@dataclass(frozen=True, slots=True)
class MissingRows:
    """A run of rows of one layer that has not arrived."""

    layer: int
    first_position: int
    token_count: int


class _Buffer:
    """A plane's buffer while it is filled from the host."""

    __slots__ = ("_array", "_host", "_shape")

    def __init__(self, shape: PlaneShape, rows: int, dim: int) -> None:
        self._shape = shape
        size = shape.buffer_shape(rows, dim)
        self._array: mx.array | None = None
        if host_fill_works():
            self._array = mx.zeros(size, mlx_dtype(shape.encoding))
            mx.eval(self._array)
            self._host = host_view(self._array, shape.encoding)
        else:
            self._host = np.zeros(size, host_dtype(shape.encoding))

    def rows(self) -> HostArray:
        """Writable view ``[rows, kv_heads, dim]``."""
        return token_major(self._host, self._shape.layout)

    def take(self) -> mx.array:
        """The filled array. Drop this buffer then: its host view bars MLX from writing in place."""
        if self._array is not None:
            return self._array
        return mx.array(self._host).view(mlx_dtype(self._shape.encoding))


class _PlaneFill:
    """One layer's buffers and which of its rows have arrived."""

    __slots__ = ("arrived", "key", "origins", "shape", "value")

    def __init__(self, shape: PlaneShape, position: int) -> None:
        self.shape = shape
        self.origins = Origins.restored(shape.layer, shape.capacity, position, wraps=shape.wraps)
        rows = physical_rows(self.origins.length, shape.capacity)
        self.key = _Buffer(shape, rows, shape.key_dim)
        self.value = _Buffer(shape, rows, shape.value_dim)
        self.arrived: npt.NDArray[np.bool_] = np.zeros(self.origins.length, np.bool_)

    def check(self, spec: TileSpec) -> None:
        """Refuse rows that do not belong here or are here already."""
        field, origins = f"layers[{self.shape.layer}]", self.origins
        first, end = spec.first_position, spec.end_position
        if first < origins.origin_logical or end > origins.next_position:
            live = f"rows in [{origins.origin_logical}, {origins.next_position})"
            raise LayoutMismatchError(f"{field}.first_position", live, f"[{first}, {end})")
        start = first - origins.origin_logical
        if self.arrived[start : start + spec.token_count].any():
            raise LayoutMismatchError(f"{field}.rows", "each row once", f"[{first}, {end}) again")

    def write(self, spec: TileSpec, keys: memoryview, values: memoryview) -> None:
        """Scatter checked rows to ``rotation = origin_logical % capacity``."""
        start = spec.first_position - self.origins.origin_logical
        for buffer, data, dim in (
            (self.key, keys, self.shape.key_dim),
            (self.value, values, self.shape.value_dim),
        ):
            rows = np.frombuffer(data, host_dtype(self.shape.encoding))
            rows = rows.reshape(spec.token_count, self.shape.kv_heads, dim)
            target = buffer.rows()
            for piece in self.origins.segments(spec.first_position, spec.token_count):
                source = rows[piece.offset : piece.offset + piece.count]
                target[piece.physical : piece.physical + piece.count] = source
        self.arrived[start : start + spec.token_count] = True

    def missing(self) -> list[MissingRows]:
        """Runs of rows that have not arrived, ascending."""
        edges = np.flatnonzero(np.diff(np.concatenate(([True], self.arrived, [True]))))
        runs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        origin = self.origins.origin_logical
        return [MissingRows(self.shape.layer, origin + a, b - a) for a, b in runs]

    def plane(self, position: int) -> Plane:
        """The plane, once no row is missing."""
        if position == 0:
            return Plane(self.shape)
        return Plane.installed(self.shape, position, self.key.take(), self.value.take())


class Installer:
    """Builds the generation of a cut at one position from its tiles."""

    __slots__ = ("_finished", "_network", "_planes", "_position")

    def __init__(self, network: Network, position: int) -> None:
        """Take the memory for a cut after ``position`` tokens.

        Raises:
            LimitError: ``position`` is outside the context.
        """
        check_range("position", position, 0, network.layout.max_context_tokens, "tokens")
        self._network = network
        self._position = position
        self._finished = False
        layers = range(len(network.layout.layers))
        self._planes = [
            _PlaneFill(PlaneShape.of(network.layout, i, network.plane_layout), position)
            for i in layers
        ]

    @property
    def position(self) -> int:
        """Tokens that the generation will stand for."""
        return self._position

    def scatter(self, tile: Tile) -> None:
        """Put the rows of ``tile`` where they belong. A refused tile writes nothing.

        Raises:
            LayoutMismatchError: The tile is of another layout, not part of this cut, or here
                already; the field names the layer.
            RuntimeError: The generation was already taken.
        """
        self._require_open()
        pieces = list(tile.planes(self._network.layout))
        for layer in tile.spec.layers:
            self._planes[layer].check(tile.spec)
        for layer, keys, values in pieces:
            self._planes[layer].write(tile.spec, keys, values)

    def missing(self) -> tuple[MissingRows, ...]:
        """Rows that have not arrived, by layer and position; empty when all did."""
        return tuple(run for plane in self._planes for run in plane.missing())

    def finish(self, schedule: CallSchedule) -> Generation:
        """The detached generation.

        Args:
            schedule: The calls that computed the rows, from position 0.

        Raises:
            LayoutMismatchError: A row is missing, or the schedule ends at another position.
            RuntimeError: The generation was already taken.
        """
        self._require_open()
        if schedule.position != self._position:
            raise LayoutMismatchError("schedule.position", self._position, schedule.position)
        for run in self.missing():
            asked = self._planes[run.layer].origins.length
            found = int(self._planes[run.layer].arrived.sum())
            raise LayoutMismatchError(f"layers[{run.layer}].rows", asked, found)
        self._finished = True
        planes = [plane.plane(self._position) for plane in self._planes]
        self._planes = []
        return Generation(self._network, planes, schedule)

    def _require_open(self) -> None:
        if self._finished:
            raise RuntimeError("this installer has already given its generation away")
