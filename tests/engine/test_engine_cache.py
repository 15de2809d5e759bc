"""The adapter behind mlx-lm's cache protocol: masks, routes, attend before you overwrite."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from engine_support import HEAD, TOKEN
from test_engine_planes import FakeNetwork, arrays, positions_in

from engine.cache import PlaneCache, window_mask
from engine.generation import empty_planes
from engine.origins import PlaneLayout

LAYOUTS = pytest.mark.parametrize("layout", [HEAD, TOKEN])
W = 5


def caches(layout: PlaneLayout) -> tuple[PlaneCache, PlaneCache]:
    ring, full, _ = empty_planes(FakeNetwork(layout))
    return PlaneCache(ring, W), PlaneCache(full, None)


def feed(cache: PlaneCache, count: int) -> mx.array:
    start = cache.offset
    return cache.update_and_fetch(*arrays(list(range(start, start + count))))[0]


def visible(cache: PlaneCache, count: int) -> list[list[int]]:
    """For each query of a call, the positions it sees: mask and span put together."""
    mask = cache.make_mask(count, window_size=cache._window_tokens)
    start = cache.offset
    span = positions_in(feed(cache, count))
    if mask is None:
        return [sorted(span)]
    if isinstance(mask, str):
        assert mask == "causal"
        mask = window_mask(count, len(span) - count, None)
    assert mask.shape == (count, len(span))
    rows = np.array(mask)
    assert span[-count:] == list(range(start, start + count))
    return [[p for p, seen in zip(span, row, strict=True) if seen] for row in rows]


@LAYOUTS
@pytest.mark.parametrize("calls", [[1] * 14, [3, 1, 4, 1, 6, 2], [5, 5, 5], [4, 2, 16, 1], [17, 3]])
def test_every_query_sees_its_window_and_nothing_else(
    layout: PlaneLayout, calls: list[int]
) -> None:
    ring, full = caches(layout)
    for count in calls:
        start = ring.offset
        queries = range(start, start + count)
        assert visible(ring, count) == [list(range(max(0, q - W + 1), q + 1)) for q in queries]
        assert visible(full, count) == [list(range(q + 1)) for q in queries]


@LAYOUTS
def test_attention_reads_the_row_that_is_about_to_be_overwritten(layout: PlaneLayout) -> None:
    ring, _ = caches(layout)
    feed(ring, 7)
    marker = mx.full((1, 2, 1, 3), 99, mx.float16)
    # Position 3 is the oldest row that the next query sees; the chunk overwrites its slot.
    slot = (ring.plane.origin_physical + 3 - ring.plane.origin_logical) % W
    ring.plane._write(slot, marker, marker[..., :1])
    start = ring.offset
    keys, values = ring.update_and_fetch(*arrays(list(range(start, start + 4))))
    # Evaluate the ring first: order of evaluation must not matter.
    mx.eval(ring.plane.arrays())
    assert np.array(keys)[0, :, 0].tolist() == np.array(marker)[0, :, 0].tolist()
    assert float(values[0, 0, 0, 0]) == 99
    assert positions_in(ring.plane.span()[0]) == [10, 6, 7, 8, 9]


@LAYOUTS
def test_the_span_of_a_single_token_is_the_ring_in_physical_order(layout: PlaneLayout) -> None:
    ring, _ = caches(layout)
    feed(ring, 11)
    assert positions_in(feed(ring, 1)) == [10, 11, 7, 8, 9]


def test_offset_is_the_position_and_never_a_row_count() -> None:
    ring, full = caches(HEAD)
    assert ring.keys is None and ring.values is None
    for cache in (ring, full):
        feed(cache, 22)
        feed(cache, 1)
        assert cache.offset == 23
        assert cache.keys is not None and cache.values is not None


def test_a_model_with_another_window_is_refused() -> None:
    ring, full = caches(HEAD)
    for cache, window in ((ring, W + 1), (full, W)):
        with pytest.raises(ValueError, match="window"):
            cache.make_mask(3, window_size=window)


def test_masks_as_arrays_on_request() -> None:
    ring, full = caches(HEAD)
    for cache in (ring, full):
        mask = cache.make_mask(3, return_array=True)
        assert np.array_equal(np.array(mask), np.tri(3, dtype=bool))
