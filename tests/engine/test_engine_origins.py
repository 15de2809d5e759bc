"""The bookkeeping of planes, without MLX: worked numbers, refusals, and a plain-list model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import CacheDiscontinuity, ContextLimitError, RowsNotLiveError
from engine.origins import Origins, Route, attention_route, physical_rows


def state(origins: Origins) -> tuple[int, int, int]:
    return origins.length, origins.origin_logical, origins.origin_physical


def test_seed_chunk_that_crosses_the_window() -> None:
    origins = Origins(0, 2048, wraps=True)
    origins.append_batch(0, 1900)
    # The wrap case of the chapter: 364 old rows leave, all 512 new rows stay.
    assert origins.append_batch(1900, 512) == (0, 512)
    assert state(origins) == (2048, 364, 364)


def test_seed_steady_state() -> None:
    origins = Origins.restored(0, 2048, 2048, wraps=True)
    assert origins.append_batch(2048, 512) == (0, 512)
    assert state(origins) == (2048, 512, 512)


def test_chunk_wider_than_the_ring() -> None:
    origins = Origins(0, 8, wraps=True)
    origins.append_batch(0, 5)
    # Of rows 5..24 only the last eight survive: the first twelve of the chunk do not.
    assert origins.append_batch(5, 20) == (12, 8)
    assert state(origins) == (8, 17, 1)


def test_full_plane_degenerates_to_an_array() -> None:
    origins = Origins(0, 131_072, wraps=False)
    for start in range(0, 131_072, 512):
        assert origins.append_batch(start, 512) == (0, 512)
    assert state(origins) == (131_072, 0, 0)


@pytest.mark.parametrize("position", [6, 8, 0, -1])
def test_discontinuity_is_refused_before_anything_changes(position: int) -> None:
    origins = Origins(3, 5, wraps=True)
    origins.append_batch(0, 7)
    before = state(origins)
    with pytest.raises(CacheDiscontinuity) as caught:
        origins.append(position)
    assert (caught.value.layer, caught.value.expected, caught.value.got) == (3, 7, position)
    with pytest.raises(CacheDiscontinuity):
        origins.append_batch(position, 2)
    assert state(origins) == before


def test_full_plane_refuses_to_overflow() -> None:
    origins = Origins(0, 5, wraps=False)
    origins.append_batch(0, 4)
    with pytest.raises(ContextLimitError):
        origins.append_batch(4, 2)
    assert state(origins) == (4, 0, 0)
    assert origins.append(4) == 4


@given(
    capacity=st.integers(1, 12),
    chunks=st.lists(st.integers(0, 40), max_size=12),
    probe=st.integers(0, 40),
)
def test_against_a_plain_list(capacity: int, chunks: list[int], probe: int) -> None:
    origins, slots, end = Origins(0, capacity, wraps=True), [-1] * capacity, 0
    for count in chunks:
        source_first, source_count = origins.append_batch(end, count)
        assert source_first + source_count == count
        for piece in origins.segments(end + source_first, source_count):
            for i in range(piece.count):
                slots[piece.physical + i] = end + source_first + piece.offset + i
        end += count
    live = list(range(max(0, end - capacity), end))
    assert origins.origin_physical == origins.origin_logical % capacity
    assert [slots[(origins.origin_physical + i) % capacity] for i in range(len(live))] == live
    assert state(origins) == state(Origins.restored(0, capacity, end, wraps=True))
    first = min(probe, end)
    if first >= origins.origin_logical:
        found = [
            slots[piece.physical + i]
            for piece in origins.segments(first, end - first)
            for i in range(piece.count)
        ]
        assert found == list(range(first, end))
    else:
        with pytest.raises(RowsNotLiveError):
            list(origins.segments(first, end - first))


@given(st.integers(0, 300_000), st.integers(1, 300_000))
def test_memory_is_a_function_of_the_length(length: int, capacity: int) -> None:
    length = min(length, capacity)
    rows = physical_rows(length, capacity)
    assert length <= rows <= capacity
    assert rows <= max(length + 256, length * 9 // 8 + 1)
    # A plane that was given memory for fewer rows and still fits would be given the same now.
    assert physical_rows(rows, capacity) == rows
    assert physical_rows(length, capacity) <= physical_rows(min(capacity, length + 1), capacity)


def test_growth_steps_around_the_first_rungs() -> None:
    assert [physical_rows(n, 10**6) for n in (0, 1, 255, 256, 257, 4096, 4097)] == [
        0, 256, 256, 256, 512, 4096, 4608,
    ]  # fmt: skip
    assert physical_rows(3, 8) == 8


@pytest.mark.parametrize(
    ("held", "count", "route"),
    [
        (0, 1, Route.IN_PLACE),
        (8, 1, Route.IN_PLACE),
        (30, 1, Route.IN_PLACE),
        (0, 8, Route.IN_PLACE),
        (5, 3, Route.IN_PLACE),
        (5, 4, Route.STAGED),
        (0, 9, Route.STAGED),
        (8, 2, Route.STAGED),
        (30, 64, Route.STAGED),
    ],
)
def test_route_of_a_ring(held: int, count: int, route: Route) -> None:
    assert attention_route(Origins.restored(0, 8, held, wraps=True), count) is route


def test_route_of_a_full_plane_is_always_in_place() -> None:
    for held, count in ((0, 1), (0, 512), (500, 512), (1024, 1)):
        origins = Origins.restored(0, 4096, held, wraps=False)
        assert attention_route(origins, count) is Route.IN_PLACE


def test_bookkeeping_and_package_need_no_mlx() -> None:
    code = "import engine, engine.origins, engine.prefill, sys; sys.exit('mlx.core' in sys.modules)"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)
