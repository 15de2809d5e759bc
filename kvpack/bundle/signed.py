"""Verifying a signed bundle without a secret: who stored these bytes, and are they the same?"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final

from blake3 import blake3

from kvpack import limits
from kvpack.bundle.bound import BoundHeaders
from kvpack.bundle.in_order import group_bytes, grouped, in_order, thread_count
from kvpack.bundle.index import Tail, check_totals, split_tail
from kvpack.bundle.payload import pieces
from kvpack.bundle.reader import FileSource, open_regular, read_prefix, read_tail
from kvpack.bundle.signature import SignatureTranscript, check_signature
from kvpack.bundle.source import PlacedSource
from kvpack.bundle.writer import require_same_references
from kvpack.chunk import ChunkHeader, ChunkReference, parse_header
from kvpack.chunk.header import header_bytes as chunk_header_bytes
from kvpack.chunk.open import check_binding
from kvpack.chunk.reference import HEADER_FIXED_BYTES
from kvpack.errors import FormatError, LimitError
from kvpack.header import Header, decode_header
from kvpack.manifest import Bindings, Manifest, check_manifest, read_unverified

#: A piece stays in a core's second-level cache between the read and the hash, and is long enough
#: that two threads seldom wait for the interpreter.
_PIECE_BYTES: Final = 1 << 20


def verify_signed(
    path: str | os.PathLike[str],
    public_key: bytes,
    progress: Callable[[int], None] | None = None,
    *,
    threads: int | None = None,
) -> tuple[Header, Manifest, Tail]:
    """Verify the signature of the bundle at ``path``, then its shape. Uses no secret.

    Args:
        path: The bundle.
        public_key: The signer that is expected, 32 bytes.
        progress: Told the bytes of every object that is done.
        threads: How many objects are hashed at a time. None: as many as there are cores for it. The
            verdict is the same.

    Raises:
        OSError: The file cannot be opened or read.
        FormatError: Not a bundle, or objects that the manifest does not name; also VersionError,
            LimitError.
        AuthenticationError: Not signed, by another signer, or changed since.
        IdentityMismatchError: The target component is another model than the header's, or a chunk
            says so of itself; also LayoutMismatchError.
        LayoutMismatchError: The manifest does not describe one whole state.
    """
    with open_regular(path) as file:
        source = FileSource(file)
        prefix = read_prefix(source)
        parts = split_tail(read_tail(source), source.file_bytes, prefix.header_bytes)
        header_bytes = source.read(0, prefix.header_bytes)
        transcript = SignatureTranscript(header_bytes)
        total_bytes = parts.footer.chunks_bytes
        hasher = _ObjectHash(file.fileno())
        groups = grouped(
            _objects(source, parts),
            lambda found: found.reference.object_bytes,
            group_bytes(total_bytes),
        )
        jobs = (partial(hasher.digests, group) for group in groups)
        hashed: list[ChunkReference] = []
        bound = BoundHeaders()
        with closing(in_order(jobs, thread_count(threads, total_bytes))) as results:
            for found, digest in chain.from_iterable(results):
                reference = found.reference
                transcript.add_digest(reference.object_bytes, digest)
                bound.add(len(hashed), found.header)
                hashed.append(reference)
                if progress is not None:
                    progress(reference.object_bytes)
    check_signature(parts.signature, transcript.message(parts.manifest_blob), public_key)
    # From here on all bytes are the signer's.
    header, manifest = decode_header(header_bytes), read_unverified(parts.manifest_blob)
    check_manifest(header, manifest)
    check_totals(parts.footer, manifest)
    require_same_references(manifest.references, tuple(hashed))
    bindings = Bindings.of(header, manifest)
    for number, object_header in bound.by_number().items():
        check_binding(bindings.require(object_header.reference), object_header, f"chunks[{number}]")
    return header, manifest, parts


@dataclass(frozen=True, slots=True)
class _Found:
    """An object, found by its own framing: its place in file order, its offset, its header."""

    number: int
    offset: int
    header: ChunkHeader

    @property
    def reference(self) -> ChunkReference:
        return self.header.reference


def _objects(source: FileSource, parts: Tail) -> Iterator[_Found]:
    """Every object between header and manifest."""
    number, offset, end = 0, parts.footer.header_bytes, parts.footer.manifest_offset
    while offset < end:
        if number == limits.REFERENCES_MAX:
            raise LimitError("chunks", f"at most {limits.REFERENCES_MAX}", "more")
        fixed = source.read(offset, HEADER_FIXED_BYTES)
        header = parse_header(source.read(offset, chunk_header_bytes(fixed)))
        object_bytes = header.reference.object_bytes
        if offset + object_bytes > end:
            raise FormatError(f"chunks[{number}]", f"{end - offset} bytes", object_bytes)
        yield _Found(number, offset, header)
        offset += object_bytes
        number += 1


class _ObjectHash:
    """Hashes objects of one file, in any number of threads: each has a buffer of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mine = threading.local()

    def digests(self, group: Sequence[_Found]) -> list[tuple[_Found, bytes]]:
        """BLAKE3 of each object, beside it."""
        piece: memoryview | None = getattr(self._mine, "piece", None)
        if piece is None:
            piece = self._mine.piece = memoryview(bytearray(_PIECE_BYTES))
        return [(found, self._digest(found, piece)) for found in group]

    def _digest(self, found: _Found, buffer: memoryview) -> bytes:
        hasher, source = blake3(), PlacedSource(self._descriptor, found.offset)
        where = f"chunks[{found.number}]"
        for piece in pieces(source, found.reference.object_bytes, buffer, where):
            hasher.update(piece)
        return hasher.digest()
