"""Rows by plain copies, with the host's own memmove as what copies: the bytes of host views.

On a CPU an array's memory is the host's, so all runs for real but the CUDA runtime's few calls.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest
from engine_support import HEAD, TOKEN, ModelCase, greedy, reinstall, run_calls, tokens

import engine
from engine import Generation, Model, PlaneLayout, RowsNotLiveError, device_route
from engine.device_copy import DeviceCopier, address_of
from engine.device_memory import DeviceMemory, HostPool, Lane, cuda_memory
from engine.device_route import going_by, self_test
from engine.errors import BackendError
from engine.tile_runs import tile_runs
from kvpack.layout import LayerKind
from kvpack.snapshot import TileSpec, cut_tile_specs

W = 8
T = 3 * W + 5
Load = Callable[[ModelCase], Model]
kept: list[ctypes.Array[ctypes.c_char]] = []


def pinned(size: int) -> int:
    kept.append((ctypes.c_char * size)())
    return ctypes.addressof(kept[-1])


def late_lane() -> Lane:
    """Copies nothing before it is waited for, as a card may: whoever does not wait is found out."""
    begun: list[tuple[int, int, int]] = []

    def begin(destination: int, source: int, size: int) -> None:
        begun.append((destination, source, size))

    def wait() -> None:
        while begun:
            ctypes.memmove(*begun.pop(0))

    return Lane(begin, begin, wait)


def memory(reaches: bool = True) -> DeviceMemory:
    return DeviceMemory("memmove", late_lane, pinned, lambda address: reaches)


@pytest.fixture
def copies() -> Iterator[DeviceCopier]:
    """Small enough that runs are cut, staging arrays take turns and memory on the host runs out."""
    made = DeviceCopier(memory(), staging_bytes=1 << 16, pinned_bytes=1 << 17, slab_bytes=1 << 13)
    self_test(made)
    with going_by(made):
        yield made


def session(model: Model, length: int) -> Generation:
    generation = model.new_generation()
    run_calls(generation, tokens(length), engine.prefill_calls(0, length, 16))
    return generation


def by_views(generation: Generation, specs: list[TileSpec]) -> list[bytes]:
    planes = [cache.plane for cache in generation._caches]
    rows = [
        [planes[layer].host_rows(spec.first_position, spec.token_count) for layer in spec.layers]
        for spec in specs
    ]
    return [b"".join(keys + values for keys, values in layers) for layers in rows]


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
@pytest.mark.parametrize("arch, dtype", [("muse_glimmer", "float16"), ("gemma3", "bfloat16")])
@pytest.mark.parametrize("length", [1, W, T, 1500])
def test_a_cut_has_the_bytes_of_host_views(
    length: int, arch: str, dtype: str, layout: PlaneLayout, load: Load, copies: DeviceCopier
) -> None:
    generation = session(load(ModelCase(arch, dtype, layout)), length)
    specs = list(cut_tile_specs(generation.layout, length))
    # Else they would go through host views, and nothing would be compared.
    assert all(copies.fits(generation.layout, spec) for spec in specs)
    tiles = generation.read_tiles(specs)
    assert [tile.spec for tile in tiles] == specs
    assert [bytes(tile.data) for tile in tiles] == by_views(generation, specs)
    assert all(memoryview(tile.data).readonly for tile in tiles)


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
@pytest.mark.parametrize("order", [1, -1])
def test_installed_rows_continue_bit_for_bit(
    order: int, layout: PlaneLayout, load: Load, copies: DeviceCopier
) -> None:
    model = load(ModelCase(layout=layout))
    generation = session(model, 600)
    moved = reinstall(model, generation, order)
    for ours, theirs in zip(moved._caches, generation._caches, strict=True):
        for mine, other in zip(ours.plane.arrays(), theirs.plane.arrays(), strict=True):
            assert bool(mx.array_equal(mine, other))
    expected = [logits.data for logits in greedy(generation, 5, 2 * W)]
    assert [logits.data for logits in greedy(moved, 5, 2 * W)] == expected


def test_an_installer_grows_while_rows_arrive(load: Load, copies: DeviceCopier) -> None:
    model = load(ModelCase())
    generation = session(model, 700)
    tiles = generation.snapshot(tokens(700)).tiles
    installer = model.installer(0, growing=True)
    for tile in (tile for tile in tiles if tile.spec.kind is LayerKind.FULL):
        installer.grow(tile.spec.end_position)
        installer.scatter(tile)
    installer.fix(700)
    for tile in (tile for tile in tiles if tile.spec.kind is LayerKind.SWA):
        installer.scatter(tile)
    moved = installer.finish(generation.schedule)
    assert moved.step(3).data == generation.step(3).data


def test_tiles_stay_as_they_were_read_while_others_are_read(
    load: Load, copies: DeviceCopier
) -> None:
    """Memory is given out again only when nobody refers to it, also by a part."""
    generation = session(load(ModelCase()), T)
    specs = list(cut_tile_specs(generation.layout, T))
    free = copies.pool.free_slabs
    first = generation.read_tiles(specs)
    part = memoryview(first[0].data)[4:40]
    expected = bytes(part)
    assert copies.pool.free_slabs < free
    del first
    greedy(generation, 5, 3 * W)
    for _ in range(2 * free):
        generation.read_tile(TileSpec(LayerKind.FULL, (3,), 0, 3 * W))
    assert bytes(part) == expected
    del part
    gc.collect()
    assert copies.pool.free_slabs == free


def test_decoding_after_a_read_writes_in_place(load: Load, copies: DeviceCopier) -> None:
    """No handle to a plane is kept, which would copy the plane at the next step."""
    generation = session(load(ModelCase()), T)
    generation.step(3)
    generation.read_tiles(cut_tile_specs(generation.layout, T + 1))
    plane = generation._caches[3].plane
    assert plane.key is not None
    before = address_of(plane.key)
    generation.step(4)
    assert address_of(plane.key) == before


def test_only_live_rows_can_be_read(load: Load, copies: DeviceCopier) -> None:
    model = load(ModelCase())
    generation = session(model, T)
    good = TileSpec(LayerKind.FULL, (3,), 0, T)
    for bad in (TileSpec(LayerKind.SWA, (0,), T - W - 1, 1), TileSpec(LayerKind.FULL, (3,), T, 1)):
        with pytest.raises(RowsNotLiveError, match=r"layers\[\d\]: rows"):
            generation.read_tiles([good, bad])
    with pytest.raises(RowsNotLiveError):
        model.new_generation().read_tile(TileSpec(LayerKind.FULL, (3,), 0, 1))
    assert bytes(generation.read_tile(good).data) == by_views(generation, [good])[0]


def test_neighbouring_tiles_are_one_run_up_to_a_bound(load: Load) -> None:
    layout = load(ModelCase()).layout
    specs = cut_tile_specs(layout, 1000)
    size = specs[0].data_bytes(layout)
    runs = tile_runs(layout, specs, 2 * size)
    assert sorted(index for run in runs for index in run.indices) == list(range(len(specs)))
    assert [run.indices for run in runs[:3]] == [(0, 1), (2,), (3,)]
    for run in runs:
        for number, index in enumerate(run.indices):
            first = run.first_position + number * run.block_tokens
            assert specs[index] == TileSpec(specs[index].kind, run.layers, first, run.block_tokens)
    assert len(tile_runs(layout, specs, 1)) == len(specs)


def test_what_is_not_as_expected_is_not_used() -> None:
    with pytest.raises(BackendError, match="no CUDA runtime"):
        cuda_memory()
    with pytest.raises(BackendError, match="name"):
        self_test(DeviceCopier(memory(reaches=False)))

    def wrong() -> Lane:
        lane = late_lane()
        return Lane(lambda to, source, size: lane.to_host(to, source, size - 8), *_rest(lane))

    broken = DeviceMemory("wrong", wrong, lambda size: 0, lambda address: True)
    with pytest.raises(BackendError, match="from the GPU"):
        self_test(DeviceCopier(broken))
    assert device_route.copier() is None


def _rest(lane: Lane) -> tuple[Callable[[int, int, int], None], Callable[[], None]]:
    return lane.to_device, lane.wait


def test_memory_of_the_host_is_bounded() -> None:
    pool = HostPool(memory(), 4096, 1024)
    held = [pool.take(1000) for _ in range(6)]
    assert pool.free_slabs == 0
    assert all(len(piece) == 1000 for piece in held)
    assert len(pool.take(5000)) == 5000
    del held
    gc.collect()
    assert pool.free_slabs == 4
    assert (
        HostPool(DeviceMemory("none", late_lane, lambda size: 0, bool), 4096, 1024).take(8).size
        == 8
    )
