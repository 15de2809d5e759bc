"""Chunks of any size, fresh and onto a restored, wrapped session: finite, causal, repeatable."""

from __future__ import annotations

import struct
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from engine_support import HEAD, TOKEN, ModelCase, greedy, reinstall, run_calls, tokens

import engine
from engine import Generation, Model, PlaneLayout
from kvpack.identity import CallRun, CallSchedule
from kvpack.snapshot import Tile, cut_tile_specs

W = 8
CHUNKS = [1, W - 1, W, W + 1, 2 * W, 3 * W + 1]
CASES = [
    ModelCase("muse_glimmer", "float16", HEAD),
    ModelCase("muse_glimmer", "bfloat16", TOKEN),
    ModelCase("cohere2", "float16", TOKEN),
    ModelCase("exaone4", "float16", HEAD),
    ModelCase("afmoe", None, HEAD),
]
#: Largest difference of any logit between unequal call shapes; logits span about +-10.
TOLERANCE = {"float16": 0.06, "bfloat16": 0.5, None: 1e-3}
LENGTH = 6 * W + 5

Load = Callable[[ModelCase], Model]


def calls(length: int, chunk: int) -> list[int]:
    return [min(chunk, length - start) for start in range(0, length, chunk)]


def continued(model: Model, case: ModelCase) -> Generation:
    """A restored session whose rings have wrapped."""
    generation = model.new_generation()
    run_calls(generation, tokens(3 * W + 2, salt=4), [2 * W, W + 2])
    return reinstall(model, generation)


def fresh(model: Model, case: ModelCase) -> Generation:
    return model.new_generation()


STARTS = pytest.mark.parametrize("start", [fresh, continued])
ALL_CASES = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)


@STARTS
@ALL_CASES
def test_chunk_sizes_agree(
    case: ModelCase, start: Callable[[Model, ModelCase], Generation], load: Load
) -> None:
    model, last = load(case), {}
    for chunk in CHUNKS:
        generation = start(model, case)
        run_calls(generation, tokens(LENGTH), calls(LENGTH, chunk))
        last[chunk] = generation.step(66)
        assert np.isfinite(last[chunk].values()).all()
        again = start(model, case)
        run_calls(again, tokens(LENGTH), calls(LENGTH, chunk))
        assert again.step(66).data == last[chunk].data
    for chunk, logits in last.items():
        drift = np.abs(logits.values() - last[W].values()).max()
        assert drift <= TOLERANCE[case.dtype], f"chunk {chunk}: {drift}"


@STARTS
@ALL_CASES
def test_every_logit_of_a_chunk_is_finite_and_causal(
    case: ModelCase, start: Callable[[Model, ModelCase], Generation], load: Load
) -> None:
    """Changing token k never changes logits before k, and does change those from k on."""
    model, ids = load(case), tokens(3 * W + 1)
    for changed in (1, W - 1, W, 2 * W + 3):
        other = [*ids]
        other[changed] = (other[changed] + 1) % 251
        left, right = (all_logits(model, start(model, case), row) for row in (ids, other))
        assert np.isfinite(left).all() and np.isfinite(right).all()
        assert np.array_equal(left[:changed], right[:changed])
        assert not np.array_equal(left[changed], right[changed])


def all_logits(model: Model, generation: Generation, ids: list[int]) -> np.ndarray:
    """Logits of every position of one chunk; the public calls keep only the last."""
    out = model.forward(mx.array([ids]), generation._caches)[0]
    return np.array(out.astype(mx.float32))


@pytest.mark.parametrize("case", CASES[:1], ids=lambda case: case.label)
@pytest.mark.parametrize("beyond", [1, 0, -1])
def test_no_ring_row_belongs_to_padding(case: ModelCase, beyond: int, load: Load) -> None:
    """Prompts of 1, 0 and -1 modulo the prefill chunk: rings hold exactly the last rows."""
    model, chunk = load(case), 16
    length = 4 * chunk + beyond
    generation = model.new_generation()
    run_calls(generation, tokens(length), engine.prefill_calls(0, length, chunk))
    for cache, layer in zip(generation._caches, model.layout.layers, strict=True):
        assert cache.plane.origins.next_position == length
        assert cache.plane.length == layer.held_rows(length)
    one_by_one = model.new_generation()
    run_calls(one_by_one, tokens(length), [1] * length)
    drift = np.abs(generation.step(1).values() - one_by_one.step(1).values()).max()
    assert drift <= TOLERANCE[case.dtype]


def test_deep_positions_are_counted_exactly(load: Load) -> None:
    """At T = 70,000, far beyond what half precision can count, keys turn by the right angle."""
    model, position, token = load(ModelCase()), 70_000, 66
    installer = model.installer(position)
    for spec in cut_tile_specs(model.layout, position):
        installer.scatter(Tile(spec, bytes(spec.data_bytes(model.layout))))
    deep = installer.finish(CallSchedule((CallRun(position, 1),)))
    start = model.new_generation()
    for generation in (deep, start):
        generation.step(token)
    # At position 0 nothing is turned, so this is the bare key.
    bare, turned = (
        np.array(g._caches[0].plane.ordered(g.position - 1, 1)[0].astype(mx.float32))[0, :, 0]
        for g in (start, deep)
    )
    rope = model.layout.layers[0].rope
    theta = struct.unpack("<d", struct.pack("<Q", rope.theta_bits))[0]
    half = rope.dims // 2
    angle = position * theta ** -(np.arange(half, dtype=np.float64) * 2 / rope.dims)
    left, right = bare[:, :half].astype(np.float64), bare[:, half:].astype(np.float64)
    expected = np.concatenate(
        [
            left * np.cos(angle) - right * np.sin(angle),
            right * np.cos(angle) + left * np.sin(angle),
        ],
        axis=1,
    )
    # float32 holds an angle of 70,000 to 0.004; a half-precision position would be off by 16.
    assert np.abs(turned - expected).max() < 0.02


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
def test_positions_beyond_2048_continue_as_the_twin_does(layout: PlaneLayout, load: Load) -> None:
    model = load(ModelCase(layout=layout))
    generation = model.new_generation()
    run_calls(generation, tokens(2100), engine.prefill_calls(0, 2100))
    moved = reinstall(model, generation)
    ours, theirs = (greedy(g, 65, 8) for g in (moved, generation))
    assert [a.data for a in ours] == [b.data for b in theirs]


def test_wide_chunks_of_64_windows(load: Load) -> None:
    model = load(ModelCase())
    generation = model.new_generation()
    run_calls(generation, tokens(64 * W), [64 * W])
    ring = generation._caches[0].plane
    assert (ring.length, ring.origin_logical) == (W, 63 * W)
    assert np.isfinite(generation.step(1).values()).all()
