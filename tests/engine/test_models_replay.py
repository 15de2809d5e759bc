"""The promise for every further architecture: what came back continues bit for bit.

Around every wrap a session is cut, taken apart into tiles, and built again from them backwards.
Some cuts continue in a fresh process; the whole matrix there is behind the slow mark.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_support import HEAD, TOKEN, ModelCase, greedy, reinstall, run_calls, save, tokens
from models_support import CASES, label, positions
from replay_plan import continuation
from test_engine_replay import in_fresh_process, to_position

from engine import Generation, Model
from kvpack.layout import LayerKind

W = 8
Load = Callable[[ModelCase], Model]
FolderOf = Callable[[ModelCase], Path]


def short_continuation(generation: Generation) -> bytes:
    """Forced and greedy steps over more than one window, a chunk across the wrap, and steps."""
    forced = [generation.step(token) for token in tokens(4, salt=3)]
    free = greedy(generation, forced[-1].argmax(), W + 2)
    generation.prefill(tokens(3 * W, salt=9))
    after = greedy(generation, 65, 3)
    return b"".join(logits.data for logits in (*forced, *free, *after))


@pytest.mark.parametrize("case", CASES, ids=label)
def test_replay_at_every_position_around_the_wrap(case: ModelCase, load: Load) -> None:
    model, streams = load(case), set()
    for position in positions(W):
        generation = to_position(model, position, call_tokens=5)
        moved = reinstall(model, generation, order=-1)
        twin = short_continuation(generation)
        assert short_continuation(moved) == twin, f"T={position}"
        streams.add(twin)
    # The stream must be able to show a fault: not one token for ever.
    assert len(streams) == len(positions(W))


HISTORIES = {
    "one call": [3 * W + 5],
    "single steps": [1] * (3 * W + 5),
    "steps, then a chunk that crosses the wrap": [*[1] * (W - 3), 2 * W + 8],
    "chunks wider than the ring": [W + 3, 2 * W + 2],
}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("arch", ["gemma3_text", "gpt_oss", "olmo3", "llama"])
def test_any_history_restores_bitwise(arch: str, history: str, load: Load) -> None:
    model = load(ModelCase(arch))
    generation = model.new_generation()
    run_calls(generation, tokens(3 * W + 5), HISTORIES[history])
    moved = reinstall(model, generation)
    assert short_continuation(moved) == short_continuation(generation)


@pytest.mark.parametrize("arch", ["gemma3_text", "gpt_oss", "olmo3"])
def test_a_wrong_rotation_would_show(arch: str, load: Load) -> None:
    """Rows from slot 0 on, as a tidy install would have them, sum in another order."""
    model = load(ModelCase(arch, window=64))
    generation = to_position(model, 5 * 64 + 3)
    moved = reinstall(model, generation)
    for cache in moved._caches:
        plane = cache.plane
        if plane.origins.wraps:
            key, value = plane.ordered(plane.origin_logical, plane.length)
            plane._write(0, key, value)
            plane.origins.origin_physical = 0
    right, wrong = (greedy(g, 65, 24) for g in (generation, moved))
    assert [a.data for a in right] != [b.data for b in wrong]


def replay_in_a_fresh_process(
    case: ModelCase, cuts: list[int], load: Load, folder: Path, tmp_path: Path
) -> None:
    model, twins = load(case), {}
    for position in cuts:
        generation = to_position(model, position)
        snapshot = generation.snapshot(tokens(position))
        save(tmp_path / f"{position}.cut", snapshot, generation.schedule)
        twins[position] = continuation(generation)
    in_fresh_process(folder, case, tmp_path)
    for position, twin in twins.items():
        assert (tmp_path / f"{position}.logits").read_bytes() == twin, f"T={position}"


SOME = [
    ModelCase("gemma3_text", "bfloat16", HEAD, window=16),
    ModelCase("gpt_oss", None, TOKEN, window=16),
]


@pytest.mark.parametrize("case", SOME, ids=label)
def test_replay_in_a_fresh_process(
    case: ModelCase, load: Load, model_folder: FolderOf, tmp_path: Path
) -> None:
    replay_in_a_fresh_process(case, [16, 83], load, model_folder(case), tmp_path)


WHOLE = [
    ModelCase(case.arch, case.dtype, case.layout, window=window)
    for case in CASES
    for window in (8, 64)
]


@pytest.mark.slow
@pytest.mark.parametrize("case", WHOLE, ids=label)
def test_replay_of_the_whole_matrix_in_a_fresh_process(
    case: ModelCase, load: Load, model_folder: FolderOf, tmp_path: Path
) -> None:
    cuts = list(positions(case.window))
    replay_in_a_fresh_process(case, cuts, load, model_folder(case), tmp_path)


def test_plain_models_have_no_window_to_send(load: Load) -> None:
    """All rows of all layers, and nothing else: no sliding tile is in the cut."""
    generation = load(ModelCase("llama")).new_generation()
    run_calls(generation, tokens(300), [300])
    snapshot = generation.snapshot(tokens(300))
    assert {tile.spec.kind for tile in snapshot.tiles} == {LayerKind.FULL}
    assert load(ModelCase("llama")).window_tokens == 131_072
