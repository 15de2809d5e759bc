"""A call that is built before its token is known: the same bits, and nothing shows before commit.

On this backend it does not pay and is off; here it is turned on.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from engine_support import HEAD, TOKEN, ModelCase, greedy, reinstall, run_calls, tokens

from engine import ARCHITECTURES, Generation, Model, ahead, generation
from engine.ahead import AheadCall
from kvpack.identity import CallRun, CallSchedule

W = 8
Load = Callable[[ModelCase], Model]
CASES = [
    *(ModelCase(arch) for arch in ARCHITECTURES),
    ModelCase("muse_glimmer", "bfloat16", TOKEN),
    ModelCase("cohere2", "bfloat16", HEAD),
]
#: Steps that reach the growth of a full plane, which is no architecture's own: these cases make
#: them, the others three windows of steps, and all of them behind the slow mark.
LONG, SHORT = 250, 3 * W
GROWING = (ModelCase("muse_glimmer"), *CASES[-2:])


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> list[AheadCall]:
    """Turned on; every call that was built ahead is noted."""
    built: list[AheadCall] = []

    class Noted(AheadCall):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            built.append(self)

    monkeypatch.setattr(generation, "AheadCall", Noted)
    monkeypatch.setattr(generation, "pays_here", lambda: True)
    return built


def plain(model: Model, length: int) -> Generation:
    session = model.new_generation()
    session._pays_ahead = False
    run_calls(session, tokens(length), [length])
    return session


def eager(model: Model, length: int) -> Generation:
    session = model.new_generation()
    assert session._pays_ahead
    run_calls(session, tokens(length), [length])
    return session


def state(session: Generation) -> tuple:
    return session.snapshot(tokens(session.position)).tiles


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        *((case, LONG if case in GROWING else SHORT) for case in CASES),
        *(pytest.param(c, LONG, marks=pytest.mark.slow) for c in CASES if c not in GROWING),
    ],
    ids=lambda value: value.label if isinstance(value, ModelCase) else str(value),
)
def test_bits_are_those_of_calls_that_were_not(
    case: ModelCase, steps: int, load: Load, building: list[AheadCall]
) -> None:
    """Across the wrap, a growth step and back to chunks: every logit and every row."""
    model = load(case)
    ours, theirs = eager(model, W - 3), plain(model, W - 3)
    for salt, count in ((1, 2 * W), (2, 1), (3, steps)):
        for token in tokens(count, salt=salt):
            assert ours.step(token).data == theirs.step(token).data
        assert ours.schedule == theirs.schedule
        for session in (ours, theirs):
            session.prefill(tokens(5, salt=salt))
    assert state(ours) == state(theirs)
    # The first step after a chunk is not followed by another in all likelihood.
    assert len(building) == 2 * W - 1 + 0 + steps - 1


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
def test_nothing_shows_before_the_call_is_made(
    layout: object, load: Load, building: list[AheadCall]
) -> None:
    model = load(ModelCase(layout=layout))
    ours, theirs = eager(model, 2 * W + 1), plain(model, 2 * W + 1)
    for token in tokens(4, salt=1):
        ours.step(token)
        theirs.step(token)
    assert building and ours._ahead is not None
    assert ours.position == theirs.position == ours.schedule.position
    for mine, other in zip(ours._caches, theirs._caches, strict=True):
        assert mine.plane.origins.mark() == other.plane.origins.mark()
        for left, right in zip(mine.plane.arrays(), other.plane.arrays(), strict=True):
            assert bool(mx.array_equal(left, right))
    assert state(ours) == state(theirs)


def after_steps(model: Model) -> tuple[Generation, Generation]:
    pair = eager(model, 2 * W + 1), plain(model, 2 * W + 1)
    for session in pair:
        greedy(session, 65, 4)
    return pair


def prefill(session: Generation) -> list[bytes]:
    session.prefill(tokens(W + 3, salt=5))
    return []


def block(session: Generation) -> list[bytes]:
    return [logits.data for logits in session.block(tokens(7, salt=5))]


def roll_back(session: Generation) -> list[bytes]:
    with session.checkpoint(5) as checkpoint:
        out = [logits.data for logits in session.block(tokens(5, salt=6))]
        checkpoint.accept(2)
    return out


def steps_in_checkpoint(session: Generation) -> list[bytes]:
    with session.checkpoint(3) as checkpoint:
        out = [session.step(token).data for token in tokens(3, salt=6)]
        checkpoint.accept(1)
    return out


def cut(session: Generation) -> list[bytes]:
    return [bytes(tile.data) for tile in state(session)]


@pytest.mark.parametrize("act", [prefill, block, roll_back, steps_in_checkpoint, cut])
def test_whatever_comes_instead_is_as_if_nothing_had_been_built(
    act: Callable[[Generation], list[bytes]], load: Load, building: list[AheadCall]
) -> None:
    ours, theirs = after_steps(load(ModelCase()))
    assert act(ours) == act(theirs)
    assert [a.data for a in greedy(ours, 9, 2 * W)] == [b.data for b in greedy(theirs, 9, 2 * W)]
    assert ours.schedule == theirs.schedule and state(ours) == state(theirs)


def test_a_session_that_ends_while_a_call_is_built_leaves_others_alone(
    load: Load, building: list[AheadCall]
) -> None:
    model = load(ModelCase())
    ours, theirs = after_steps(model)
    other = reinstall(model, ours)
    del ours
    assert [a.data for a in greedy(other, 9, 5)] == [b.data for b in greedy(theirs, 9, 5)]


def test_planes_that_were_changed_meanwhile_are_noticed(
    load: Load, building: list[AheadCall]
) -> None:
    ours, theirs = after_steps(load(ModelCase()))
    for session in (ours, theirs):
        plane = session._caches[0].plane
        plane.key = plane.key * 2
    assert ours.step(3).data == theirs.step(3).data


class Stop(BaseException):
    """Like an interrupt."""


def test_a_build_that_stops_half_way_leaves_the_planes(load: Load) -> None:
    session = plain(load(ModelCase()), 2 * W + 1)
    before = state(session)
    marks = [cache.plane.origins.mark() for cache in session._caches]

    def forward(ids: mx.array, caches: list) -> mx.array:
        rows = mx.ones((1, 2, 1, 32), mx.float16)
        caches[0].update_and_fetch(rows, rows)
        raise Stop

    with pytest.raises(Stop):
        AheadCall(forward, session._caches)
    assert [cache.plane.origins.mark() for cache in session._caches] == marks
    assert state(session) == before


def test_planes_are_written_in_place(load: Load, building: list[AheadCall]) -> None:
    """A handle too many, and every step would copy every plane."""
    session, _ = after_steps(load(ModelCase()))
    addresses = [address(session) for _ in range(3) if session.step(7)]
    assert addresses[0] == addresses[1] == addresses[2]


def address(session: Generation) -> list[int]:
    arrays = [array for cache in session._caches for array in cache.plane.arrays()]
    views = [np.array(array, copy=False) for array in arrays]
    return [view.__array_interface__["data"][0] for view in views]


def test_the_context_ends_where_it_ends(load: Load, building: list[AheadCall]) -> None:
    session = eager(load(ModelCase()), 5)
    limit = session.layout.max_context_tokens
    session._position = limit - 2
    for cache in session._caches:
        cache.plane.origins.origin_logical += limit - 7
    session._schedule = CallSchedule((CallRun(limit - 3, 1), CallRun(1, 1)))
    session.step(1)
    built = len(building)
    session.step(1)
    assert built and len(building) == built, "there is no position for another call"


@pytest.mark.parametrize("works", [False, True])
def test_it_is_off_where_no_token_can_be_written_later(
    monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    monkeypatch.setattr(ahead, "host_fill_works", lambda: works)
    assert ahead.pays_here() is works


def test_schedules_count_every_call_however_they_are_asked_for(load: Load) -> None:
    """Equal calls are counted when somebody asks; asking changes nothing."""
    model = load(ModelCase())
    asked, never = model.new_generation(), model.new_generation()
    for session in (asked, never):
        for size in (3, 3, 1, 1, 1, 4, 1, 2, 2):
            session.prefill(tokens(size))
            if session is asked:
                assert session.schedule.position == session.position
    runs = ((3, 2), (1, 3), (4, 1), (1, 1), (2, 2))
    assert asked.schedule == never.schedule == CallSchedule(tuple(CallRun(*run) for run in runs))
