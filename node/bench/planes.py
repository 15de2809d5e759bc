"""Planes in host memory: what the engine's planes are, without an array library.

The same rules in the same order as :mod:`engine.planes` and :mod:`engine.install`: a row lies at
its position modulo the capacity, a row that was never written is never handed out, and a tile that
is not part of the cut is refused before it writes.
"""

from __future__ import annotations

import numpy as np

from engine import RowsNotLiveError
from kvpack.errors import LayoutMismatchError
from kvpack.layout import CacheLayout
from kvpack.snapshot import Tile, TileSpec
from node.bench.rows import Rows, RowSource


class HostPlane:
    """One layer's keys and values, ``[capacity, row_bytes]`` each."""

    __slots__ = ("capacity", "layer", "roles", "runs")

    def __init__(self, layer: int, capacity: int, roles: tuple[Rows, ...]) -> None:
        self.layer = layer
        self.capacity = capacity
        self.roles = roles
        # Whole rows are whole runs of bytes: a slice of a view costs a fifth of numpy's.
        self.runs = [(rows.shape[1], rows.reshape(-1).data) for rows in roles]

    @property
    def memory_bytes(self) -> int:
        """What the plane takes."""
        return sum(rows.nbytes for rows in self.roles)

    def spans(self, first_position: int, count: int) -> list[tuple[int, int, int]]:
        """``(offset, physical row, rows)`` of at most two runs that hold the positions."""
        found, offset = [], 0
        while offset < count:
            row = (first_position + offset) % self.capacity
            run = min(count - offset, self.capacity - row)
            found.append((offset, row, run))
            offset += run
        return found

    def make(self, source: RowSource, first_position: int, count: int) -> None:
        """Write the rows that ``source`` has for these positions."""
        for offset, row, run in self.spans(first_position, count):
            for role, rows in enumerate(self.roles):
                source.fill(self.layer, role, first_position + offset, rows[row : row + run])

    def count_equal(self, source: RowSource, first_position: int, count: int) -> int:
        """How many rows of each role are those that ``source`` has; at most ``2 * count``."""
        return sum(
            source.count_equal(self.layer, role, first_position + offset, rows[row : row + run])
            for offset, row, run in self.spans(first_position, count)
            for role, rows in enumerate(self.roles)
        )


#: A plane, and the runs of bytes of all layers that have its capacity: size of a row, and memory.
_Place = tuple[HostPlane, list[tuple[int, memoryview]]]


class HostPlanes:
    """All layers' planes of one session."""

    def __init__(self, layout: CacheLayout, capacity_tokens: int) -> None:
        """Take memory for a session of ``capacity_tokens``.

        Rings are one row longer than their window: the boundary call of a commit then leaves every
        row of the cut where it was installed, to be compared. It is touched when it is taken: a
        page that is written for the first time while rows arrive would count as the transfer's own.
        All of it is one array, for which numpy asks the system for large pages: small ones take
        as long as the transfer.
        """
        self.layout = layout
        self.capacity_tokens = capacity_tokens
        self._groups: dict[tuple[int, ...], list[_Place]] = {}
        shapes = [
            (layer.held_rows(capacity_tokens) + 1, size)
            for i, layer in enumerate(layout.layers)
            for size in (layout.key_row_bytes(i), layout.value_row_bytes(i))
        ]
        memory, at, roles = _touched(sum(rows * size for rows, size in shapes)), 0, []
        for rows, size in shapes:
            roles.append(memory[at : at + rows * size].reshape(rows, size))
            at += rows * size
        self.planes = [
            HostPlane(layer, len(keys), (keys, values))
            for layer, (keys, values) in enumerate(zip(roles[::2], roles[1::2], strict=True))
        ]

    @property
    def memory_bytes(self) -> int:
        """What all planes take."""
        return sum(plane.memory_bytes for plane in self.planes)

    def make(self, source: RowSource, first_position: int, end_position: int) -> None:
        """Write the rows of ``[first_position, end_position)`` that will be live at its end."""
        for plane, layer in zip(self.planes, self.layout.layers, strict=True):
            first = max(first_position, layer.first_row(end_position))
            plane.make(source, first, end_position - first)

    def read(self, spec: TileSpec, position: int) -> Tile:
        """Copy the rows of ``spec`` out of planes that stand at ``position``.

        Raises:
            RowsNotLiveError: A row was overwritten or is not there yet.
            LayoutMismatchError: ``spec`` names a layer that does not exist or is of another kind.
        """
        data = np.empty(spec.data_bytes(self.layout), np.uint8)
        at = 0
        for layer in spec.layers:
            self._require_live(layer, spec, position)
            plane = self.planes[layer]
            for rows in plane.roles:
                size = spec.token_count * rows.shape[1]
                out = data[at : at + size].reshape(spec.token_count, rows.shape[1])
                for offset, row, run in plane.spans(spec.first_position, spec.token_count):
                    out[offset : offset + run] = rows[row : row + run]
                at += size
        data.flags.writeable = False
        return Tile(spec, data.data)

    def write(self, tile: Tile) -> None:
        """Put the rows of ``tile`` where they belong; the caller has checked the tile."""
        spec, data, at = tile.spec, memoryview(tile.data), 0
        count = spec.token_count
        for plane, runs in self._places(spec.layers):
            row = spec.first_position % plane.capacity
            if row + count <= plane.capacity:
                for size, rows in runs:
                    end = at + count * size
                    rows[row * size : (row + count) * size] = data[at:end]
                    at = end
                continue
            for size, rows in runs:
                for _, row, run in plane.spans(spec.first_position, count):
                    end = at + run * size
                    rows[row * size : (row + run) * size] = data[at:end]
                    at = end

    def _places(self, layers: tuple[int, ...]) -> list[_Place]:
        """Where rows of these layers lie: keys, then values. Of layers of one capacity, one place.

        Found once for each group of layers, and not for each tile: with the caches just filled by a
        chunk, each step of Python costs several times what it costs by itself.
        """
        found = self._groups.get(layers)
        if found is None:
            found = self._groups[layers] = []
            for plane in (self.planes[layer] for layer in layers):
                if found and found[-1][0].capacity == plane.capacity:
                    found[-1][1].extend(plane.runs)
                else:
                    found.append((plane, list(plane.runs)))
        return found

    def count_equal(self, source: RowSource, position: int) -> tuple[int, int]:
        """``(rows compared, rows equal)``, keys and values apart, of planes at ``position``.

        Compared are the rows of the cut one token before, and the row of that token.
        """
        compared = equal = 0
        for plane, layer in zip(self.planes, self.layout.layers, strict=True):
            first = layer.first_row(position - 1)
            compared += 2 * (position - first)
            equal += plane.count_equal(source, first, position - first)
        return compared, equal

    def last_rows(self, position: int) -> bytes:
        """First and last live row of every plane: what a next token would surely depend on."""
        pieces = []
        for plane, layer in zip(self.planes, self.layout.layers, strict=True):
            for at in (layer.first_row(position), position - 1):
                pieces += [rows[at % plane.capacity].tobytes() for rows in plane.roles]
        return b"".join(pieces)

    def _require_live(self, layer: int, spec: TileSpec, position: int) -> None:
        first = self.layout.layers[layer].first_row(position)
        if spec.first_position < first or spec.end_position > position:
            raise RowsNotLiveError(
                layer, (first, position), (spec.first_position, spec.end_position)
            )


class Arrivals:
    """Which rows of a cut have arrived, layer by layer.

    The cut is known from the start, or it grows: then rows of windows are refused until it is
    fixed.
    """

    def __init__(self, layout: CacheLayout, position: int, *, growing: bool = False) -> None:
        self._layout = layout
        self._growing = growing
        # A byte for each row: of so few rows as a chunk's, bytes are looked at faster than arrays.
        self._arrived = [
            None if growing and layer.window_tokens else bytearray(layer.held_rows(position))
            for layer in layout.layers
        ]
        self.position = position

    def grow(self, position: int) -> None:
        """Rows of full layers up to ``position`` may arrive, too.

        Raises:
            RuntimeError: The cut is fixed.
        """
        if not self._growing:
            raise RuntimeError("the cut is fixed")
        if position > self.position:
            more = bytes(position - self.position)
            for rows in self._arrived:
                if rows is not None:
                    rows.extend(more)
            self.position = position

    def fix(self, position: int) -> None:
        """The cut is after ``position`` tokens.

        Raises:
            LayoutMismatchError: Room was taken for more rows than that.
            RuntimeError: The cut is fixed.
        """
        if position < self.position:
            raise LayoutMismatchError("position", f"at least {self.position}", position)
        self.grow(position)
        self._growing = False
        for layer, rows in enumerate(self._arrived):
            if rows is None:
                held = self._layout.layers[layer].held_rows(position)
                self._arrived[layer] = bytearray(held)

    def take(self, spec: TileSpec) -> None:
        """Note the rows of ``spec``. A refused one notes nothing.

        Raises:
            LayoutMismatchError: They are not part of the cut, or here already.
        """
        spec.data_bytes(self._layout)
        first, count, position = spec.first_position, spec.token_count, self.position
        starts = []
        for layer in spec.layers:
            rows = self._arrived[layer]
            start = -1 if rows is None else first - position + len(rows)
            if (
                rows is None
                or not 0 <= start <= len(rows) - count
                or 1 in rows[start : start + count]
            ):
                raise self._refused(layer, spec)
            starts.append((rows, start))
        arrived = b"\1" * count
        for rows, start in starts:
            rows[start : start + count] = arrived

    def missing(self) -> list[tuple[int, int, int]]:
        """``(layer, rows held, rows arrived)`` of every layer that is not whole."""
        return [
            (layer, len(rows), rows.count(1))
            for layer, rows in enumerate(self._arrived)
            if rows is not None and 0 in rows
        ]

    def _refused(self, layer: int, spec: TileSpec) -> LayoutMismatchError:
        """Why rows of ``spec`` may not arrive in ``layer``."""
        rows = self._arrived[layer]
        if rows is None:
            return self._mismatch(layer, spec, "rows", "none before the cut is fixed")
        first = self.position - len(rows)
        if spec.first_position < first or spec.end_position > self.position:
            expected = f"rows in [{first}, {self.position})"
            return self._mismatch(layer, spec, "first_position", expected)
        return self._mismatch(layer, spec, "rows", "each row once", " again")

    def _mismatch(
        self, layer: int, spec: TileSpec, field: str, expected: str, more: str = ""
    ) -> LayoutMismatchError:
        found = f"[{spec.first_position}, {spec.end_position}){more}"
        return LayoutMismatchError(f"layers[{layer}].{field}", expected, found)


def _touched(size_bytes: int) -> Rows:
    array = np.empty(size_bytes, np.uint8)
    array.fill(0)
    return array
