"""Bytes to a disk, durably: plain, past the page cache, and as a pack."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from bench.format.__main__ import loaded
from bench.format.pack import make_pack
from bench.format.write import DIRECT, SEALED, SIGNED, STORED, write_things
from bench.groups import Order
from bench.kvnode import AT_REST
from bench.measured import NOT_INSTALLED, Contender, Sample
from bench.payload import kv_bytes, noise_file
from bench.peers import lmcache, nixl
from bench.peers.pair import peer_turns, stored
from bench.turns import NoFigureError, Turn, in_process

GROUP = "disk"
_PIECE_BYTES = 4 << 20
_NAMES = {
    DIRECT: ("direct", "O_DIRECT write and fsync", "nothing"),
    STORED: ("pack_sealed", "write a pack of sealed chunks, durable", AT_REST),
    SEALED: ("pack_sealing", "seal and write a pack, durable", AT_REST),
    SIGNED: ("pack_signing", "seal, sign and write a pack, durable", f"{AT_REST}; origin"),
}


def turns(order: Order) -> Iterator[Turn]:
    """All on one pack of the usual size."""
    mib = max(1, kv_bytes(order.tokens) >> 20)
    path = make_pack(order.folder / "pack", mib)
    data = order.kept.enter_context(loaded(path))
    things = write_things(path, data, mib)
    if isinstance(things, str):
        yield from _missing(things)
        return
    for thing in things:
        name, title, protects = _NAMES[thing.name]
        against = "" if name == "direct" else "direct"
        contender = Contender(name, title, GROUP, against, protects)
        yield in_process(contender, len(data), thing.work, thing.before)
    plain = Contender("buffered", "buffered write and fsync", GROUP, "direct", "nothing")
    target = order.folder / "plain"
    yield in_process(plain, len(data), lambda: _write(target, data), things[0].before)
    payload = noise_file(order.folder / "payload", kv_bytes(order.tokens))
    for name, variants in (("nixl", nixl.FILE_VARIANTS), ("lmcache", lmcache.FILE_VARIANTS)):
        yield from peer_turns(name, variants, GROUP, "direct", payload, order.folder, stored)


def _write(target: Path, data: memoryview) -> None:
    target.unlink(missing_ok=True)
    with target.open("wb", buffering=0) as file:
        for start in range(0, len(data), _PIECE_BYTES):
            file.write(data[start : start + _PIECE_BYTES])
        os.fsync(file.fileno())


def _missing(reason: str) -> Iterator[Turn]:
    def refuse() -> dict[str, Sample]:
        raise NoFigureError(NOT_INSTALLED, reason)

    for name, title, protects in _NAMES.values():
        yield Turn([Contender(name, title, GROUP, "direct", protects)], refuse)
