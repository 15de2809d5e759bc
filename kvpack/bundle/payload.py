"""Checking what follows a chunk's header, releasing nothing: the part that all readers share."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvpack.bundle.source import ByteSource, located
from kvpack.chunk import ChunkHeader, ChunkReference, SealContext, check_content_id
from kvpack.chunk.open import (
    SCRATCH_EXTRA_BYTES,
    TagCheck,
    can_check_in_pieces,
    decrypt,
    require_content_id,
)
from kvpack.chunk.reference import TAG_BYTES
from kvpack.chunk.seal import content_hasher, content_prefix
from kvpack.keys import EpochKey


class Depth(enum.Enum):
    """How much of each chunk is checked.

    QUICK reads headers and no payload. FULL checks every tag. DEEP recomputes every content id.
    """

    QUICK = "quick"
    FULL = "full"
    DEEP = "deep"


#: What a reader of a pipe takes at a time: a piece and what it decrypts to stay in a core's
#: second-level cache together.
CACHED_PIECE_BYTES: Final = 256 << 10

#: What a reader of a file takes at a time: half of a chunk of the usual size. Between two calls a
#: thread waits for the interpreter, so few calls are better for two threads, and the cache still
#: holds both.
SHARED_PIECE_BYTES: Final = 768 << 10

#: A last piece that would be shorter is taken with the one before.
_REST_BYTES_MAX: Final = 4 << 10


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


@dataclass(frozen=True, slots=True)
class PieceCheck:
    """Cipher and hash of one chunk, ready to be fed.

    Attributes:
        reference: The chunk.
        tag_check: Before its first piece.
        hasher: Of the content id, before its first piece; None where that is not asked.
        hashed_bytes: How much the hasher has had. The first piece is shorter by so much: BLAKE3
            takes many of its blocks at a time only from a multiple of many on.
    """

    reference: ChunkReference
    tag_check: TagCheck
    hasher: blake3 | None = None
    hashed_bytes: int = 0


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
            self.feed(source, self.prepare(header, associated, depth), where)
        else:
            self._check_whole(source, header, associated, where, depth)

    def _make_room(self, needed_bytes: int) -> None:
        """Buffers for a piece of so many bytes, or of as many as a piece and a tag may have."""
        length = min(needed_bytes, self._piece_bytes + _REST_BYTES_MAX + TAG_BYTES)
        if len(self._piece) < length:
            self._piece = memoryview(bytearray(length))
            self._plain = memoryview(bytearray(length + SCRATCH_EXTRA_BYTES))

    def prepare(
        self, header: ChunkHeader, associated: bytes | memoryview, depth: Depth
    ) -> PieceCheck:
        """Cipher and, when DEEP, hash of a chunk that :func:`can_check_in_pieces` is true of."""
        reference = header.reference
        tag_check = TagCheck(self._key_of(reference.epoch), reference, associated)
        if depth is not Depth.DEEP:
            return PieceCheck(reference, tag_check)
        context = self._context(header)
        prefix = content_prefix(context, reference, reference.plain_bytes)
        return PieceCheck(reference, tag_check, content_hasher(context, prefix), len(prefix))

    def feed(self, source: ByteSource, prepared: PieceCheck, where: str) -> None:
        """Read what follows the header and check it: each piece where it was read to.

        Raises:
            FormatError: The input ends before the object does.
            AuthenticationError: The tag or, when DEEP, the content id does not match.
        """
        reference, hasher = prepared.reference, prepared.hasher
        left, size = reference.encoded_bytes, self._piece_bytes - prepared.hashed_bytes
        self._make_room(left + TAG_BYTES)
        update, plain = prepared.tag_check.update, self._plain
        with located(where):
            while left:
                count = left if left <= size + _REST_BYTES_MAX else size
                left, size = left - count, self._piece_bytes
                # One read for the last piece and the tag: a read of sixteen bytes is not cheaper.
                piece = self._piece[: count if left else count + TAG_BYTES]
                source.fill(piece)
                text = update(piece[:count], plain)
                if hasher is not None:
                    hasher.update(text)
        prepared.tag_check.finish(piece[count:], where)
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
