"""Planes against a plain list: every row carries its position, so a slot error shows as one."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from engine_support import HEAD, TOKEN
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.dtypes import host_view, mlx_dtype
from engine.errors import CacheDiscontinuity, ContextLimitError, RowsNotLiveError
from engine.generation import empty_planes
from engine.install import Installer
from engine.origins import PlaneLayout
from engine.planes import Plane
from kvpack.identity import CallRun, CallSchedule
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout
from kvpack.snapshot import Tile, TileSpec, cut_tile_specs

WINDOW, CONTEXT = 5, 60
HEADS, KEY_DIM, VALUE_DIM = 2, 3, 1
LAYOUT = CacheLayout(
    (
        LayerLayout(LayerKind.SWA, WINDOW, HEADS, KEY_DIM, VALUE_DIM),
        LayerLayout(LayerKind.FULL, None, HEADS, KEY_DIM, VALUE_DIM),
        # A second window: each layer keeps its own.
        LayerLayout(LayerKind.SWA, WINDOW - 2, HEADS, KEY_DIM, VALUE_DIM),
    ),
    Encoding.F16LE,
    CONTEXT,
)


@dataclass
class FakeNetwork:
    """A layout without a model: planes and installers need no more."""

    plane_layout: PlaneLayout
    layout: CacheLayout = LAYOUT
    vocab_size: int = 10

    def forward(self, token_ids: mx.array, caches: object) -> mx.array:
        raise RuntimeError("no network behind these planes")


def tagged(positions: list[int], dim: int, sign: int) -> np.ndarray:
    """Rows ``[rows, heads, dim]`` whose elements tell position, head and dimension."""
    tags = np.array(positions).reshape(-1, 1, 1) * 8
    heads = np.arange(HEADS).reshape(1, -1, 1) * 4
    return (sign * (tags + heads + np.arange(dim) + 1)).astype(np.float16)


def arrays(positions: list[int]) -> tuple[mx.array, mx.array]:
    """The rows as attention's arrays ``[1, heads, rows, dim]``."""
    return tuple(
        mx.array(tagged(positions, dim, sign).transpose(1, 0, 2)[None])
        for dim, sign in ((KEY_DIM, 1), (VALUE_DIM, -1))
    )  # type: ignore[return-value]


def positions_in(span: mx.array) -> list[int]:
    """Which positions a span of keys holds, in its own order; every element is checked."""
    rows = np.array(span)[0].transpose(1, 0, 2)
    found = ((rows[:, 0, 0] - 1) / 8).astype(int).tolist()
    assert np.array_equal(rows, tagged(found, rows.shape[2], 1))
    return found


class PlaneMachine(RuleBasedStateMachine):
    """Two rings of different windows and a full plane, fed alike, against a list of positions."""

    layout = HEAD

    def __init__(self) -> None:
        super().__init__()
        self.network = FakeNetwork(self.layout)
        self.planes = empty_planes(self.network)
        self.end = 0

    @precondition(lambda self: self.end < CONTEXT)
    @rule()
    def append(self) -> None:
        for plane in self.planes:
            slot = plane.append(self.end, *arrays([self.end]))
            assert slot == (plane.origin_physical + plane.length - 1) % plane.capacity
        self.end += 1

    @rule(count=st.integers(0, 3 * WINDOW + 1))
    def append_batch(self, count: int) -> None:
        count = min(count, CONTEXT - self.end)
        new = list(range(self.end, self.end + count))
        if count == 0:
            return
        for plane in self.planes:
            first, survivors = plane.append_batch(self.end, *arrays(new))
            assert new[first:] == new[count - min(count, plane.capacity) :]
            assert survivors == min(count, plane.capacity)
        self.end += count

    @rule(error=st.sampled_from([-3, -1, 1, 7]), count=st.integers(1, 3))
    def refuse_a_gap(self, error: int, count: int) -> None:
        rows = arrays(list(range(count)))
        for plane in self.planes:
            with pytest.raises(CacheDiscontinuity):
                plane.append_batch(self.end + error, *rows)

    @rule()
    def poison_what_no_row_was_written_to(self) -> None:
        for plane in self.planes:
            for buffer in plane.arrays():
                axis = plane.shape.row_axis
                if plane.length < buffer.shape[axis]:
                    spare = (slice(None),) * axis + (slice(plane.length, None),)
                    buffer[spare] = float("nan")

    @precondition(lambda self: self.end > 0)
    @rule(backwards=st.booleans())
    def reinstall(self, backwards: bool) -> None:
        mx.eval([buffer for plane in self.planes for buffer in plane.arrays()])
        tiles = [self.tile(spec) for spec in cut_tile_specs(LAYOUT, self.end)]
        installer = Installer(self.network, self.end)
        for tile in tiles[::-1] if backwards else tiles:
            installer.scatter(tile)
        schedule = CallSchedule((CallRun(self.end, 1),))
        generation = installer.finish(schedule)
        self.planes = [cache.plane for cache in generation._caches]

    def tile(self, spec: TileSpec) -> Tile:
        parts: list[bytes] = []
        for layer in spec.layers:
            rows = self.planes[layer].host_rows(spec.first_position, spec.token_count)
            positions = list(range(spec.first_position, spec.end_position))
            assert rows[0] == tagged(positions, KEY_DIM, 1).tobytes()
            assert rows[1] == tagged(positions, VALUE_DIM, -1).tobytes()
            parts.extend(rows)
        return Tile(spec, b"".join(parts))

    @invariant()
    def rows_are_where_they_belong(self) -> None:
        for plane in self.planes:
            live = list(range(max(0, self.end - plane.capacity), self.end))
            assert plane.length == len(live)
            assert plane.origin_physical == plane.origin_logical % plane.capacity
            if not live:
                continue
            turn = plane.origin_logical % plane.capacity
            physical = live if not turn else live[len(live) - turn :] + live[: len(live) - turn]
            assert positions_in(plane.span()[0]) == physical
            assert positions_in(plane.ordered(live[0], len(live))[0]) == live
            assert positions_in(plane.ordered(live[-1], 1)[0]) == live[-1:]

    @invariant()
    def dead_rows_are_refused(self) -> None:
        ring = self.planes[0]
        read = ring.origins.require_live if ring.key is None else ring.host_rows
        for first in (self.end, self.end - WINDOW - 1):
            with pytest.raises(RowsNotLiveError):
                read(first, 1)
        if self.end > WINDOW:
            with pytest.raises(RowsNotLiveError):
                self.planes[2].host_rows(self.end - WINDOW, 1)


class TokenMajorMachine(PlaneMachine):
    layout = TOKEN


_limits = settings(max_examples=40, stateful_step_count=14, deadline=None)
TestHeadMajor = PlaneMachine.TestCase
TestHeadMajor.settings = _limits
TestTokenMajor = TokenMajorMachine.TestCase
TestTokenMajor.settings = _limits


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
def test_full_plane_is_refused_at_the_end_of_the_context(layout: PlaneLayout) -> None:
    plane = empty_planes(FakeNetwork(layout))[1]
    plane.append_batch(0, *arrays(list(range(CONTEXT))))
    with pytest.raises(ContextLimitError):
        plane.append(CONTEXT, *arrays([CONTEXT]))
    assert positions_in(plane.span()[0]) == list(range(CONTEXT))


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
def test_rows_of_another_shape_or_dtype_are_refused(layout: PlaneLayout) -> None:
    plane = empty_planes(FakeNetwork(layout))[0]
    key, value = arrays([0])
    with pytest.raises(ValueError, match=r"layers\[0\]"):
        plane.append(0, value, key)
    with pytest.raises(ValueError, match="float32"):
        plane.append(0, key.astype(mx.float32), value)
    assert plane.length == 0 and plane.key is None


def address(plane: Plane) -> int:
    return host_view(plane.key, plane.shape.encoding).__array_interface__["data"][0]


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
def test_updates_happen_in_place(layout: PlaneLayout) -> None:
    for plane in empty_planes(FakeNetwork(layout)):
        plane.append_batch(0, *arrays(list(range(9))))
        mx.eval(plane.arrays())
        before = address(plane)
        for position in range(9, 40):
            plane.append(position, *arrays([position]))
            mx.eval(plane.arrays())
            plane.host_rows(position, 1)
        assert address(plane) == before


def test_host_rows_are_a_copy() -> None:
    plane = empty_planes(FakeNetwork(HEAD))[0]
    plane.append_batch(0, *arrays(list(range(5))))
    mx.eval(plane.arrays())
    rows = plane.host_rows(0, 5)
    for position in range(5, 10):
        plane.append(position, *arrays([position]))
        mx.eval(plane.arrays())
    assert rows[0] == tagged(list(range(5)), KEY_DIM, 1).tobytes()
    assert mlx_dtype(plane.shape.encoding) == mx.float16
