"""Install by several threads: each row once, and what failed half way counts as not there."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_support import HEAD, TOKEN, ModelCase, run_calls, tokens

import engine
from engine import Generation, Model, PlaneLayout
from engine.host_buffer import HostBuffer
from kvpack.errors import LayoutMismatchError
from kvpack.identity import CallRun, CallSchedule
from kvpack.snapshot import SessionCacheSnapshot, Tile

T = 300
Load = Callable[[ModelCase], Model]
SCHEDULE = CallSchedule((CallRun(T, 1),))


def _cut(model: Model) -> SessionCacheSnapshot:
    generation = model.new_generation()
    run_calls(generation, tokens(T), engine.prefill_calls(0, T, 64))
    return _snapshot(generation)


def _snapshot(generation: Generation) -> SessionCacheSnapshot:
    return generation.snapshot(tokens(T))


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
def test_of_two_threads_that_bring_the_same_rows_one_is_refused(
    layout: PlaneLayout, load: Load
) -> None:
    model = load(ModelCase(layout=layout))
    snapshot = _cut(model)
    for seed in range(8):
        installer, order = model.installer(T), random.Random(seed)
        work = [order.sample(snapshot.tiles, len(snapshot.tiles)) for _ in range(3)]

        def bring(tiles: list[Tile], into: engine.Installer = installer) -> int:
            refused = 0
            for tile in tiles:
                try:
                    into.scatter(tile)
                except LayoutMismatchError:
                    refused += 1
            return refused

        with ThreadPoolExecutor(3) as pool:
            refused = sum(pool.map(bring, work))
        assert refused == 2 * len(snapshot.tiles)
        assert _snapshot(installer.finish(SCHEDULE)).tiles == snapshot.tiles


def test_rows_that_were_written_in_part_are_missing_and_may_come_again(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(ModelCase())
    snapshot = _cut(model)
    installer, (first, *others) = model.installer(T), snapshot.tiles
    write, written = HostBuffer.write, []

    def fails_once(self: HostBuffer, *rest: object) -> None:
        written.append(rest)
        if len(written) == 2:
            raise MemoryError
        write(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(HostBuffer, "write", fails_once)
    with pytest.raises(MemoryError):
        installer.scatter(first)
    for tile in others:
        installer.scatter(tile)
    assert {run.layer for run in installer.missing()} == set(first.spec.layers)
    with pytest.raises(LayoutMismatchError, match="rows"):
        installer.finish(SCHEDULE)
    installer.scatter(first)
    assert _snapshot(installer.finish(SCHEDULE)).tiles == snapshot.tiles
