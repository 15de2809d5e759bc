"""What a transfer that has ended keeps: 256 of them are there for who asks what became of them."""

from __future__ import annotations

import asyncio
import tracemalloc
from types import SimpleNamespace

from kvpack.chunk import SealContext, seal_tile, seal_token_ids
from kvpack.keys import generate_key
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout
from kvpack.snapshot import cut_tile_specs
from node.bench.model import MadeModel
from node.migration.held import NothingHeld
from node.migration.receiver import Receiver
from node.migration.spool import NoSpool

LAYOUT = CacheLayout((LayerLayout(LayerKind.FULL, None, 8, 128, 128),), Encoding.F16LE, 4096)
POSITION = 300


def test_an_ended_transfer_keeps_neither_rows_nor_text():
    key = generate_key("t")
    context = SealContext(key, bytes(32), bytes(32))
    model = MadeModel("m", LAYOUT)
    model.made_tokens = POSITION
    planes = model.new_generation().planes
    specs = cut_tile_specs(LAYOUT, POSITION)
    chunks = [seal_tile(context, planes.read(spec, POSITION)) for spec in specs]
    chunks += seal_token_ids(context, [1000 + at for at in range(POSITION)])
    receiver = Receiver(
        None,
        SimpleNamespace(context=context, layout=LAYOUT, key=key),
        SimpleNamespace(growing=False, position=POSITION),
        model.installer(POSITION),
        NoSpool(),
        NothingHeld(),
    )
    tracemalloc.start()
    try:
        for chunk in chunks:
            assert receiver.take_in_thread(memoryview(chunk.object))
        assert tracemalloc.get_traced_memory()[0] > 1 << 20
        asyncio.run(receiver.drop())
        assert tracemalloc.get_traced_memory()[0] < 256 << 10
    finally:
        tracemalloc.stop()
    assert receiver.objects == len(chunks)
    assert not receiver._token_ids
