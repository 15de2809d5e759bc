"""Twins for blocks: what the rows of a call are, seen by somebody who is no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from engine_support import tokens

from engine import Generation, Model
from engine.cache import PlaneCache
from engine.dtypes import host_bytes
from kvpack.identity import CallSchedule
from kvpack.layout import CacheLayout
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec, cut_tile_specs

#: Single steps compared after a block.
RAW_STEPS = 8

#: ``(layer, position)`` to the bytes of one row: keys, then values.
RowTable = dict[tuple[int, int], bytes]


def table_of(snapshot: SessionCacheSnapshot) -> RowTable:
    """Every row of a snapshot."""
    table: RowTable = {}
    for tile in snapshot.tiles:
        for layer, keys, values in tile.planes(snapshot.layout):
            count = tile.spec.token_count
            key_size, value_size = len(keys) // count, len(values) // count
            for index in range(count):
                key = bytes(keys[index * key_size : (index + 1) * key_size])
                value = bytes(values[index * value_size : (index + 1) * value_size])
                table[layer, tile.spec.first_position + index] = key + value
    return table


def tile_from(table: RowTable, layout: CacheLayout, spec: TileSpec) -> Tile:
    """The tile of ``spec`` made of rows of ``table``."""
    parts = []
    for layer in spec.layers:
        rows = [table[layer, p] for p in range(spec.first_position, spec.end_position)]
        middle = layout.key_row_bytes(layer)
        parts += [row[:middle] for row in rows] + [row[middle:] for row in rows]
    return Tile(spec, b"".join(parts))


def install(model: Model, table: RowTable, generation: Generation) -> Generation:
    """A fresh generation at the position and schedule of ``generation``, with rows of ``table``."""
    installer = model.installer(generation.position)
    for spec in cut_tile_specs(model.layout, generation.position):
        installer.scatter(tile_from(table, model.layout, spec))
    return installer.finish(generation.schedule)


@dataclass
class CapturingCache(PlaneCache):
    """Writes as any cache does, and keeps what it was handed."""

    handed: list[tuple[mx.array, mx.array]] = field(default_factory=list)

    def __init__(self, plane: object, window: int | None) -> None:
        super().__init__(plane, window)  # type: ignore[arg-type]
        self.handed = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.handed.append((keys, values))
        return super().update_and_fetch(keys, values)


def block_rows(
    model: Model, twin: Generation, token_ids: list[int]
) -> tuple[RowTable, list[bytes]]:
    """Rows and logits of one forward call over ``twin``'s planes. The twin is used up."""
    start, encoding = twin.position, model.layout.encoding
    caches = [
        CapturingCache(cache.plane, layer.window_tokens)
        for cache, layer in zip(twin._caches, model.layout.layers, strict=True)
    ]
    logits = model.forward(mx.array([token_ids]), caches)[0]
    handed = [cache.handed[0] for cache in caches]
    mx.eval(logits, *[array for pair in handed for array in pair])
    table: RowTable = {}
    for layer, pair in enumerate(handed):
        keys, values = (_rows(array) for array in pair)
        for index in range(len(token_ids)):
            table[layer, start + index] = keys[index].tobytes() + values[index].tobytes()
    return table, [host_bytes(row, encoding) for row in logits]


def _rows(array: mx.array) -> np.ndarray:
    """``[count, kv_heads, dim]`` as unsigned integers."""
    words = mx.contiguous(array[0].transpose(1, 0, 2))
    return np.array(words.view(mx.uint32 if words.dtype.size == 4 else mx.uint16))


def after_accepting(
    layout: CacheLayout, before: RowTable, block: RowTable, position: int
) -> RowTable:
    """The rows that are live at ``position``: old ones where they still are, else the block's."""
    return {
        (layer, p): before.get((layer, p)) or block[layer, p]
        for layer, shape in enumerate(layout.layers)
        for p in range(shape.first_row(position), position)
    }


def at(model: Model, position: int) -> Generation:
    """A generation after ``position`` tokens: one prefill, then up to two single steps."""
    generation, ids = model.new_generation(), tokens(position)
    prefilled = max(0, position - 2)
    if prefilled:
        generation.prefill(ids[:prefilled])
    for token in ids[prefilled:]:
        generation.step(token)
    return generation


def look(generation: Generation) -> tuple[RowTable, int, CallSchedule]:
    """All that a block may not change when it is undone."""
    snapshot = generation.snapshot([0] * generation.position)
    return table_of(snapshot), generation.position, generation.schedule


def slots(generation: Generation) -> list[tuple[int, int, int]]:
    return [
        (p.length, p.origin_logical, p.origin_physical)
        for p in (cache.plane for cache in generation._caches)
    ]


def continue_both(left: Generation, right: Generation) -> None:
    """The next raw logits of both, byte for byte, then a chunk that crosses the wrap."""
    for token in tokens(RAW_STEPS, salt=3):
        assert left.step(token).data == right.step(token).data
    for generation in (left, right):
        generation.prefill(tokens(11, salt=8))
    assert left.step(65).data == right.step(65).data
