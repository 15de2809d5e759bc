"""Install: tiles in any order, each row once, refused by name, detached until it is whole."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from engine_support import HEAD, TOKEN, ModelCase, greedy, reinstall, run_calls, tokens

import engine
from engine import (
    Generation,
    Model,
    PlaneLayout,
    RowsNotLiveError,
    TornGenerationError,
    dtypes,
    install,
)
from engine.oracle import require_installable
from kvpack.errors import LayoutMismatchError, LimitError
from kvpack.identity import CallRun, CallSchedule, require_same_layout
from kvpack.layout import Encoding, LayerKind, Producer
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec

W = 8
T = 3 * W + 5
LAYOUTS = pytest.mark.parametrize("layout", [HEAD, TOKEN])
Load = Callable[[ModelCase], Model]


def session(model: Model, length: int = T) -> Generation:
    generation = model.new_generation()
    run_calls(generation, tokens(length), engine.prefill_calls(0, length, 16))
    return generation


def cut(generation: Generation) -> SessionCacheSnapshot:
    return generation.snapshot(tokens(generation.position))


def schedule(position: int) -> CallSchedule:
    return CallSchedule((CallRun(position, 1),) if position else ())


def split(tile: Tile, model: Model) -> list[Tile]:
    """A tile as tiles of one row and one layer each."""
    out = []
    for layer, keys, values in tile.planes(model.layout):
        key_bytes, value_bytes = (len(rows) // tile.spec.token_count for rows in (keys, values))
        for row in range(tile.spec.token_count):
            spec = TileSpec(tile.spec.kind, (layer,), tile.spec.first_position + row, 1)
            key = keys[row * key_bytes : (row + 1) * key_bytes]
            value = values[row * value_bytes : (row + 1) * value_bytes]
            out.append(Tile(spec, bytes(key) + bytes(value)))
    return out


@LAYOUTS
@pytest.mark.parametrize("length", [1, W - 1, W, W + 1, 2 * W, 300])
def test_single_rows_in_random_order_give_the_same_planes(
    length: int, layout: PlaneLayout, load: Load
) -> None:
    model = load(ModelCase(layout=layout))
    generation = session(model, length)
    pieces = [piece for tile in cut(generation).tiles for piece in split(tile, model)]
    random.Random(length).shuffle(pieces)
    installer = model.installer(length)
    for piece in pieces:
        installer.scatter(piece)
    moved = installer.finish(generation.schedule)
    for ours, theirs in zip(moved._caches, generation._caches, strict=True):
        assert ours.plane.origins.origin_physical == theirs.plane.origins.origin_physical
        for mine, other in zip(ours.plane.arrays(), theirs.plane.arrays(), strict=True):
            assert mine.shape == other.shape and mine.dtype == other.dtype
            assert bool(mx.array_equal(mine, other))
    assert cut(moved).tiles == cut(generation).tiles


@LAYOUTS
def test_install_by_copy_gives_the_same_planes(
    layout: PlaneLayout, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where MLX does not let the host fill its buffers, install copies; the rows are the same."""
    model = load(ModelCase(layout=layout))
    generation = session(model)
    monkeypatch.setattr("engine.host_buffer.host_fill_works", lambda: False)
    moved = reinstall(model, generation)
    assert cut(moved).tiles == cut(generation).tiles
    assert moved.step(65).data == generation.step(65).data


def test_the_host_can_fill_buffers_here() -> None:
    assert dtypes.host_fill_works()


@LAYOUTS
def test_spare_capacity_never_reaches_a_tile(layout: PlaneLayout, load: Load) -> None:
    model = load(ModelCase(layout=layout, window=64))
    poison = {Encoding.F16LE: b"\xad\xde"}[model.layout.encoding]
    for length in (1, 2, 63, 255, 256, 257, 511, 512, 513):
        generation = session(model, length)
        before = cut(generation)
        for cache in generation._caches:
            plane = cache.plane
            for buffer in plane.arrays():
                host = dtypes.host_view(buffer, model.layout.encoding)
                dtypes.token_major(host, layout)[plane.length :] = 0xDEAD
        after = cut(generation)
        assert after.tiles == before.tiles
        assert all(poison * 32 not in bytes(tile.data) for tile in after.tiles)
        held = {kind: model.layout.state_bytes(kind, length) for kind in LayerKind}
        assert sum(len(tile.data) for tile in after.tiles) == sum(held.values())
        # 0xDEAD is a finite half; a NaN in its place would spread. Neither may be visible.
        assert generation.step(65).data == reinstalled_step(model, before)


def reinstalled_step(model: Model, snapshot: SessionCacheSnapshot) -> bytes:
    installer = model.installer(snapshot.position)
    for tile in snapshot.tiles:
        installer.scatter(tile)
    return installer.finish(schedule(snapshot.position)).step(65).data


def test_a_cut_at_position_zero(load: Load) -> None:
    model = load(ModelCase())
    installer = model.installer(0)
    assert installer.missing() == ()
    generation = installer.finish(CallSchedule())
    assert generation.position == 0
    assert generation.step(65).data == model.new_generation().step(65).data


@pytest.mark.parametrize("producer", Producer)
def test_rows_of_the_oracle_are_refused_before_anything_is_taken(
    producer: Producer, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, and by the same rule as the gate of whole snapshots: float32 rows could be its."""
    model = load(ModelCase("afmoe"))
    snapshot = dataclasses.replace(cut(session(model)), producer=producer)
    if producer is not Producer.ORACLE:
        require_installable(model.layout, Producer.ENGINE, snapshot)
        installer = model.installer(T, producer=producer)
        for tile in snapshot.tiles:
            installer.scatter(tile)
        generation = installer.finish(schedule(T))
        assert generation.position == T
        # Those of another program go on, and are never this process's own.
        assert generation.is_mixed is (producer is not Producer.ENGINE)
        return
    monkeypatch.setattr(install, "_PlaneFill", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(LayoutMismatchError) as refusal:
        model.installer(T, producer=producer)
    with pytest.raises(LayoutMismatchError) as gate:
        require_installable(model.layout, Producer.ENGINE, snapshot)
    assert refusal.value.field == "producer" and str(refusal.value) == str(gate.value)


def test_rows_stay_mixed_whatever_is_computed_after_them(load: Load) -> None:
    model = load(ModelCase())
    snapshot = cut(session(model))
    installer = model.installer(T)
    for tile in snapshot.tiles:
        installer.scatter(tile)
    generation = installer.finish(schedule(T), mixed=True)
    with generation.checkpoint(2):
        generation.block([1, 2])
    generation.prefill([3, 4, 5])
    generation.step(6)
    assert generation.is_mixed and not model.new_generation().is_mixed


def test_missing_rows_are_listed_and_refused(load: Load) -> None:
    model = load(ModelCase())
    snapshot = cut(session(model))
    installer = model.installer(T)
    kept = [t for t in snapshot.tiles if t.spec.kind is LayerKind.FULL]
    for tile in kept:
        installer.scatter(tile)
    runs = installer.missing()
    assert [(r.layer, r.first_position, r.token_count) for r in runs] == [
        (layer, T - W, W) for layer in (0, 1, 2)
    ]
    with pytest.raises(LayoutMismatchError, match=r"layers\[0\].rows: expected 8, found 0"):
        installer.finish(schedule(T))
    for tile in snapshot.tiles:
        if tile not in kept:
            installer.scatter(tile)
    assert installer.missing() == ()
    with pytest.raises(LayoutMismatchError, match=r"schedule.position"):
        installer.finish(schedule(T - 1))
    installer.finish(schedule(T))
    with pytest.raises(RuntimeError):
        installer.finish(schedule(T))
    with pytest.raises(RuntimeError):
        installer.scatter(snapshot.tiles[0])


def test_no_row_arrives_twice(load: Load) -> None:
    model = load(ModelCase())
    snapshot = cut(session(model))
    installer = model.installer(T)
    for tile in snapshot.tiles:
        installer.scatter(tile)
        with pytest.raises(LayoutMismatchError, match=r"layers\[\d\].rows.*again"):
            installer.scatter(tile)
    assert cut(installer.finish(schedule(T))).tiles == snapshot.tiles


def test_a_refused_tile_writes_nothing(load: Load) -> None:
    """Its last layer is refused: its first ones must not have been written by then."""
    model = load(ModelCase())
    tile = next(t for t in cut(session(model)).tiles if t.spec.kind is LayerKind.SWA)
    *others, last = split(tile, model)
    installer = model.installer(T)
    installer.scatter(last)
    before = installer.missing()
    with pytest.raises(LayoutMismatchError, match=r"layers\[2\].rows"):
        installer.scatter(tile)
    assert installer.missing() == before
    for piece in others:
        installer.scatter(piece)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (TileSpec(LayerKind.SWA, (0, 1, 2), T - W - 1, 1), "layers[0].first_position"),
        (TileSpec(LayerKind.SWA, (0, 1, 2), T - 1, 2), "layers[0].first_position"),
        (TileSpec(LayerKind.FULL, (3,), T, 1), "layers[3].first_position"),
        (TileSpec(LayerKind.FULL, (4,), 0, 1), "tile.layers"),
        (TileSpec(LayerKind.FULL, (2,), 0, 1), "layers[2].kind"),
        (TileSpec(LayerKind.SWA, (2, 3), T - 1, 1), "layers[3].kind"),
    ],
)
def test_rows_that_do_not_belong_are_refused_by_name(
    spec: TileSpec, field: str, load: Load
) -> None:
    model = load(ModelCase())
    installer = model.installer(T)
    data = bytes(256 * spec.token_count * len(spec.layers))
    with pytest.raises(LayoutMismatchError) as caught:
        installer.scatter(Tile(spec, data))
    assert caught.value.field == field
    assert sum(run.token_count for run in installer.missing()) == 3 * W + T


@pytest.mark.parametrize("change", [-1, 1])
def test_byte_lengths_are_checked_to_the_element(change: int, load: Load) -> None:
    model = load(ModelCase())
    tile = cut(session(model)).tiles[0]
    data = bytes(tile.data)[:-1] if change < 0 else bytes(tile.data) + b"\0"
    with pytest.raises(LayoutMismatchError, match=r"tile.data_bytes"):
        model.installer(T).scatter(Tile(tile.spec, data))


def test_position_outside_the_context_is_refused(load: Load) -> None:
    model = load(ModelCase())
    for position in (-1, model.layout.max_context_tokens + 1):
        with pytest.raises(LimitError):
            model.installer(position)


def changed_layouts(model: Model) -> dict[str, object]:
    """The model's layout with one field changed, by the path that must be named."""
    layers, make = model.layout.layers, dataclasses.replace
    # Both have the byte counts of the model's own layers: only the named field tells.
    swapped = make(layers[0], kv_heads=4, key_dim=16, value_dim=16, rope=None)
    uneven = make(layers[0], key_dim=48, value_dim=16)
    other = [layer if i else make(layer, window_tokens=W + 1) for i, layer in enumerate(layers)]
    return {
        "encoding": make(model.layout, encoding=Encoding.BF16LE),
        "layers": make(model.layout, layers=(*layers, layers[0])),
        "layers[0].window_tokens": make(model.layout, layers=tuple(other)),
        "layers[0].kv_heads": make(model.layout, layers=(swapped, *layers[1:])),
        "layers[0].key_dim": make(model.layout, layers=(uneven, *layers[1:])),
        "layers[2].kind": make(model.layout, layers=(*layers[:2], layers[3], layers[2])),
        "max_context_tokens": make(model.layout, max_context_tokens=4096),
    }


def test_gate_names_the_field_and_leaves_live_sessions_alone(load: Load) -> None:
    model = load(ModelCase())
    live, twin = session(model), session(model)
    before = cut(live).tiles
    for field, layout in changed_layouts(model).items():
        with pytest.raises(LayoutMismatchError) as caught:
            require_same_layout(model.layout, layout)
        assert caught.value.field == field
    wrong = TileSpec(LayerKind.SWA, (0, 1, 2), T - W, 3)
    installer = model.installer(T)
    with pytest.raises(LayoutMismatchError):
        installer.scatter(Tile(wrong, bytes(7)))
    assert cut(live).tiles == before
    assert [a.data for a in greedy(live, 5, 8)] == [b.data for b in greedy(twin, 5, 8)]


@LAYOUTS
def test_live_generations_do_not_touch_each_other(layout: PlaneLayout, load: Load) -> None:
    """Four sessions; whatever happens to one changes no byte of the others."""
    model, rng = load(ModelCase(layout=layout)), random.Random(11)
    lengths = (5, W, 2 * W + 3, 40)
    live = [session(model, n) for n in lengths]
    twins = [session(model, n) for n in lengths]
    for round_ in range(60):
        index = rng.randrange(4)
        match rng.randrange(4):
            case 0:
                live[index] = reinstall(model, live[index])
            case 1:
                cut(live[index])
            case 2:
                chunk = tokens(rng.randrange(1, 20), salt=round_)
                live[index].prefill(chunk)
                twins[index].prefill(chunk)
            case _:
                token = rng.randrange(200)
                assert live[index].step(token).data == twins[index].step(token).data
    for ours, theirs in zip(live, twins, strict=True):
        assert ours.schedule == theirs.schedule
        assert (
            ours.snapshot(tokens(ours.position)).tiles
            == theirs.snapshot(tokens(theirs.position)).tiles
        )


def test_two_models_in_one_process_do_not_touch_each_other(load: Load) -> None:
    """Exact repeats give the first answer, whatever another model did in between."""
    cases = (ModelCase("muse_glimmer"), ModelCase("exaone4", window=64))
    first = {case: [x.data for x in greedy(session(load(case)), 5, 4)] for case in cases}
    for _ in range(5):
        for case in cases:
            generation = reinstall(load(case), session(load(case)))
            assert [x.data for x in greedy(generation, 5, 4)] == first[case]


def test_tiles_do_not_tear_while_the_session_goes_on(load: Load) -> None:
    model = load(ModelCase())
    generation, paused = session(model), session(model)
    snapshot = cut(generation)
    greedy(generation, 5, 3 * W)
    assert snapshot.tiles == cut(paused).tiles


def test_only_live_rows_can_be_read(load: Load) -> None:
    model = load(ModelCase())
    generation = session(model)
    generation.read_tile(TileSpec(LayerKind.SWA, (0, 1, 2), T - W, W))
    generation.read_tile(TileSpec(LayerKind.SWA, (1,), T - 2, 1))
    generation.read_tile(TileSpec(LayerKind.FULL, (3,), 0, T))
    for spec in (
        TileSpec(LayerKind.SWA, (0,), T - W - 1, 1),
        TileSpec(LayerKind.SWA, (2,), T - 1, 2),
        TileSpec(LayerKind.FULL, (3,), T, 1),
    ):
        with pytest.raises(RowsNotLiveError, match=r"layers\[\d\]: rows"):
            generation.read_tile(spec)
    with pytest.raises(LayoutMismatchError):
        generation.read_tile(TileSpec(LayerKind.FULL, (0,), T - 1, 1))
    with pytest.raises(RowsNotLiveError):
        model.new_generation().read_tile(TileSpec(LayerKind.FULL, (3,), 0, 1))


def test_bad_calls_change_nothing(load: Load) -> None:
    model = load(ModelCase())
    generation, twin = session(model), session(model)
    for ids in ([], [-1], [model.vocab_size], [1, 2, 10**9]):
        with pytest.raises(LimitError) as caught:
            generation.prefill(ids)
        assert "1000000000" not in str(caught.value)
    with pytest.raises(LayoutMismatchError, match="token_ids"):
        generation.snapshot(tokens(T - 1))
    assert generation.position == T
    assert generation.step(3).data == twin.step(3).data


class Stop(BaseException):
    """Like an interrupt: no handler for errors sees it."""


def test_a_call_that_stops_half_way_retires_its_generation_only(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(ModelCase())
    generation, twin, other = session(model), session(model), session(model)
    plane = type(generation._caches[2].plane)
    real = plane.append

    def fail(self: object, position: int, *rows: object) -> int:
        if self is generation._caches[2].plane:
            raise Stop
        return real(self, position, *rows)

    monkeypatch.setattr(plane, "append", fail)
    with pytest.raises(Stop):
        generation.step(5)
    for use in (lambda: generation.step(5), lambda: cut(generation)):
        with pytest.raises(TornGenerationError):
            use()
    assert other.step(5).data == twin.step(5).data


def test_the_context_is_a_hard_end(load: Load) -> None:
    model = load(ModelCase())
    limit = model.layout.max_context_tokens
    generation = model.new_generation()
    generation._position = limit - 1
    with pytest.raises(engine.ContextLimitError, match=str(limit + 1)):
        generation.prefill([1, 2])
    assert np.isfinite(model.new_generation().step(1).values()).all()
