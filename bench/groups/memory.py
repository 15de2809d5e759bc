"""What is done to a cache without a wire or a disk: cut, seal, verify, restore, load.

The pack lies in the page cache. A restore ends where a session could be decoded from; so does
mlx-lm's load, which reads every array and checks none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.format.__main__ import loaded
from bench.format.pack import HEADER, KEY, LAYOUT, make_pack
from bench.format.restore import FLOOR, LOAD, RESTORE, restore_things, restored
from bench.format.speed import AES_1, BLAKE3_1, speed_things
from bench.groups import Order
from bench.measured import NOT_INSTALLED, Contender, Sample
from bench.payload import kv_bytes, noise_file
from bench.peers import lmcache
from bench.peers.pair import peer_turns, stored
from bench.turns import NoFigureError, Turn, in_process
from kvpack.chunk import Codec, SealContext, seal_tile
from kvpack.snapshot import Tile, cut_tile_specs

GROUP = "memory"
_PIECE_BYTES = 1 << 20
_SEALED = "encryption and authentication at rest, bound to model, layer and position"

#: Of bench.format, under the names that they have here.
_VERIFY = {
    AES_1: ("aes", "AES-256-GCM, one thread, decrypting", ""),
    BLAKE3_1: ("blake3", "BLAKE3, one thread", "copy"),
    "verify, 1 thread": ("verify", "kvpack verify, one thread", "copy"),
    "verify, 2 threads": ("verify_2", "kvpack verify, two threads", "copy"),
    "verify --deep, 2 threads": ("verify_deep_2", "kvpack verify --deep, two threads", "copy"),
}


_RESTORE = {
    FLOOR: ("floor", "AES-256-GCM and then a copy, one thread", "copy"),
    RESTORE: ("restore", "kvpack restore: pack to a generation", "mlx_lm_load"),
    LOAD: ("mlx_lm_load", "mlx-lm load_prompt_cache and eval, which checks nothing", "copy"),
}


def turns(order: Order) -> Iterator[Turn]:
    """All on one pack of the usual size."""
    mib = max(1, kv_bytes(order.tokens) >> 20)
    path = make_pack(order.folder / "pack", mib)
    data = order.kept.enter_context(loaded(path))
    source = np.frombuffer(data, np.uint8)
    target = np.ones_like(source)
    yield _turn("copy", "copy, one thread", "", len(data), lambda: np.copyto(target, source))
    yield _turn("aes_encrypt", "AES-256-GCM, one thread, encrypting", "copy", len(data),
                lambda: _encrypt(data))  # fmt: skip
    for thing in speed_things(path, data):
        if thing.name in _VERIFY:
            name, title, against = _VERIFY[thing.name]
            yield _turn(name, title, against, len(data), thing.work)
    yield from _engine_turns(path, data)
    payload = noise_file(order.folder / "payload", kv_bytes(order.tokens))
    yield from peer_turns(
        "lmcache", lmcache.VARIANTS, GROUP, "copy", payload, order.folder, stored
    )  # fmt: skip


def _turn(
    name: str, title: str, against: str, size: int, work: Callable[[], object], protects: str = ""
) -> Turn:
    return in_process(Contender(name, title, GROUP, against, protects), size, work)


def _encrypt(data: memoryview) -> None:
    cipher, out = AESGCM(bytes(32)), memoryview(bytearray(_PIECE_BYTES + 16))
    for number, start in enumerate(range(0, len(data), _PIECE_BYTES)):
        piece = data[start : start + _PIECE_BYTES]
        cipher.encrypt_into(number.to_bytes(12, "big"), piece, None, out[: len(piece) + 16])


def _engine_turns(path: Path, data: memoryview) -> Iterator[Turn]:
    """What needs MLX."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        reason = str(error)
        for name in ("snapshot", "seal", "restore", "mlx_lm_load"):
            yield Turn([Contender(name, name, GROUP, "copy")], lambda: _refuse(reason))
        return
    generations = [restored(path)]
    position = generations[0].position
    specs = cut_tile_specs(LAYOUT, position)
    size = sum(spec.data_bytes(LAYOUT) for spec in specs)
    yield _turn(
        "snapshot", "kvpack snapshot of live planes", "copy", size,
        lambda: generations[0].snapshot(range(position)),
    )  # fmt: skip
    context = SealContext(KEY, HEADER.identity_digest, HEADER.layout_digest)
    noise = np.random.default_rng(5).bytes(4 << 20)
    tiles = [Tile(spec, memoryview(noise)[: spec.data_bytes(LAYOUT)]) for spec in specs]
    yield _turn(
        "seal", "seal, one thread", "aes_encrypt", size,
        lambda: [seal_tile(context, tile) for tile in tiles], _SEALED,
    )  # fmt: skip
    yield _turn(
        "seal_zstd", "seal, zstd level 1 over byte planes (random bytes)", "aes_encrypt", size,
        lambda: [seal_tile(context, tile, Codec.ZSTD_SPLIT, element_bytes=2) for tile in tiles],
        _SEALED,
    )  # fmt: skip
    for thing in restore_things(path, data):
        if thing.name in _RESTORE:
            yield _turn(*_RESTORE[thing.name], len(data), thing.work)


def _refuse(reason: str) -> dict[str, Sample]:
    raise NoFigureError(NOT_INSTALLED, reason)
