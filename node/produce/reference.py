"""The rows of a short known prompt as the NumPy reference computes them, layer by layer.

The reference is :mod:`engine.oracle`, which is measured against MLX's own networks in the same
tests as the engine. It is asked for the first layers alone, up to the first full one, one layer's
weights at a time, and of a window for the last few queries: a network of 30 billion weights is
checked in seconds, and what a layer does wrong shows in its own rows or in those of the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from engine.described import DescribedFolder
from engine.oracle import build_oracle
from engine.oracle.decoder import Block, Decoder
from engine.oracle.plane import HistoryPlane, empty_plane
from kvpack.layout import CacheLayout, LayerKind
from node.produce.checks import Floats, Rows

#: Tokens of the prompt by which all of the first layers are compared.
SHORT_TOKENS: Final = 24

#: Tokens beyond the window of the prompt by which windows are compared.
BEYOND_TOKENS: Final = 16

#: Different tokens of both prompts: so many rows of the embedding are read.
_DIFFERENT: Final = 61

#: What reads the files: which tensors by name, and which rows of embedding and head.
Weights = Callable[[Callable[[str], bool], Sequence[int]], Mapping[str, Floats]]


@dataclass(frozen=True, slots=True)
class Probe:
    """Two known prompts, as places in one list of token ids.

    Attributes:
        table: Different token ids.
        short: The short prompt, as places in ``table``.
        long: The one that is longer than the window; empty where the context holds none.
        watched: The first layer with a window; None: there is none.
        last: The last layer whose rows are compared.
    """

    table: tuple[int, ...]
    short: tuple[int, ...]
    long: tuple[int, ...]
    watched: int | None
    last: int

    @classmethod
    def of(cls, layout: CacheLayout, vocab_size: int) -> Probe:
        """The prompts for a model of ``layout``."""
        count = min(_DIFFERENT, vocab_size)
        # No row of the short prompt may leave a window.
        widths = [layer.window_tokens for layer in layout.layers if layer.window_tokens]
        table = tuple(index * vocab_size // count for index in range(count))
        watched = next(iter(layout.layers_of(LayerKind.SWA)), None)
        window = 0 if watched is None else layout.layers[watched].window_tokens or 0
        room = min(window + BEYOND_TOKENS, layout.max_context_tokens - 1)
        length = room if window and room > window else 0
        full = next(iter(layout.layers_of(LayerKind.FULL)), 0)
        above = 0 if watched is None else watched + 1
        return cls(
            table,
            _places(min(SHORT_TOKENS, layout.max_context_tokens - 1, *widths), count),
            _places(length, count),
            watched,
            min(max(full, above), len(layout.layers) - 1),
        )

    def tokens(self, places: Sequence[int]) -> list[int]:
        """The token ids of a prompt."""
        return [self.table[place] for place in places]


def _places(length: int, count: int) -> tuple[int, ...]:
    """Every run of tokens differs from its neighbours: a row that is displaced is another row."""
    return tuple((index * index + 7 * index + index // count) % count for index in range(length))


@dataclass(frozen=True, slots=True, repr=False)
class Expected:
    """What the reference computes.

    Attributes:
        short: Rows of the short prompt, by layer.
        held: Rows of the watched layer that a cut of the long prompt holds; None without one.
        above: Rows of the layer above the watched one after the wrap, by the keys that the watched
            one sees; empty without a layer above.
    """

    short: tuple[Rows, ...]
    held: Rows | None
    above: Mapping[int, Rows]


def reference_rows(described: DescribedFolder, weights: Weights, probe: Probe) -> Expected:
    """Compute the rows of both prompts.

    Raises:
        OracleModelError: The reference cannot compute this folder; names field or tensor.
    """
    short, above, held = [], {}, None
    h_short = h_long = np.empty((0, 0), np.float32)
    after: dict[int, Floats] = {}
    for index in range(probe.last + 1):
        decoder = _one_layer(described, weights, probe.table, index)
        block = decoder.blocks[0]
        if index == 0:
            h_short, h_long = (
                decoder.embedding(np.asarray(one, np.int64)) for one in (probe.short, probe.long)
            )
        plane = _empty(described.layout, index)
        h_short = block(h_short, plane, 0)
        short.append(Rows(0, *plane.rows(0, len(probe.short))))
        if not probe.long or probe.watched is None or index > probe.watched + 1:
            continue
        window = described.layout.layers[probe.watched].window_tokens or 0
        if index < probe.watched:
            h_long = block(h_long, _empty(described.layout, index), 0)
        elif index == probe.watched:
            held, after = _look_back(block, h_long, window, described.layout, index)
        else:
            above = {
                width: _rows_alone(block, rows, window - 1, described.layout, index)
                for width, rows in after.items()
            }
    return Expected(tuple(short), held, above)


def _look_back(
    block: Block, h: Floats, window: int, layout: CacheLayout, index: int
) -> tuple[Rows, dict[int, Floats]]:
    """The watched layer's rows of a cut, and its activations by the keys that it sees."""
    first, end = window - 1, len(h)
    plane = _empty(layout, index)
    # Rows depend on nothing but their own token: attention and the rest are not computed for them.
    _alone(block)(h[:first], plane, 0)
    after = {}
    for width in (window, window - 1, window + 1):
        if width > 0:
            attention = dataclasses.replace(block.attention, window=width)
            after[width] = _with(block, attention=attention)(h[first:], plane, first)
    return Rows(end - window, *plane.rows(end - window, end)), after


def _rows_alone(block: Block, h: Floats, first: int, layout: CacheLayout, index: int) -> Rows:
    plane = _empty(layout, index, first)
    _alone(block)(h, plane, first)
    return Rows(first, *plane.rows(first, first + len(h)))


def _alone(block: Block) -> Block:
    """The layer as far as its rows need it: every query sees itself, and nothing is fed on."""
    attention = dataclasses.replace(block.attention, window=1)
    return _with(block, attention=attention, mlp=np.zeros_like)


def _with(block: Block, **changes: Any) -> Block:  # noqa: ANN401
    changed: Any = dataclasses.replace(block, **changes)  # type: ignore[type-var]
    return changed  # type: ignore[no-any-return]


def _empty(layout: CacheLayout, index: int, origin: int = 0) -> HistoryPlane:
    shape = layout.layers[index]
    if not origin:
        return empty_plane(shape.kv_heads, shape.key_dim, shape.value_dim)
    keys = np.empty((0, shape.kv_heads, shape.key_dim), np.float32)
    values = np.empty((0, shape.kv_heads, shape.value_dim), np.float32)
    return HistoryPlane(keys, values, origin)


def _one_layer(
    described: DescribedFolder, weights: Weights, table: Sequence[int], index: int
) -> Decoder:
    """A model that has layer ``index`` alone, and ``table`` for its vocabulary."""
    prefix = f"layers.{index}."
    wanted = ("embed_tokens.weight", "norm.weight")
    read = weights(lambda name: name.startswith(prefix) or name in wanted, table)
    tensors = {
        "model." + (name.replace(prefix, "layers.0.", 1) if name.startswith(prefix) else name): one
        for name, one in read.items()
    }
    layer, arguments = described.layout.layers[index], described.arguments
    full = layer.window_tokens is None
    config = {
        **{name: value for name, value in described.fields.items() if name != "text_config"},
        **arguments,
        "num_hidden_layers": 1,
        "vocab_size": len(table),
        "tie_word_embeddings": True,
        "layer_types": ["full_attention" if full else "sliding_attention"],
        "model_type": described.architecture,
    }
    if "sliding_window_pattern" in arguments:
        config["sliding_window_pattern"] = 1 if full else 2
    if "layer_rope_theta" in arguments:
        config["layer_rope_theta"] = [arguments["layer_rope_theta"][index]]
    return build_oracle(config, tensors).decoder
