"""How much Python opening one chunk is: with caches full of a chunk, each call costs several."""

from __future__ import annotations

import sys

from kvpack.chunk import SealContext, open_parsed, parse_object, seal_tile, tile_of
from kvpack.keys import generate_key
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout
from kvpack.snapshot import Tile, TileSpec

LAYOUT = CacheLayout(
    tuple(LayerLayout(LayerKind.FULL, None, 1, 8, 8) for _ in range(7)), Encoding.F16LE, 4096
)

#: Functions of Python, of ours and of the library: it was 61, ten of them hashes of enum members.
CALLS_MAX = 50


def sealed(first):
    context = SealContext(generate_key("t"), bytes(32), bytes(32))
    spec = TileSpec(LayerKind.FULL, tuple(range(7)), first, 256)
    tile = Tile(spec, bytes(spec.data_bytes(LAYOUT)))
    return context, tile, memoryview(seal_tile(context, tile).object)


def open_one(context, data, scratch):
    header = parse_object(data)
    return tile_of(LAYOUT, open_parsed(context, header, data, "chunk", scratch))


def test_opening_a_chunk_takes_few_calls():
    context, tile, data = sealed(256)
    scratch = bytearray(len(tile.data))
    # Keys that are derived once, and rows that are described once.
    assert open_one(context, data, scratch) == tile
    calls = []

    def note(frame, event, _):
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        open_one(context, data, scratch)
    finally:
        sys.setprofile(None)
    assert len(calls) <= CALLS_MAX, calls
    assert not [name for name in calls if "__hash__" in name]
