"""Which distances are visible: the same in prefill, chunk, decode and after a restore.

The rule, as in the models' reference code: the query at p sees keys p-window+1 .. p. A model whose
every layer slides would spread a change one window per layer, so a single layer is probed: the
rows that its queries read are taken from the layer's own cache, and one key is changed.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from engine_support import HEAD, TOKEN, ModelCase, reinstall, run_calls, tokens

from engine import Generation, Model, PlaneLayout

W = 8
QUERY = 3 * W + 2
Load = Callable[[ModelCase], Model]


class OneLayer:
    """The first layer of a model, from token ids to its attention output, through a real cache."""

    def __init__(self, network: object, sliding: bool) -> None:
        self.network = network
        self.index = 0 if sliding else 3

    def __call__(self, generation: Generation, ids: list[int]) -> mx.array:
        inner = self.network.model
        cache = generation._caches[self.index]
        hidden = inner.embed_tokens(mx.array([ids]))
        window = W if self.index == 0 else None
        mask = cache.make_mask(len(ids), window_size=window)
        return inner.layers[self.index].self_attn(hidden, mask, cache)[0, -1]


def prefill_at_once(layer: OneLayer, model: Model, ids: list[int]) -> mx.array:
    return layer(model.new_generation(), ids)


def in_chunks(layer: OneLayer, model: Model, ids: list[int]) -> mx.array:
    generation = model.new_generation()
    layer(generation, ids[: 2 * W])
    return layer(generation, ids[2 * W :])


def token_by_token(layer: OneLayer, model: Model, ids: list[int]) -> mx.array:
    generation = model.new_generation()
    return [layer(generation, [token]) for token in ids][-1]


def chunk_then_token(layer: OneLayer, model: Model, ids: list[int]) -> mx.array:
    generation = model.new_generation()
    layer(generation, ids[:-1])
    return layer(generation, ids[-1:])


WAYS = [prefill_at_once, in_chunks, token_by_token, chunk_then_token]
DISTANCES = [(0, True), (W - 1, True), (W, False), (W + 1, False)]


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arch", ["muse_glimmer", "cohere2", "exaone4", "afmoe"])
def test_visible_distances(
    arch: str, way: Callable[..., mx.array], layout: PlaneLayout, load: Load
) -> None:
    model = load(ModelCase(arch, layout=layout))
    ids = tokens(QUERY + 1)
    sliding, full = (OneLayer(network_of(model), sliding) for sliding in (True, False))
    for distance, seen in DISTANCES:
        other = [*ids]
        other[QUERY - distance] = (other[QUERY - distance] + 7) % 251
        assert differ(way(sliding, model, ids), way(sliding, model, other)) is seen, distance
        assert differ(way(full, model, ids), way(full, model, other)), distance


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
@pytest.mark.parametrize("arch", ["muse_glimmer", "cohere2", "exaone4", "afmoe"])
def test_visible_distances_after_a_restore(arch: str, layout: PlaneLayout, load: Load) -> None:
    model = load(ModelCase(arch, layout=layout))
    sliding, ids = OneLayer(network_of(model), True), tokens(QUERY + 1)
    generation = model.new_generation()
    run_calls(generation, ids[:-1], [QUERY])
    expected = sliding(reinstall(model, generation), ids[-1:])
    for distance, seen in DISTANCES[1:]:
        probe = reinstall(model, generation)
        plane = probe._caches[0].plane
        position = QUERY - distance
        live = position >= plane.origin_logical
        # Only the row just outside the window is still in the ring; it dies in this very call.
        assert live is (distance <= W)
        if live:
            slot = next(plane.origins.segments(position, 1)).physical
            key = mx.full((1, 2, 1, 32), 3, plane.key.dtype)
            plane._write(slot, key, key)
        assert differ(sliding(probe, ids[-1:]), expected) is seen, distance


def test_a_needle_far_outside_the_window_is_seen_by_full_layers_only(load: Load) -> None:
    model = load(ModelCase(layers=4))
    ids = tokens(6 * W)
    other = [(ids[0] + 1) % 251, *ids[1:]]
    answers = []
    for row in (ids, other):
        generation = model.new_generation()
        run_calls(generation, row, [W] * 6)
        moved = reinstall(model, generation)
        answers.append(generation.step(66).data)
        assert moved.step(66).data == answers[-1]
    assert answers[0] != answers[1]


def differ(left: mx.array, right: mx.array) -> bool:
    return not bool(mx.array_equal(left, right))


def network_of(model: Model) -> object:
    """The network behind a model: the loader's closure holds it."""
    return model._parts.call.__closure__[0].cell_contents
