"""Every k of n: what stays is the call's own rows, what comes back is what was there before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from block_support import after_accepting, at, block_rows, continue_both, install, look, slots
from engine_support import HEAD, TOKEN, ModelCase, reinstall, tokens

from engine import Generation, Model
from engine.origins import physical_rows

BLOCKS = (1, 2, 7, 15, 16)

Load = Callable[[ModelCase], Model]


def starts(window: int, count: int) -> list[int]:
    """Positions at which a block of ``count`` meets every state of a ring of ``window``."""
    near = {window - count - 1, window - count, window - 1, window, window + 1}
    return sorted(t for t in near | {0, window + count + 1, 3 * window} if t >= 0)


def sweep(model: Model, window: int) -> Iterator[tuple[Generation, int]]:
    for count in BLOCKS:
        for start in starts(window, count):
            yield at(model, start), count


def check_every_k(model: Model, generation: Generation, count: int, continued: set[int]) -> None:
    """One state, one block, every k of it."""
    start = generation.position
    block = tokens(count, salt=start + 1)
    before, _, schedule = look(generation)
    origins = slots(generation)
    rows, raw = block_rows(model, reinstall(model, generation), block)
    for kept in range(count + 1):
        live = reinstall(model, generation)
        with live.checkpoint(count) as checkpoint:
            assert [logits.data for logits in live.block(block)] == raw
            checkpoint.accept(kept)
        expected = after_accepting(model.layout, before, rows, start + kept)
        dropped = count - kept
        kept_schedule = schedule.after_call(count, dropped) if kept else schedule
        assert look(live) == (expected, start + kept, kept_schedule), (start, count, kept)
        if not kept:
            assert slots(live) == origins
        if kept in continued:
            continue_both(live, install(model, expected, live))


@pytest.mark.parametrize(
    "window", [8, *(pytest.param(w, marks=pytest.mark.slow) for w in (16, 64))]
)
def test_every_k_of_n_around_the_wrap(load: Load, window: int) -> None:
    model = load(ModelCase(window=window, dtype="float16"))
    for generation, count in sweep(model, window):
        check_every_k(model, generation, count, continued={count // 2})


#: Each of them with a block inside the ring and one that fills it twice is behind the slow mark.
OTHERS = {
    ModelCase(dtype="bfloat16"): (1, 7),
    ModelCase(dtype="bfloat16", layout=TOKEN): (16,),
    ModelCase(arch="cohere2", dtype="float16", layout=HEAD): (7,),
    ModelCase(arch="afmoe"): (16,),
}


@pytest.mark.parametrize(
    ("case", "count"),
    [
        pytest.param(case, count, marks=() if count in quick else pytest.mark.slow)
        for case, quick in OTHERS.items()
        for count in (1, 7, 16)
    ],
    ids=lambda value: value.label if isinstance(value, ModelCase) else str(value),
)
def test_every_k_of_n_for_other_planes(load: Load, case: ModelCase, count: int) -> None:
    model = load(case)
    for start in (case.window - 3, 3 * case.window):
        check_every_k(model, at(model, start), count, continued={0, 1, count})


@pytest.mark.parametrize("window", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_taking_back_single_steps_equals_never_having_made_them(load: Load, window: int) -> None:
    """The draft's way: a checkpoint over n calls of one token. The twin decodes plainly."""
    model = load(ModelCase(window=window, dtype="bfloat16"))
    for start in (window - 4, window, 2 * window + 3):
        origin = at(model, start)
        said = tokens(7, salt=2)
        for kept in range(8):
            live, twin = reinstall(model, origin), reinstall(model, origin)
            with live.checkpoint(7) as checkpoint:
                for token in said:
                    live.step(token)
                checkpoint.accept(kept)
            for token in said[:kept]:
                twin.step(token)
            assert look(live) == look(twin)
            continue_both(live, twin)


def test_twenty_blocks_on_end_equal_one_install_of_what_they_left(load: Load) -> None:
    """Errors of rotation add up: many rejected blocks over a ring that turns and turns."""
    model = load(ModelCase(window=8, dtype="float16"))
    live = at(model, 5)
    table = look(live)[0]
    for number in range(20):
        count = BLOCKS[number % 5]
        kept = (number * 3) % (count + 1)
        block = tokens(count, salt=number)
        rows, _ = block_rows(model, reinstall(model, live), block)
        with live.checkpoint(count) as checkpoint:
            live.block(block)
            checkpoint.accept(kept)
        table = after_accepting(model.layout, table, rows, live.position)
        assert look(live)[0] == table
    continue_both(live, install(model, table, live))


@pytest.mark.parametrize("start", [247, pytest.param(250, marks=pytest.mark.slow), 255, 256])
def test_a_block_that_made_a_plane_grow(load: Load, start: int) -> None:
    """What grew for rows that were taken back is given back: the twin's has not grown either."""
    for case in (ModelCase(dtype="float16"), ModelCase(dtype="bfloat16", layout=TOKEN)):
        model = load(case)
        check_every_k(model, at(model, start), 9, continued={0, 1, 8})


@pytest.mark.parametrize("kept", [None, 0, 1, 3])
def test_memory_follows_from_the_length_after_a_block(load: Load, kept: int | None) -> None:
    """Kernels may be chosen by a buffer's size: a rejected block must not leave a larger one."""
    for case in (ModelCase(dtype="float16"), ModelCase(dtype="bfloat16", layout=TOKEN)):
        generation = at(load(case), 255)
        with generation.checkpoint(9) as checkpoint:
            generation.block(list(range(9)))
            if kept is not None:
                checkpoint.accept(kept)
            else:
                checkpoint.roll_back()
        for plane in (cache.plane for cache in generation._caches):
            present = plane.key.shape[plane.shape.row_axis]
            assert present == physical_rows(plane.length, plane.capacity)


def test_a_block_of_one_has_the_bits_of_a_step(load: Load) -> None:
    model = load(ModelCase(dtype="float16"))
    for start in (3, 7, 8, 21):
        origin = at(model, start)
        live, twin = reinstall(model, origin), reinstall(model, origin)
        assert live.block([65])[0].data == twin.step(65).data
        assert look(live) == look(twin)
