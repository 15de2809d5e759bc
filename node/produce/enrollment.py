"""Before a producer computes for anybody: a short known prompt, its rows against the reference's.

The layout says how keys are rotated and how far a layer looks back; that a release of transformers
does so, with these weights, on this device, is found out here and not assumed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from engine import prefill_calls
from engine.described import DescribedFolder
from kvpack.layout import CacheLayout, Encoding, LayerKind
from kvpack.snapshot import Tile, TileSpec, tile_specs
from node.produce.checks import Floats, Rows, check_layer, check_window
from node.produce.reference import Expected, Probe, Weights, reference_rows

log = logging.getLogger(__name__)


class Computed(Protocol):
    """What is needed of a backend's generation."""

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Append the rows of ``token_ids`` by one call."""

    def read_tiles(self, specs: Sequence[TileSpec]) -> list[Tile]:
        """The rows of ``specs``."""


class Backend(Protocol):
    """What is asked of a backend: the rows of a session of a model, and of its first layers."""

    def new_generation(self) -> Computed:
        """An empty session."""

    def part(self, layers: int, table: Sequence[int]) -> Callable[[], Computed]:
        """What makes empty sessions of the first ``layers`` layers, in float32.

        Token ids are places in ``table``.
        """


def check_rows(described: DescribedFolder, weights: Weights, backend: Backend) -> None:
    """Compute the known prompts by both means and compare.

    Args:
        described: What the rows are said to be.
        weights: Reads the folder's weights.
        backend: What is to compute prompts.

    Raises:
        ProducerCheckError: Names layer, role, what was expected and what was found.
        OracleModelError: The reference cannot compute this folder.
    """
    begin = time.monotonic()
    probe = Probe.of(described.layout, described.vocab_size)
    expected = reference_rows(described, weights, probe)
    apart, share = compare(described.layout, expected, probe, backend)
    log.info(
        "%s: rows of %d layers are the reference's (at most %.2g apart, window %.2g) in %.1f s",
        described.name, probe.last + 1, apart, share, time.monotonic() - begin,
    )  # fmt: skip


def compare(
    layout: CacheLayout, expected: Expected, probe: Probe, backend: Backend
) -> tuple[float, float]:
    """The second half of :func:`check_rows`: how far rows are apart, and along a wrong window.

    Raises:
        ProducerCheckError: As there.
    """
    generation = _prefilled(backend.new_generation(), probe.tokens(probe.short))
    apart = [
        check_layer(layer, layout, rows, _read(generation, layout, layer, 0, len(probe.short)))
        for layer, rows in enumerate(expected.short)
    ]
    if expected.held is None or probe.watched is None:
        return max(apart), 0.0
    held, watched = expected.held, probe.watched
    generation = _prefilled(backend.new_generation(), probe.tokens(probe.long))
    found = _read(generation, layout, watched, held.first, held.end)
    apart.append(check_layer(watched, layout, held, found))
    window = layout.layers[watched].window_tokens or 0
    above = expected.above.get(window)
    if above is None:
        return max(apart), 0.0
    # One key among thousands is less than what a half rounds: the layers that tell are computed in
    # float32, by the same code.
    layers = CacheLayout(layout.layers[: watched + 2], Encoding.F32LE, layout.max_context_tokens)
    generation = _prefilled(backend.part(watched + 2, probe.table)(), probe.long)
    found = _read(generation, layers, watched + 1, above.first, above.end)
    return max(apart), check_window(watched, window, expected.above, found)


def _prefilled(generation: Computed, token_ids: Sequence[int]) -> Computed:
    first = 0
    for count in prefill_calls(0, len(token_ids)):
        generation.prefill(token_ids[first : first + count])
        first += count
    return generation


def _read(generation: Computed, layout: CacheLayout, layer: int, first: int, end: int) -> Rows:
    """Rows of one layer, by the same tiles in which they leave."""
    shape = layout.layers[layer]
    kind = LayerKind.FULL if shape.window_tokens is None else LayerKind.SWA
    specs = [spec for spec in tile_specs(layout, kind, first, end) if layer in spec.layers]
    keys, values = [], []
    for tile in generation.read_tiles(specs):
        for index, key_rows, value_rows in tile.planes(layout):
            if index == layer:
                keys.append(_floats(key_rows, layout.encoding, shape.kv_heads, shape.key_dim))
                values.append(_floats(value_rows, layout.encoding, shape.kv_heads, shape.value_dim))
    return Rows(first, np.concatenate(keys), np.concatenate(values))


def _floats(data: memoryview, encoding: Encoding, heads: int, dim: int) -> Floats:
    if encoding is Encoding.BF16LE:
        # A bfloat16 is the upper half of a float32.
        words = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        words = np.frombuffer(data, "<f4" if encoding is Encoding.F32LE else "<f2")
    return words.astype(np.float32).reshape(-1, heads, dim)
