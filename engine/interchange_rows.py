"""Rows between a head-major buffer of another engine and tiles: copied, never computed with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.interchange_cache import SavedLayer
from engine.interchange_file import StoredTensor
from kvpack.layout import CacheLayout, Encoding
from kvpack.snapshot import Tile, TileSpec

#: Elements as unsigned integers of their width.
_Rows = npt.NDArray[np.unsignedinteger[Any]]


def element_dtype(encoding: Encoding) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned integer of the element's width, little-endian."""
    return np.dtype(f"<u{encoding.element_bytes}")


def tile_of_layers(
    layers: Sequence[SavedLayer], layout: CacheLayout, position: int, spec: TileSpec
) -> Tile:
    """The rows of ``spec``, which lie inside what the cut at ``position`` holds."""
    parts: list[bytes] = []
    for layer in spec.layers:
        saved, origin = layers[layer], layout.layers[layer].first_row(position)
        rows = saved.first + np.arange(spec.token_count) + (spec.first_position - origin)
        for tensor in (saved.keys, saved.values):
            buffer = _buffer(tensor, element_dtype(layout.encoding))
            # [kv_heads, tokens, dim] -> [tokens, kv_heads, dim]
            parts.append(buffer[:, rows % saved.rows].transpose(1, 0, 2).tobytes())
    return Tile(spec, b"".join(parts))


def _buffer(tensor: StoredTensor, dtype: np.dtype[np.unsignedinteger[Any]]) -> _Rows:
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape[1:])


def layer_buffers(
    layout: CacheLayout, position: int, tiles: Sequence[Tile], layer: int, head: int
) -> Iterator[bytes]:
    """Keys, then values of one layer: ``[kv_heads, rows, dim]``, the oldest row at ``head``."""
    shape = layout.layers[layer]
    rows, origin = shape.held_rows(position), shape.first_row(position)
    dtype = element_dtype(layout.encoding)
    buffers = [
        np.empty((shape.kv_heads, rows, dim), dtype) for dim in (shape.key_dim, shape.value_dim)
    ]
    for tile in tiles:
        if layer not in tile.spec.layers:
            continue
        start = head + tile.spec.first_position - origin
        target = (start + np.arange(tile.spec.token_count)) % rows
        pieces = next(planes for index, *planes in tile.planes(layout) if index == layer)
        for buffer, data in zip(buffers, pieces, strict=True):
            source = np.frombuffer(data, dtype).reshape(tile.spec.token_count, shape.kv_heads, -1)
            buffer[:, target] = source.transpose(1, 0, 2)
    for buffer in buffers:
        yield buffer.tobytes()
