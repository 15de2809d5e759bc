"""The promise: what came back continues as what was saved, bit for bit, in another process.

At every position around the wrap a session is cut; a fresh process restores it and goes on. The
twin never moved and makes the same calls.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from engine_support import (
    HEAD,
    TOKEN,
    ModelCase,
    greedy,
    import_path,
    reinstall,
    run_calls,
    save,
    tokens,
)
from replay_plan import GREEDY_STEPS, RAW_STEPS, STEPS_AFTER_CHUNK, continuation

import engine
from engine import Generation, Model
from engine.planes import Plane

W = 64
POSITIONS = [*range(W - 2, W + 3), *range(2 * W - 1, 2 * W + 2), 5 * W + 3]
#: The others share the planes: an equality and one deep wrap are enough for them.
FEWER = [W, 5 * W + 3]
STEPS = RAW_STEPS + GREEDY_STEPS + STEPS_AFTER_CHUNK

CASES = [
    *(
        ModelCase("muse_glimmer", dtype, layout, window=W)
        for dtype in ("float16", "bfloat16")
        for layout in (HEAD, TOKEN)
    ),
    ModelCase("cohere2", "bfloat16", HEAD, window=W),
    ModelCase("exaone4", "float16", TOKEN, window=W),
    ModelCase("afmoe", None, HEAD, window=W),
]


def to_position(model: Model, position: int, call_tokens: int = 24) -> Generation:
    """``position`` tokens by chunks that cross the wrap, the boundary token by its own call."""
    ids = tokens(position)
    generation = model.new_generation()
    run_calls(generation, ids[:-1], engine.prefill_calls(0, position - 1, call_tokens))
    generation.step(ids[-1])
    assert generation.position == position
    return generation


def child_environment() -> dict[str, str]:
    """What a fresh process needs to find the packages and these tests' own modules."""
    here = Path(__file__).parent
    return dict(os.environ, PYTHONPATH=import_path(here.parents[1], here))


def in_fresh_process(model_folder: Path, case: ModelCase, cuts: Path) -> None:
    child = Path(__file__).parent / "replay_child.py"
    command = [sys.executable, str(child), str(model_folder), case.layout.value, str(cuts)]
    subprocess.run(command, check=True, env=child_environment(), timeout=240)


@pytest.mark.parametrize(
    ("case", "positions"),
    [
        (CASES[0], POSITIONS),
        *((case, FEWER) for case in CASES[1:]),
        *(pytest.param(case, POSITIONS, marks=pytest.mark.slow) for case in CASES[1:]),
    ],
    ids=lambda value: value.label if isinstance(value, ModelCase) else f"{len(value)} cuts",
)
def test_replay_in_a_fresh_process(
    case: ModelCase,
    positions: list[int],
    load: Callable[[ModelCase], Model],
    model_folder: Callable[[ModelCase], Path],
    tmp_path: Path,
) -> None:
    model, twins = load(case), {}
    for position in positions:
        generation = to_position(model, position)
        save(
            tmp_path / f"{position}.cut",
            generation.snapshot(tokens(position)),
            generation.schedule,
        )
        twins[position] = continuation(generation)
    in_fresh_process(model_folder(case), case, tmp_path)
    for position, twin in twins.items():
        assert (tmp_path / f"{position}.logits").read_bytes() == twin, f"T={position}"
        assert len(twin) == STEPS * model.vocab_size * model.layout.encoding.element_bytes
    # The stream must be able to show a fault: not one token for ever.
    assert len(set(twins.values())) == len(positions)


#: bfloat16 rounds so coarsely that 64 rows in another order happen to give the same sums.
SENSITIVE = [case for case in CASES if case.dtype != "bfloat16"]


@pytest.mark.parametrize("case", SENSITIVE, ids=lambda case: case.label)
def test_a_wrong_rotation_would_show(case: ModelCase, load: Callable[[ModelCase], Model]) -> None:
    """The tidy install, rows from slot 0 on, is another session: this is what the rule prevents."""
    model = load(case)
    generation = to_position(model, 5 * W + 3)
    moved = reinstall(model, generation)
    for cache in moved._caches:
        plane = cache.plane
        if plane.origins.wraps:
            key, value = plane.ordered(plane.origin_logical, plane.length)
            plane._write(0, key, value)
            plane.origins.origin_physical = 0
    right, wrong = (greedy(g, 65, 24) for g in (generation, moved))
    assert [a.data for a in right] != [b.data for b in wrong]


def histories(position: int) -> dict[str, Sequence[int]]:
    """Ways to reach ``position`` tokens, as call sizes."""
    return {
        "one call": [position],
        "single steps": [1] * position,
        "prefill, then steps": [position - 30, *[1] * 30],
        "steps, then a chunk that crosses the wrap": [*[1] * (W - 3), position - W + 3],
        "chunk wider than the ring, twice": [position // 2, position - position // 2],
    }


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
@pytest.mark.parametrize("history", histories(3 * W + 5))
def test_any_history_restores_bitwise(
    history: str, layout: engine.PlaneLayout, load: Callable[[ModelCase], Model]
) -> None:
    model, position = load(ModelCase(layout=layout, window=W)), 3 * W + 5
    generation = model.new_generation()
    run_calls(generation, tokens(position), histories(position)[history])
    moved = reinstall(model, generation, order=-1)
    assert continuation(moved, 24) == continuation(generation, 24)


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
@pytest.mark.parametrize("edge", [255, 256, 257, 511, 512, 513])
def test_growth_of_full_planes_changes_no_bit(
    edge: int, layout: engine.PlaneLayout, load: Callable[[ModelCase], Model]
) -> None:
    """Around the growth step: grown one way, grown another, installed; equal call shapes."""
    model = load(ModelCase(layout=layout, window=W))
    generation = model.new_generation()
    run_calls(generation, tokens(edge), engine.prefill_calls(0, edge, 64))
    moved = reinstall(model, generation)
    roomy = reinstall(model, generation)
    for cache in roomy._caches:
        if not cache.plane.origins.wraps:
            enlarge(cache.plane)
    runs = [greedy(g, 65, 6) for g in (generation, moved, roomy)]
    assert [x.data for x in runs[0]] == [x.data for x in runs[1]] == [x.data for x in runs[2]]


def enlarge(plane: Plane) -> None:
    """Memory for a thousand rows more, as a plane that was longer once would have."""
    pads = [(0, 1000 if axis == plane.shape.row_axis else 0) for axis in range(4)]
    plane.key, plane.value = mx.pad(plane.key, pads), mx.pad(plane.value, pads)
