"""Rows back into planes: a detached generation, built from tiles in any order.

Memory is taken when the installer is made, so a target can refuse early. Nothing live is touched:
the generation exists only once every row arrived, and publishing it is the owner's swap.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.device_copy import DeviceBuffer, Writer
from engine.device_route import copier
from engine.dtypes import (
    HostArray,
    host_fill_works,
    host_view,
    mlx_dtype,
    token_major,
)
from engine.encodings import host_dtype
from engine.generation import Generation, Network
from engine.origins import Origins, physical_rows
from engine.planes import Plane, PlaneShape
from kvpack.errors import LayoutMismatchError
from kvpack.identity import CallSchedule
from kvpack.layout import Producer
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

    __slots__ = ("_array", "_dim", "_host", "_rows", "_shape")

    def __init__(self, shape: PlaneShape, rows: int, dim: int) -> None:
        self._shape = shape
        self._rows = rows
        self._dim = dim
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

    def write(self, slot: int, rows: HostArray, writer: Writer | None) -> None:
        """Copy rows ``[count, kv_heads, dim]`` to ``slot`` and those after it."""
        self.rows()[slot : slot + len(rows)] = rows

    def resized(self, rows: int) -> _Buffer:
        """A buffer of at least as many rows that holds the same ones; itself where none is new."""
        if rows == self._rows:
            return self
        larger = _Buffer(self._shape, rows, self._dim)
        larger.rows()[: self._rows] = self.rows()
        return larger

    def take(self) -> mx.array:
        """The filled array. Drop this buffer then: its host view bars MLX from writing in place."""
        if self._array is not None:
            return self._array
        return mx.array(self._host).view(mlx_dtype(self._shape.encoding))


def _new_buffer(shape: PlaneShape, rows: int, dim: int) -> _Buffer | DeviceBuffer:
    copies = copier()
    return _Buffer(shape, rows, dim) if copies is None else copies.buffer(shape, rows, dim)


class _PlaneFill:
    """One layer's buffers and which of its rows have arrived."""

    __slots__ = ("arrived", "key", "origins", "shape", "value")

    def __init__(self, shape: PlaneShape, position: int) -> None:
        self.shape = shape
        self.origins = Origins.restored(shape.layer, shape.capacity, position, wraps=shape.wraps)
        rows = physical_rows(self.origins.length, shape.capacity)
        self.key = _new_buffer(shape, rows, shape.key_dim)
        self.value = _new_buffer(shape, rows, shape.value_dim)
        self.arrived: npt.NDArray[np.bool_] = np.zeros(self.origins.length, np.bool_)

    def extend(self, position: int) -> None:
        """Make room up to ``position`` in a plane that does not wrap. Rows stay where they are."""
        shape, before = self.shape, self.origins.length
        self.origins = Origins.restored(shape.layer, shape.capacity, position, wraps=False)
        rows = physical_rows(self.origins.length, shape.capacity)
        self.key = self.key.resized(rows)
        self.value = self.value.resized(rows)
        self.arrived = np.concatenate((self.arrived, np.zeros(position - before, np.bool_)))

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

    def write(
        self, spec: TileSpec, keys: memoryview, values: memoryview, writer: Writer | None
    ) -> None:
        """Scatter checked rows to ``rotation = origin_logical % capacity``.

        With a writer they are there when it is done.
        """
        for buffer, data, dim in (
            (self.key, keys, self.shape.key_dim),
            (self.value, values, self.shape.value_dim),
        ):
            rows = np.frombuffer(data, host_dtype(self.shape.encoding))
            rows = rows.reshape(spec.token_count, self.shape.kv_heads, dim)
            for piece in self.origins.segments(spec.first_position, spec.token_count):
                source = rows[piece.offset : piece.offset + piece.count]
                buffer.write(piece.physical, source, writer)

    def note(self, spec: TileSpec) -> None:
        """The rows of ``spec`` are there."""
        start = spec.first_position - self.origins.origin_logical
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


def require_continuable(producer: Producer) -> None:
    """Refuse rows that an engine must not continue: the oracle's, even where encodings agree.

    Those of transformers and mlx-lm it continues, as ``compatible``; whether that is consented to
    is its caller's to know. :func:`engine.oracle.require_installable` is the same rule from the
    other side, which may import nothing of this one.

    Raises:
        LayoutMismatchError: The field is ``producer``.
    """
    if producer is Producer.ORACLE:
        raise LayoutMismatchError("producer", "any producer but oracle", producer.value)


class Installer:
    """Builds the generation of a cut from its tiles.

    The cut's position is known from the start, or the installer grows: then rows of full layers
    may arrive before it is fixed, and rows of sliding windows only after.
    """

    __slots__ = ("_finished", "_foreign", "_growing", "_network", "_planes", "_position")

    def __init__(
        self,
        network: Network,
        position: int,
        *,
        growing: bool = False,
        producer: Producer = Producer.ENGINE,
    ) -> None:
        """Take the memory for a cut after ``position`` tokens; if growing, at least so many.

        Raises:
            LayoutMismatchError: Rows of ``producer`` are not continued here. Nothing was taken.
            LimitError: ``position`` is outside the context.
        """
        require_continuable(producer)
        check_range("position", position, 0, network.layout.max_context_tokens, "tokens")
        self._network = network
        self._position = position
        self._growing = growing
        self._foreign = producer is not Producer.ENGINE
        self._finished = False
        shapes = [
            PlaneShape.of(network.layout, layer, network.plane_layout)
            for layer in range(len(network.layout.layers))
        ]
        self._planes = [
            None if growing and shape.wraps else _PlaneFill(shape, position) for shape in shapes
        ]

    def grow(self, position: int) -> None:
        """Take room for rows of full layers up to ``position``. Does nothing where there is.

        Raises:
            LimitError: ``position`` is outside the context.
            RuntimeError: The cut is fixed.
        """
        if not self._growing:
            raise RuntimeError("this installer does not grow, or not any more")
        most = self._network.layout.max_context_tokens
        check_range("position", position, 0, most, "tokens")
        if position > self._position:
            for plane in self._planes:
                if plane is not None:
                    plane.extend(position)
            self._position = position

    def fix(self, position: int) -> None:
        """The cut is after ``position`` tokens: from here on rows of windows are taken, too.

        Raises:
            LayoutMismatchError: Room was taken for more rows than that.
            LimitError: ``position`` is outside the context.
            RuntimeError: The cut is fixed.
        """
        if position < self._position:
            raise LayoutMismatchError("position", f"at least {self._position}", position)
        self.grow(position)
        self._growing = False
        for layer, plane in enumerate(self._planes):
            if plane is None:
                network = self._network
                shape = PlaneShape.of(network.layout, layer, network.plane_layout)
                self._planes[layer] = _PlaneFill(shape, position)

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
            self._plane(layer).check(tile.spec)
        copies = copier()
        with nullcontext() if copies is None else copies.writing(len(tile.data)) as writer:
            for layer, keys, values in pieces:
                self._plane(layer).write(tile.spec, keys, values, writer)
        for layer in tile.spec.layers:
            self._plane(layer).note(tile.spec)

    def missing(self) -> tuple[MissingRows, ...]:
        """Rows that have not arrived, by layer and position; empty when all did.

        Raises:
            LayoutMismatchError: The cut is not fixed, so nobody knows.
        """
        layers = range(len(self._planes))
        return tuple(run for layer in layers for run in self._plane(layer).missing())

    def finish(self, schedule: CallSchedule, *, mixed: bool = False) -> Generation:
        """The detached generation.

        Args:
            schedule: The calls that computed the rows, from position 0.
            mixed: Other numerics than this process's computed some of them. Those of another
                producer than the engine always count as such.

        Raises:
            LayoutMismatchError: A row is missing, or the schedule ends at another position.
            RuntimeError: The generation was already taken.
        """
        self._require_open()
        if schedule.position != self._position:
            raise LayoutMismatchError("schedule.position", self._position, schedule.position)
        for run in self.missing():
            plane = self._plane(run.layer)
            asked, found = plane.origins.length, int(plane.arrived.sum())
            raise LayoutMismatchError(f"layers[{run.layer}].rows", asked, found)
        self._finished = True
        planes = [self._plane(layer).plane(self._position) for layer in range(len(self._planes))]
        self._planes = []
        return Generation(self._network, planes, schedule, mixed=mixed or self._foreign)

    def _plane(self, layer: int) -> _PlaneFill:
        plane = self._planes[layer]
        if plane is None:
            raise LayoutMismatchError(
                f"layers[{layer}].rows", "none before the cut is fixed", "some"
            )
        return plane

    def _require_open(self) -> None:
        if self._finished:
            raise RuntimeError("this installer has already given its generation away")
