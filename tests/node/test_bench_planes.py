"""Host planes take rows as the engine's do: in rings of several lengths, once, and all or none."""

from __future__ import annotations

import numpy as np
import pytest

from kvpack.errors import LayoutMismatchError
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout
from kvpack.snapshot import Tile, TileSpec
from node.bench.planes import Arrivals, HostPlanes

WINDOWS = (100, 300, 300, 100)
LAYOUT = CacheLayout(
    tuple(
        LayerLayout(LayerKind.SWA, window, 1, 2 + layer, 3) for layer, window in enumerate(WINDOWS)
    ),
    Encoding.F16LE,
    4096,
)


def tile(layers, first, count):
    spec = TileSpec(LayerKind.SWA, layers, first, count)
    made = np.random.default_rng(first).integers(0, 256, spec.data_bytes(LAYOUT), np.uint8)
    return Tile(spec, memoryview(made.tobytes()))


# Rings are one row longer than a window: the first tile goes over the end of some, or of all.
@pytest.mark.parametrize(("first", "count"), [(280, 60), (256, 100), (0, 100), (300, 1)])
@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (1, 2), (0, 3), (3,)])
def test_rows_lie_where_their_positions_say(layers, first, count):
    planes, one = HostPlanes(LAYOUT, 1000), tile(layers, first, count)
    planes.write(one)
    planes.write(one)
    for layer, keys, values in one.planes(LAYOUT):
        plane = planes.planes[layer]
        at = [(first + row) % plane.capacity for row in range(count)]
        for rows, data in zip(plane.roles, (keys, values), strict=True):
            assert rows[at].tobytes() == bytes(data)
    others = [p for layer, p in enumerate(planes.planes) if layer not in layers]
    assert not any(rows.any() for plane in others for rows in plane.roles)


def test_a_tile_that_one_layer_refuses_is_noted_in_none():
    arrivals = Arrivals(LAYOUT, 400)
    arrivals.take(TileSpec(LayerKind.SWA, (2,), 300, 50))
    before = arrivals.missing()
    refused = [
        ((1, 2), 340, 20, "rows"),
        ((1, 2), 390, 11, "first_position"),
        ((0, 1, 2, 3), 299, 1, "first_position"),
        ((1,), 99, 1, "first_position"),
    ]
    for layers, first, count, field in refused:
        with pytest.raises(LayoutMismatchError, match=rf"layers\[\d\]\.{field}"):
            arrivals.take(TileSpec(LayerKind.SWA, layers, first, count))
        assert arrivals.missing() == before
    growing = Arrivals(LAYOUT, 400, growing=True)
    with pytest.raises(LayoutMismatchError, match="none before the cut is fixed"):
        growing.take(TileSpec(LayerKind.SWA, (1,), 390, 1))
