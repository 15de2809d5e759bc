"""Rows that are told of before their prefill call is over: the same bits, layer after layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_support import HEAD, TOKEN, ModelCase, greedy, run_calls, tokens

from engine import ARCHITECTURES, Generation, Model, TornGenerationError
from kvpack.errors import LayoutMismatchError
from kvpack.layout import LayerKind
from kvpack.snapshot import Tile, TileSpec, cut_tile_specs

W = 8
Load = Callable[[ModelCase], Model]
#: The others differ from these in what a layer computes, which is not what is told of here.
QUICK = ("muse_glimmer", "cohere2", "gemma3")
CASES = [
    *(
        pytest.param(
            ModelCase(arch, layers=5), 3 * W, marks=[] if arch in QUICK else pytest.mark.slow
        )
        for arch in ARCHITECTURES
    ),
    pytest.param(ModelCase("muse_glimmer", "bfloat16", TOKEN, layers=5), 5),
    pytest.param(ModelCase("cohere2", "bfloat16", HEAD, layers=5), 1),
]


def begun(model: Model, length: int) -> Generation:
    session = model.new_generation()
    run_calls(session, tokens(length), [length])
    return session


def single_layers(model: Model, position: int) -> list[TileSpec]:
    """The tiles of a cut as they would be with rows so wide that each layer has its own."""
    specs = cut_tile_specs(model.layout, position)
    return [
        TileSpec(spec.kind, (layer,), spec.first_position, spec.token_count)
        for spec in specs
        for layer in spec.layers
    ]


@pytest.mark.parametrize(("case", "count"), CASES, ids=lambda one: getattr(one, "label", one))
def test_rows_told_of_early_are_those_of_the_same_call_without(
    case: ModelCase, count: int, load: Load
) -> None:
    """Below, across and beyond the window."""
    model = load(case)
    ours, theirs = begun(model, 2 * W + 1), begun(model, 2 * W + 1)
    more, position = tokens(count, salt=3), 2 * W + 1 + count
    specs, found = single_layers(model, position)[::-1], list[Tile]()
    # What the last layer holds comes with the call's end.
    last = len(model.layout.layers) - 1

    def give(spec: TileSpec, copy: Callable[[], Tile]) -> None:
        found.append(copy())
        assert found[-1].spec == spec

    ours.prefill_giving(more, specs, give)
    theirs.prefill(more)
    layers = [tile.spec.layers[0] for tile in found]
    assert layers == sorted(layers)
    assert sorted(set(layers)) == list(range(last))
    assert {tile.spec: bytes(tile.data) for tile in found} == {
        tile.spec: bytes(tile.data)
        for tile in theirs.read_tiles([spec for spec in specs if spec.layers != (last,)])
    }
    assert ours.schedule == theirs.schedule and ours.position == theirs.position == position
    steps = [
        (a.data, b.data) for a, b in zip(greedy(ours, 9, W), greedy(theirs, 9, W), strict=True)
    ]
    assert all(a == b for a, b in steps)
    known = [0] * ours.position
    assert ours.snapshot(known).tiles == theirs.snapshot(known).tiles


def test_layers_are_told_of_one_after_the_other_while_the_call_goes_on(load: Load) -> None:
    """Told of a layer, nobody finds the session at the call's end yet."""
    model = load(ModelCase(layers=5))
    session, seen = begun(model, W), list[int]()

    def give(spec: TileSpec, _: Callable[[], Tile]) -> None:
        seen.append(spec.layers[0])
        assert session.position == W
        with pytest.raises(TornGenerationError):
            session.read_tile(spec)

    session.prefill_giving(tokens(W, salt=1), single_layers(model, 2 * W), give)
    assert seen == list(range(4)) and session.position == 2 * W


def test_a_call_that_stops_while_it_tells_leaves_a_session_that_says_so(load: Load) -> None:
    model = load(ModelCase(layers=5))
    session = begun(model, W)
    with pytest.raises(LayoutMismatchError):
        wrong = TileSpec(LayerKind.FULL, (0,), W, 4)
        session.prefill_giving(tokens(4), [wrong], lambda *_: None)
    assert session.position == W
    session.step(3)

    def give(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prefill_giving(tokens(4), single_layers(model, W + 5), give)
    with pytest.raises(TornGenerationError):
        session.step(3)
