"""How fast a pack is written durably, beside an O_DIRECT write of the same bytes to that folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.format.pack import (
    KEY,
    KEYRING,
    SIGNER,
    Placed,
    placed_chunks,
    position_of,
    state_of,
    write_pack,
)
from bench.format.turns import Row, Thing, in_turns
from kvpack.bundle import BundleReader, BundleWriter, publish_new
from kvpack.snapshot import SessionCacheSnapshot

DIRECT = "O_DIRECT write and fsync"
STORED = "bundle of sealed chunks, durable"
SEALED = "seal and bundle, durable"
SIGNED = "seal, sign and bundle, durable"

_BLOCK = 4096
_WRITE_BYTES = 8 << 20


def write_rows(path: Path, data: memoryview, mib: int, rounds: int) -> list[Row] | str:
    """Durable writes against O_DIRECT, or why there is nothing to compare with.

    Args:
        path: The pack; the same folder is written to.
        data: Its bytes, from the beginning of a page on.
        mib: What it was made with.
        rounds: How many.
    """
    things = write_things(path, data, mib)
    if isinstance(things, str):
        return things
    found = in_turns(things, rounds)
    _before(path.parent / "written" / "pack")
    return [
        Row.of(found, STORED, DIRECT, 0.8, len(data)),
        Row.of(found, SEALED, DIRECT, None, len(data)),
        Row.of(found, SIGNED, DIRECT, None, len(data)),
    ]


def write_things(path: Path, data: memoryview, mib: int) -> list[Thing] | str:
    """What takes turns: O_DIRECT first; or why there is none."""
    folder = path.parent / "written"
    folder.mkdir()
    target = folder / "pack"
    if not _has_direct(target):
        return f"{folder}: this file system or system has no O_DIRECT: nothing to compare with"
    chunks, blob = placed_chunks(path), _manifest_blob(path)
    state = state_of(position_of(mib << 20))
    header_bytes = bytes(data[: chunks[0].offset])

    def before() -> None:
        _before(target)

    return [
        Thing(DIRECT, lambda: _direct(target, data), before),
        Thing(STORED, lambda: _stored(target, header_bytes, data, chunks, blob), before),
        Thing(SEALED, lambda: _sealed(target, state), before),
        Thing(SIGNED, lambda: _sealed(target, state, SIGNER), before),
    ]


def _before(target: Path) -> None:
    # What an earlier write left behind is neither this one's work nor in its way.
    target.unlink(missing_ok=True)
    os.sync()


def _has_direct(target: Path) -> bool:
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        target.unlink(missing_ok=True)
    return True


def _direct(target: Path, data: memoryview) -> None:
    """The pages as they are, without a copy; the last part of a block is left out."""
    end = len(data) // _BLOCK * _BLOCK
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        for start in range(0, end, _WRITE_BYTES):
            view = data[start : min(start + _WRITE_BYTES, end)]
            if os.write(descriptor, view) != len(view):
                raise OSError("a partial O_DIRECT write")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stored(
    target: Path, header_bytes: bytes, data: memoryview, chunks: list[Placed], blob: bytes
) -> None:
    with publish_new(target) as sink:
        writer = BundleWriter(sink, KEY, header_bytes)
        for view in _objects(data, chunks):
            writer.add(view)
        writer.finish(blob)


def _objects(data: memoryview, chunks: list[Placed]) -> Iterator[memoryview]:
    for chunk in chunks:
        yield data[chunk.offset : chunk.offset + chunk.object_bytes]


def _sealed(
    target: Path, state: SessionCacheSnapshot, signer: Ed25519PrivateKey | None = None
) -> None:
    with publish_new(target) as sink:
        write_pack(sink, state, signer=signer)


def _manifest_blob(path: Path) -> bytes:
    with BundleReader.open(path, KEYRING) as reader:
        return reader.index.manifest_blob
