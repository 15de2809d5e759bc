"""Seeds: the pieces of every vector, cut at the places that a good pack has."""

from __future__ import annotations

from collections.abc import Iterator

from tests.fuzz.targets import NAMES
from tests.reference.bundle import Cursor, read_header
from tests.reference.chunk import parse_header
from tests.reference.verdict import Refused
from tests.vector_kit.cases import VECTORS
from tests.vector_kit.chunks import Chunk, frame

_MOST = 4096


def seeds(name: str) -> list[bytes]:
    """Inputs of one target, sorted, none twice."""
    return sorted({data for target, data in _pieces() if target == name and len(data) <= _MOST})


def _pieces() -> Iterator[tuple[str, bytes]]:
    for vector in VECTORS:
        yield from _frames(vector.pack.chunks)
        data, _ = vector.pack.build()
        try:
            yield from _of(data)
        except Refused:
            continue
    yield from ((name, b"") for name in NAMES)


def _frames(chunks: list[Chunk]) -> Iterator[tuple[str, bytes]]:
    """What chunks of codec 2 hold before they are sealed, behind their plaintext's size less 1."""
    for chunk in chunks:
        if chunk.codec == 2:
            encoded = frame(chunk.plain) if chunk.encoded is None else chunk.encoded
            yield "codec", (len(chunk.plain) - 1).to_bytes(3, "little") + encoded


def _of(data: bytes) -> Iterator[tuple[str, bytes]]:
    header = read_header(Cursor(data).read)
    yield "header", header.raw
    yield "scan", header.identity
    at = len(header.raw)
    while data[at : at + 4] == b"KVPC":
        size = parse_header(data[at:]).object_bytes
        yield "chunk", data[at : at + size]
        at += size
    size = int.from_bytes(data[at + 8 : at + 12], "little")
    message = data[at + 12 : at + 12 + size]
    yield "manifest", message
    yield "gate", len(header.raw).to_bytes(4, "little") + header.raw + message
