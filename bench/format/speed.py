"""How fast a pack is verified, beside bare passes over the same bytes in memory.

The pack is read from the page cache; the bare passes read a copy of it that is in memory already,
so they have one copy less to make: the read is ours.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import (
    AEADDecryptionContext,
    Cipher,
    algorithms,
    modes,
)
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.format.pack import KEYRING, PUBLIC, Placed, placed_chunks
from bench.format.turns import Row, Thing, in_turns
from kvpack.bundle import Depth
from kvpack.bundle.in_order import THREADS_MAX
from kvpack.bundle.payload import CACHED_PIECE_BYTES as PIECE_BYTES
from kvpack.bundle.payload import SHARED_PIECE_BYTES
from kvpack.verify import verify_bundle, verify_signature, verify_stream

_NONCE = bytes(12)
_TAG_BYTES = 16

AES_1 = "AES-256-GCM, 1 thread"
AES_WHOLE = "AES-256-GCM, 1 thread, whole chunks"
AES_ALL = f"AES-256-GCM, {THREADS_MAX} threads"
BLAKE3_1 = "BLAKE3, 1 thread"
BLAKE3_ALL = "BLAKE3, all cores"
READ_BLAKE3 = "read and BLAKE3, 1 thread"
READ_AES = "read and AES-256-GCM, 1 thread"
READ_TAG = "read and the tag alone, 1 thread"
COPY = "copy in memory, 1 thread"
FORWARD = "verify -, 1 thread"


def speed_rows(path: Path, data: memoryview, rounds: int) -> list[Row]:
    """Verify at every depth against bare passes over ``data``, which is the file at ``path``."""
    found = in_turns(speed_things(path, data), rounds)
    return [Row.of(found, *pair, byte_count=len(data)) for pair in _pairs()]


def speed_things(path: Path, data: memoryview) -> list[Thing]:
    """Verify at every depth, and the bare passes."""
    chunks = placed_chunks(path)
    source = np.frombuffer(data, np.uint8)
    target = np.ones_like(source)
    halves = chunks[: len(chunks) // 2], chunks[len(chunks) // 2 :]
    things = [
        Thing(AES_1, lambda: decrypt_pieces(data, chunks)),
        Thing(AES_WHOLE, lambda: _decrypt_whole(data, chunks)),
        Thing(AES_ALL, lambda: _together([lambda h=h: decrypt_pieces(data, h) for h in halves])),
        Thing(BLAKE3_1, lambda: blake3(data).digest()),
        Thing(BLAKE3_ALL, lambda: blake3(data, max_threads=blake3.AUTO).digest()),
        Thing(READ_BLAKE3, lambda: _read_and_hash(path)),
        Thing(READ_AES, lambda: _read_and_decrypt(path, chunks)),
        Thing(READ_TAG, lambda: _read_and_check(path, chunks)),
        Thing(COPY, lambda: np.copyto(target, source)),
        Thing(FORWARD, lambda: _forward(path)),
    ]
    for threads in (1, THREADS_MAX):
        things += [
            Thing(_named("verify", threads), _verify(path, Depth.FULL, threads)),
            Thing(_named("verify --deep", threads), _verify(path, Depth.DEEP, threads)),
            Thing(_named("verify --signer", threads), _signature(path, threads)),
        ]
    return things


def _named(what: str, threads: int) -> str:
    return f"{what}, {threads} thread{'s' if threads > 1 else ''}"


def _pairs() -> list[tuple[str, str, float | None]]:
    one, all_cores = 1, THREADS_MAX
    pairs: list[tuple[str, str, float | None]] = [
        (_named("verify", one), AES_1, 0.6),
        (_named("verify", one), COPY, 0.7),
        (_named("verify", one), READ_AES, None),
        (_named("verify", one), READ_TAG, None),
        (_named("verify", one), AES_WHOLE, None),
        (_named("verify", all_cores), AES_1, None),
        (_named("verify", all_cores), AES_ALL, None),
        (FORWARD, AES_1, None),
    ]
    for what in ("verify --deep", "verify --signer"):
        pairs += [
            (_named(what, all_cores), BLAKE3_1, 0.8),
            (_named(what, one), BLAKE3_1, None),
            (_named(what, one), READ_BLAKE3, None),
            (_named(what, all_cores), BLAKE3_ALL, None),
        ]
    return pairs


def _verify(path: Path, depth: Depth, threads: int) -> Callable[[], object]:
    return lambda: verify_bundle(path, KEYRING, depth, threads=threads)


def _signature(path: Path, threads: int) -> Callable[[], object]:
    return lambda: verify_signature(path, PUBLIC, threads=threads)


def _forward(path: Path) -> None:
    with io.FileIO(path) as stream:
        verify_stream(stream, KEYRING)


def _decrypt_whole(data: memoryview, chunks: list[Placed]) -> None:
    plain = bytearray(max(chunk.object_bytes for chunk in chunks))
    for chunk in chunks:
        head, end = chunk.offset + chunk.header_bytes, chunk.offset + chunk.object_bytes
        target = memoryview(plain)[: end - head - _TAG_BYTES]
        AESGCM(chunk.chunk_key).decrypt_into(
            _NONCE, data[head:end], data[chunk.offset : head], target
        )


def decrypt_pieces(data: memoryview, chunks: list[Placed]) -> None:
    """A bare pass: every chunk of ``data`` decrypted in pieces into one small buffer."""
    plain = bytearray(PIECE_BYTES + _TAG_BYTES)
    for chunk in chunks:
        head = chunk.offset + chunk.header_bytes
        end = chunk.offset + chunk.object_bytes - _TAG_BYTES
        opener = Cipher(algorithms.AES(chunk.chunk_key), modes.GCM(_NONCE)).decryptor()
        opener.authenticate_additional_data(data[chunk.offset : head])
        for start in range(head, end, PIECE_BYTES):
            opener.update_into(data[start : min(start + PIECE_BYTES, end)], plain)
        opener.finalize_with_tag(bytes(data[end : end + _TAG_BYTES]))


def _read_and_hash(path: Path) -> None:
    hasher, piece = blake3(), memoryview(bytearray(2 * PIECE_BYTES))
    with io.FileIO(path) as file:
        while count := file.readinto(piece):
            hasher.update(piece[:count])
    hasher.digest()


def _read_and_decrypt(path: Path, chunks: list[Placed]) -> None:
    """Nothing but the two passes of a reader that decrypts."""
    plain = bytearray(SHARED_PIECE_BYTES + _TAG_BYTES)
    buffer = memoryview(bytearray(SHARED_PIECE_BYTES))

    def update(opener: AEADDecryptionContext, piece: memoryview) -> None:
        opener.update_into(piece, plain)

    with io.FileIO(path) as file:
        for chunk in chunks:
            opener, tag = _read_and_feed(file, chunk, buffer, update)
            opener.finalize_with_tag(tag)


def _read_and_check(path: Path, chunks: list[Placed]) -> None:
    """Nothing but the two passes that a verification cannot do without, and no verdict."""
    buffer = memoryview(bytearray(PIECE_BYTES))

    def update(opener: AEADDecryptionContext, piece: memoryview) -> None:
        opener.authenticate_additional_data(piece)

    with io.FileIO(path) as file:
        for chunk in chunks:
            _read_and_feed(file, chunk, buffer, update)


def _read_and_feed(
    file: io.FileIO,
    chunk: Placed,
    piece: memoryview,
    update: Callable[[AEADDecryptionContext, memoryview], None],
) -> tuple[AEADDecryptionContext, bytes]:
    file.seek(chunk.offset)
    opener = Cipher(algorithms.AES(chunk.chunk_key), modes.GCM(_NONCE)).decryptor()
    opener.authenticate_additional_data(file.read(chunk.header_bytes))
    left = chunk.object_bytes - chunk.header_bytes - _TAG_BYTES
    while left:
        count = file.readinto(piece[: min(left, len(piece))])
        update(opener, piece[:count])
        left -= count
    return opener, file.read(_TAG_BYTES)


def _together(works: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
