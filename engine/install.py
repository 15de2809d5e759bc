"""Rows back into planes: a detached generation, built from tiles in any order.

Memory is taken when the installer is made, so a target can refuse early. Nothing live is touched:
the generation exists only once every row arrived, and publishing it is the owner's swap.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.device_copy import Writer
from engine.device_route import copier
from engine.dtypes import HostArray
from engine.encodings import host_dtype
from engine.generation import Generation, Network
from engine.host_buffer import Buffers, new_buffers
from engine.origins import Origins, Segment, physical_rows
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


class _PlaneFill:
    """One layer's buffers, which of its rows have arrived, and which somebody brings or brought."""

    __slots__ = ("arrived", "claimed", "key", "origins", "shape", "value")

    def __init__(self, shape: PlaneShape, position: int, buffers: Buffers) -> None:
        self.shape = shape
        self.origins = Origins.restored(shape.layer, shape.capacity, position, wraps=shape.wraps)
        self.key, self.value = buffers
        self.arrived: npt.NDArray[np.bool_] = np.zeros(self.origins.length, np.bool_)
        self.claimed: npt.NDArray[np.bool_] = self.arrived.copy()

    def extend(self, position: int) -> None:
        """Make room up to ``position`` in a plane that does not wrap. Rows stay where they are."""
        shape, before = self.shape, self.origins.length
        self.origins = Origins.restored(shape.layer, shape.capacity, position, wraps=False)
        rows = physical_rows(self.origins.length, shape.capacity)
        self.key = self.key.resized(rows)
        self.value = self.value.resized(rows)
        more = np.zeros(position - before, np.bool_)
        self.arrived = np.concatenate((self.arrived, more))
        self.claimed = np.concatenate((self.claimed, more))

    def check(self, spec: TileSpec) -> None:
        """Refuse rows that do not belong here or are here already."""
        field, origins = f"layers[{self.shape.layer}]", self.origins
        first, end = spec.first_position, spec.end_position
        if first < origins.origin_logical or end > origins.next_position:
            live = f"rows in [{origins.origin_logical}, {origins.next_position})"
            raise LayoutMismatchError(f"{field}.first_position", live, f"[{first}, {end})")
        start = first - origins.origin_logical
        if self.claimed[start : start + spec.token_count].any():
            raise LayoutMismatchError(f"{field}.rows", "each row once", f"[{first}, {end}) again")

    def places(self, spec: TileSpec) -> list[Segment]:
        """Where the rows of ``spec`` go: to ``rotation = origin_logical % capacity``."""
        return list(self.origins.segments(spec.first_position, spec.token_count))

    def shares_places(self, other: _PlaneFill) -> bool:
        """Whether rows of one position lie in one slot of both."""
        ours, theirs = self.origins, other.origins
        return (
            ours.origin_logical == theirs.origin_logical
            and ours.origin_physical == theirs.origin_physical
            and ours.capacity == theirs.capacity
        )

    def write(
        self,
        places: Sequence[Segment],
        tokens: int,
        words: HostArray,
        writer: Writer | None,
    ) -> int:
        """Scatter checked rows, the first of ``words``; returns how many elements those were.

        With a writer they are there when it is done.
        """
        shape, end = self.shape, 0
        for buffer, dim in ((self.key, shape.key_dim), (self.value, shape.value_dim)):
            start, end = end, end + tokens * shape.kv_heads * dim
            rows = words[start:end].reshape(tokens, shape.kv_heads, dim)
            for place in places:
                source = rows[place.offset : place.offset + place.count]
                buffer.write(place.physical, source, writer)
        return end

    def claim(self, spec: TileSpec, *, claimed: bool) -> None:
        """Somebody brings the rows of ``spec``, or failed to."""
        start = spec.first_position - self.origins.origin_logical
        self.claimed[start : start + spec.token_count] = claimed

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


def _write(planes: Sequence[_PlaneFill], spec: TileSpec, words: HostArray) -> None:
    """Scatter the checked rows of a tile, given as elements, to its planes."""
    copies = copier()
    with nullcontext() if copies is None else copies.writing(words.nbytes) as writer:
        places, first = planes[0].places(spec), planes[0]
        for plane in planes:
            # Layers of one tile are of one window, but nobody promises that to whoever cuts tiles.
            here = places if plane.shares_places(first) else plane.places(spec)
            words = words[plane.write(here, spec.token_count, words, writer) :]


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

    __slots__ = (
        "_finished", "_foreign", "_growing", "_lock", "_network", "_planes", "_position",
    )  # fmt: skip

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
        self._lock = threading.Lock()
        self._planes: list[_PlaneFill | None] = [None] * len(network.layout.layers)
        self._take_memory(position, rings=not growing)

    def _take_memory(self, position: int, *, rings: bool) -> None:
        """Memory for the planes that have none yet, rings among them or not."""
        network = self._network
        shapes = [
            PlaneShape.of(network.layout, layer, network.plane_layout)
            for layer, plane in enumerate(self._planes)
            if plane is None
        ]
        chosen = [shape for shape in shapes if rings or not shape.wraps]
        for shape, buffers in zip(chosen, new_buffers(chosen, position), strict=True):
            self._planes[shape.layer] = _PlaneFill(shape, position, buffers)

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
        self._take_memory(position, rings=True)

    @property
    def position(self) -> int:
        """Tokens that the generation will stand for."""
        return self._position

    def scatter(self, tile: Tile) -> None:
        """Put the rows of ``tile`` where they belong. A refused tile writes nothing.

        Several threads may do so at once, while nobody grows, fixes or finishes.

        Raises:
            LayoutMismatchError: The tile is of another layout, not part of this cut, or here
                already; the field names the layer.
            RuntimeError: The generation was already taken.
        """
        self._require_open()
        spec, layout = tile.spec, self._network.layout
        expected = spec.data_bytes(layout)
        if len(tile.data) != expected:
            raise LayoutMismatchError("tile.data_bytes", expected, len(tile.data))
        with self._lock:
            self._require_open()
            planes = [self._plane(layer) for layer in spec.layers]
            for plane in planes:
                plane.check(spec)
            for plane in planes:
                plane.claim(spec, claimed=True)
        try:
            _write(planes, spec, np.frombuffer(tile.data, host_dtype(layout.encoding)))
        except BaseException:
            with self._lock:
                for plane in planes:
                    plane.claim(spec, claimed=False)
            raise
        with self._lock:
            for plane in planes:
                plane.note(spec)

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
