"""Checking what follows a chunk's header, releasing nothing: the part that all readers share."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Final

from kvpack.bundle.source import ByteSource, located
from kvpack.chunk import ChunkHeader, SealContext, check_content_id
from kvpack.chunk.open import (
    SCRATCH_EXTRA_BYTES,
    TagCheck,
    can_check_in_pieces,
    decrypt,
    require_content_id,
)
from kvpack.chunk.reference import TAG_BYTES
from kvpack.chunk.seal import content_hasher
from kvpack.keys import EpochKey


class Depth(enum.Enum):
    """How much of each chunk is checked.

    QUICK reads headers and no payload. FULL checks every tag. DEEP recomputes every content id.
    """

    QUICK = "quick"
    FULL = "full"
    DEEP = "deep"


#: What one thread takes at a time: a piece and what it decrypts to stay in a core's second-level
#: cache together.
CACHED_PIECE_BYTES: Final = 256 << 10

#: What each of several threads takes at a time: nearly always a whole chunk. Between two calls a
#: thread waits for the interpreter, and short calls make threads wait longer than the cache saves.
SHARED_PIECE_BYTES: Final = 2 << 20


def pieces(
    source: ByteSource, byte_count: int, buffer: memoryview, where: str
) -> Iterator[memoryview]:
    """The next ``byte_count`` bytes of ``source``; each piece is valid until the next.

    Raises:
        FormatError: The source ends before.
    """
    with located(where):
        while byte_count:
            piece = buffer[: min(byte_count, len(buffer))]
            source.fill(piece)
            byte_count -= len(piece)
            yield piece


class PayloadCheck:
    """Checks one object after the other, in buffers of its own. One thread at a time.

    Args:
        key_of: The tenant's key of an epoch; raises UnknownKeyError.
        piece_bytes: How much is read, decrypted and hashed in one call each.
    """

    def __init__(
        self, key_of: Callable[[int], EpochKey], piece_bytes: int = CACHED_PIECE_BYTES
    ) -> None:
        self._key_of = key_of
        self._piece_bytes = piece_bytes
        self._piece = memoryview(b"")
        self._plain = memoryview(b"")
        self._object = bytearray()
        self._whole = bytearray()

    def check(
        self,
        source: ByteSource,
        header: ChunkHeader,
        associated: bytes | memoryview,
        where: str,
        depth: Depth,
    ) -> None:
        """Read from ``source`` what follows the header, and check it.

        Args:
            source: It stands behind the header.
            header: The header, whose seal id was checked.
            associated: The header's bytes as stored.
            where: Name of the chunk in errors.
            depth: How much of it.

        Raises:
            FormatError: The input ends before the object does, or the codec's frame is not what was
                sealed.
            AuthenticationError: Tag, encoded digest or, when DEEP, the content id does not match.
        """
        reference = header.reference
        self._make_room(reference.encoded_bytes + TAG_BYTES)
        if depth is Depth.QUICK:
            for _ in pieces(source, reference.encoded_bytes + TAG_BYTES, self._piece, where):
                pass
        elif can_check_in_pieces(reference):
            self._check_in_pieces(source, header, associated, where, depth)
        else:
            self._check_whole(source, header, associated, where, depth)

    def _make_room(self, needed_bytes: int) -> None:
        """Buffers for a piece of so many bytes, or of as many as a piece may have."""
        length = min(needed_bytes, self._piece_bytes)
        if len(self._piece) < length:
            self._piece = memoryview(bytearray(length))
            self._plain = memoryview(bytearray(length + SCRATCH_EXTRA_BYTES))

    def _check_in_pieces(
        self,
        source: ByteSource,
        header: ChunkHeader,
        associated: bytes | memoryview,
        where: str,
        depth: Depth,
    ) -> None:
        """Each piece is decrypted and hashed where it was read to; nothing else is kept of it."""
        reference = header.reference
        tag_check = TagCheck(self._key_of(reference.epoch), reference, associated, self._plain)
        context = self._context(header)
        deep = depth is Depth.DEEP
        hasher = content_hasher(context, reference, reference.plain_bytes) if deep else None
        for piece in pieces(source, reference.encoded_bytes, self._piece, where):
            plain = tag_check.update(piece)
            if hasher is not None:
                hasher.update(plain)
        (tag,) = pieces(source, TAG_BYTES, self._piece, where)
        tag_check.finish(tag, where)
        if hasher is not None:
            require_content_id(reference, hasher.digest(), where)

    def _check_whole(
        self,
        source: ByteSource,
        header: ChunkHeader,
        associated: bytes | memoryview,
        where: str,
        depth: Depth,
    ) -> None:
        reference = header.reference
        # The lengths are below their caps and the sealer's own: the header passed both checks.
        if len(self._object) < reference.object_bytes:
            self._object = bytearray(reference.object_bytes)
        if len(self._whole) < reference.encoded_bytes:
            self._whole = bytearray(reference.encoded_bytes)
        data = memoryview(self._object)[: reference.object_bytes]
        data[: reference.header_bytes] = associated
        with located(where):
            source.fill(data[reference.header_bytes :])
        key = self._key_of(reference.epoch)
        opened = decrypt(key, header, data.toreadonly(), where, self._whole)
        if depth is Depth.DEEP:
            check_content_id(self._context(header), opened, where)

    def _context(self, header: ChunkHeader) -> SealContext:
        key = self._key_of(header.reference.epoch)
        return SealContext(key, header.identity_digest, header.layout_digest)
