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
from bench.format.pack import HEADER, KEY, KEYRING, LAYOUT, make_pack, write_pack
from bench.format.restore import FLOOR, LOAD, RESTORE, RESTORE_1, restore_things, restored
from bench.format.speed import AES_1, BLAKE3_1, speed_things
from bench.groups import Order
from bench.kvnode import AT_REST
from bench.measured import NOT_INSTALLED, Contender, Sample
from bench.payload import kv_bytes, noise_file
from bench.peers import NOTHING, lmcache
from bench.peers.pair import peer_turns, stored
from bench.real import TITLE, real_rows, tiles_of
from bench.turns import NoFigureError, Turn, in_process
from kvpack.chunk import Codec, SealContext, seal_tile
from kvpack.layout import Producer
from kvpack.publish import publish_new
from kvpack.snapshot import SessionCacheSnapshot, Tile, cut_tile_specs
from kvpack.verify import verify_bundle

GROUP = "memory"
_REAL_TOKENS = 8_192
_PIECE_BYTES = 1 << 20
_CIPHER = "encryption and authentication, bound to nothing"

#: Of bench.format, under the names that they have here.
_VERIFY = {
    AES_1: ("aes", "AES-256-GCM, one thread, decrypting", "copy", _CIPHER),
    BLAKE3_1: ("blake3", "BLAKE3, one thread", "copy", "a digest: nothing without a key"),
    "verify, 1 thread": ("verify", "kvpack verify, one thread", "copy", AT_REST),
    "verify, 2 threads": ("verify_2", "kvpack verify, two threads", "copy", AT_REST),
    "verify --deep, 2 threads": (
        "verify_deep_2",
        "kvpack verify --deep, two threads",
        "copy",
        f"{AT_REST}; content ids",
    ),
}


_RESTORE = {
    FLOOR: ("floor", "AES-256-GCM and then a copy, one thread", "copy", _CIPHER),
    RESTORE: ("restore", "kvpack restore: pack to a generation", "mlx_lm_load", AT_REST),
    RESTORE_1: ("restore_1", "kvpack restore, one thread", "floor", AT_REST),
    LOAD: ("mlx_lm_load", "mlx-lm load_prompt_cache and eval", "copy", NOTHING),
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
                lambda: _encrypt(data), _CIPHER)  # fmt: skip
    for thing in speed_things(path, data):
        if thing.name in _VERIFY:
            name, title, against, protects = _VERIFY[thing.name]
            yield _turn(name, title, against, len(data), thing.work, protects)
    yield from _engine_turns(path, data)
    yield from _real_turns(order)
    payload = noise_file(order.folder / "payload", kv_bytes(order.tokens))
    yield from peer_turns(
        "lmcache", lmcache.VARIANTS, GROUP, "copy", payload, order.folder, stored
    )  # fmt: skip


def _turn(
    name: str, title: str, against: str, size: int, work: Callable[[], object],
    protects: str = NOTHING,
) -> Turn:  # fmt: skip
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
        lambda: [seal_tile(context, tile) for tile in tiles], AT_REST,
    )  # fmt: skip
    yield _turn(
        "seal_zstd", "seal, zstd level 1 over byte planes (random bytes)", "aes_encrypt", size,
        lambda: [seal_tile(context, tile, Codec.ZSTD_SPLIT, element_bytes=2) for tile in tiles],
        AT_REST,
    )  # fmt: skip
    for thing in restore_things(path, data):
        if thing.name in _RESTORE:
            name, title, against, protects = _RESTORE[thing.name]
            yield _turn(name, title, against, len(data), thing.work, protects)


def _real_turns(order: Order) -> Iterator[Turn]:
    """What a model computed, raw and compressed; speeds are of the rows as they are in memory."""
    position = min(order.tokens, _REAL_TOKENS) // 256 * 256
    try:
        rows = real_rows(order.folder)
    except NoFigureError as error:
        for name in ("seal_real", "seal_zstd_real", "verify_real", "verify_zstd_real"):
            yield Turn([Contender(name, name, GROUP, "copy")], lambda error=error: _raise(error))
        return
    tiles = tiles_of(LAYOUT, position, rows)
    size = sum(len(tile.data) for tile in tiles)
    state = SessionCacheSnapshot(LAYOUT, Producer.ENGINE, position, (1,) * position, tiles)
    context = SealContext(KEY, HEADER.identity_digest, HEADER.layout_digest)
    for codec, word, title in (
        (Codec.RAW, "", f"{TITLE}, raw"), (Codec.ZSTD_SPLIT, "_zstd", f"{TITLE}, zstd"),
    ):  # fmt: skip
        yield _turn(
            f"seal{word}_real", f"seal, one thread ({title})", "aes_encrypt", size,
            lambda codec=codec: [
                seal_tile(context, tile, codec, element_bytes=2) for tile in tiles
            ], AT_REST,
        )  # fmt: skip
        path = order.folder / f"real{word}"
        with publish_new(path) as sink:
            write_pack(sink, state, codec=codec)
        yield _turn(
            f"verify{word}_real", f"kvpack verify, one thread ({title})", "copy", size,
            lambda path=path: verify_bundle(path, KEYRING, threads=1), AT_REST,
        )  # fmt: skip


def _refuse(reason: str) -> dict[str, Sample]:
    return _raise(NoFigureError(NOT_INSTALLED, reason))


def _raise(error: NoFigureError) -> dict[str, Sample]:
    raise error
