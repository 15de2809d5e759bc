"""Two windows in one model: every layer masks, keeps and sends by its own.

No architecture that is loaded here has two, but nothing may assume one: the layers of a real
network are called with a mask each, as mlx-lm's own code does it for models that have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine_support import HEAD, TOKEN, ModelCase, greedy, reinstall, run_calls, tokens
from mlx_lm.models.base import create_attention_mask, create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache
from models_support import network_of, positions

from engine import Generation, Model, PlaneLayout
from engine.cache import PlaneCache, window_mask
from engine.planes import Plane, PlaneShape
from kvpack.errors import LayoutMismatchError
from kvpack.identity import require_same_layout
from kvpack.layout import LayerKind
from kvpack.snapshot import cut_tile_specs

#: A small ring, no ring, a large ring, and the small one again.
WINDOWS = (5, None, 16, 5)
Load = Callable[[ModelCase], Model]


def hidden_states(network: Any, ids: mx.array, masks: Sequence[Any], caches: Sequence[Any]) -> Any:
    inner = network.model
    h = inner.embed_tokens(ids)
    for layer, mask, cache in zip(inner.layers, masks, caches, strict=True):
        h = layer(h, mask, cache)
    return inner.embed_tokens.as_linear(inner.norm(h))


def with_windows(model: Model, *, ask: bool = True, as_array: bool = False) -> Model:
    """``model`` with a window per layer; ``ask`` names it in the call for the mask."""
    network = network_of(model)

    def call(ids: mx.array, caches: Sequence[Any]) -> mx.array:
        h = mx.zeros((1, ids.shape[1], 1))
        masks = [
            create_attention_mask(
                h, cache, window_size=window if ask else None, return_array=as_array
            )
            for cache, window in zip(caches, WINDOWS, strict=True)
        ]
        return hidden_states(network, ids, masks, caches)

    layers = tuple(
        dataclasses.replace(
            layer, window_tokens=window, kind=LayerKind.FULL if window is None else LayerKind.SWA
        )
        for layer, window in zip(model.layout.layers, WINDOWS, strict=True)
    )
    layout = dataclasses.replace(model.layout, layers=layers)
    return Model(dataclasses.replace(model._parts, call=call, layout=layout))


def whole_logits(model: Model, ids: Sequence[int]) -> np.ndarray:
    """Without any cache: every layer sees all rows, through a mask of its own window."""
    masks = [create_causal_mask(len(ids), window_size=window) for window in WINDOWS]
    out = hidden_states(network_of(model), mx.array([list(ids)]), masks, [None] * 4)[0]
    return np.array(out.astype(mx.float32))


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
@pytest.mark.parametrize("options", [{}, {"ask": False}, {"as_array": True}], ids=str)
def test_each_layer_masks_by_its_own_window(
    options: dict[str, bool], layout: PlaneLayout, load: Load
) -> None:
    plain = load(ModelCase("llama", layout=layout))
    model, ids = with_windows(plain, **options), tokens(70)
    expected = whole_logits(plain, ids)
    for calls in ([1] * 70, [9, 4, 1, 17, 1, 1, 30, 1, 5, 1]):
        generation, done = model.new_generation(), 0
        for size in calls:
            chunk = ids[done : done + size]
            done += size
            if size > 1:
                generation.prefill(chunk)
                continue
            found = generation.step(chunk[0]).values()
            worst = np.abs(found - expected[done - 1]).max()
            assert worst < 0.1, f"{done} tokens"
    off_by_one = whole_logits_of_other_windows(plain, ids)
    assert np.abs(off_by_one - expected)[40:].max(axis=1).min() > 0.1


def whole_logits_of_other_windows(model: Model, ids: Sequence[int]) -> np.ndarray:
    """The same with the large window where the small one belongs, as one window for all."""
    windows = (16, None, 16, 16)
    masks = [create_causal_mask(len(ids), window_size=window) for window in windows]
    out = hidden_states(network_of(model), mx.array([list(ids)]), masks, [None] * 4)[0]
    return np.array(out.astype(mx.float32))


def answers(generation: Generation) -> bytes:
    steps = greedy(generation, 65, 20)
    generation.prefill(tokens(24, salt=4))
    return b"".join(logits.data for logits in (*steps, *greedy(generation, 66, 3)))


@pytest.mark.parametrize("window", [5, 16])
def test_a_cut_holds_each_layer_s_own_window_and_replays(window: int, load: Load) -> None:
    model = with_windows(load(ModelCase("llama")))
    for position in positions(window):
        generation = model.new_generation()
        run_calls(generation, tokens(position), [position])
        specs = cut_tile_specs(model.layout, position)
        for layer, own in enumerate(WINDOWS):
            rows = sum(spec.token_count for spec in specs if layer in spec.layers)
            assert rows == min(position, own or position)
        moved = reinstall(model, generation, order=-1)
        assert answers(moved) == answers(generation), f"T={position}"


def test_one_window_for_all_is_another_layout(load: Load) -> None:
    model = with_windows(load(ModelCase("llama")))
    layers = [
        dataclasses.replace(layer, window_tokens=5) if layer.window_tokens else layer
        for layer in model.layout.layers
    ]
    other = dataclasses.replace(model.layout, layers=tuple(layers))
    with pytest.raises(LayoutMismatchError) as caught:
        require_same_layout(model.layout, other)
    assert (caught.value.field, caught.value.expected, caught.value.found) == (
        "layers[2].window_tokens",
        16,
        5,
    )


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("return_array", [False, True])
@pytest.mark.parametrize("ask", [False, True])
def test_masks_are_those_of_mlx_lm(
    window: int | None, return_array: bool, ask: bool, load: Load
) -> None:
    """Whatever a model asks for, call by call: none, a word, or an array of the same trues."""
    layout = load(ModelCase("llama")).layout
    kind = LayerKind.FULL if window is None else LayerKind.SWA
    layer = dataclasses.replace(layout.layers[0], window_tokens=window, kind=kind)
    shape = PlaneShape.of(dataclasses.replace(layout, layers=(layer,)), 0, HEAD)
    ours = PlaneCache(Plane(shape), window)
    theirs = KVCache() if window is None else RotatingKVCache(window)
    for count in (1, 2, 3, 1, 9, 6, 5, 1, 13):
        h, options = mx.zeros((1, count, 1)), {"return_array": return_array}
        options["window_size"] = window if ask else None
        left, right = (create_attention_mask(h, cache, **options) for cache in (ours, theirs))
        assert type(left) is type(right), (count, ours.offset)
        if isinstance(left, mx.array):
            assert left.tolist() == right.tolist(), (count, ours.offset)
        else:
            assert left == right
        rows = mx.zeros((1, 2, count, 32), mx.float16)
        for cache in (ours, theirs):
            cache.update_and_fetch(rows, rows)


def test_a_mask_for_another_window_is_refused(load: Load) -> None:
    model = with_windows(load(ModelCase("llama")))
    for cache, window in zip(model.new_generation()._caches, WINDOWS, strict=True):
        with pytest.raises(ValueError, match=f"window 7, but the layer's is {window}"):
            cache.make_mask(3, window_size=7)


def test_the_window_rule_by_hand() -> None:
    """The query at p sees keys p-2, p-1 and p; two rows are older than the call."""
    rows = ["11100", "01110", "00111"]
    assert window_mask(3, 2, 3).astype(mx.int32).tolist() == [[int(x) for x in r] for r in rows]
