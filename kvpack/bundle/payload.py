"""Checking what follows a chunk's header, releasing nothing: the part that all readers share."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvpack.bundle.source import ByteSource, located
from kvpack.chunk import ChunkHeader, ChunkReference, SealContext, check_content_id
from kvpack.chunk.open import decrypt
from kvpack.chunk.reference import TAG_BYTES
from kvpack.chunk.seal import content_hasher, content_prefix
from kvpack.chunk.tag import SCRATCH_EXTRA_BYTES, ContentCheck, TagCheck, can_check_in_pieces
from kvpack.keys import EpochKey


class Depth(enum.Enum):
    """How much of each chunk is checked.

    QUICK reads headers and no payload. FULL checks every tag. DEEP recomputes every content id.
    """

    QUICK = "quick"
    FULL = "full"
    DEEP = "deep"


#: What one thread takes at a time: a piece, and what it decrypts to where anything is decrypted,
#: stay in a core's second-level cache.
CACHED_PIECE_BYTES: Final = 256 << 10

#: What each of several threads takes at a time: half of a chunk of the usual size. Between two
#: calls a thread waits for the interpreter, so few calls are better.
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
    """The check of one chunk, ready to be fed.

    Attributes:
        reference: The chunk.
        check: Before its first piece.
        hashed_bytes: How much its hash has had. The first piece is shorter by so much: BLAKE3
            takes many of its blocks at a time only from a multiple of many on.
    """

    reference: ChunkReference
    check: TagCheck | ContentCheck
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

    def _plain_room(self) -> memoryview:
        """A buffer for what a piece decrypts to, where anything is decrypted at all."""
        length = len(self._piece) + SCRATCH_EXTRA_BYTES
        if len(self._plain) < length:
            self._plain = memoryview(bytearray(length))
        return self._plain

    def prepare(
        self, header: ChunkHeader, associated: bytes | memoryview, depth: Depth
    ) -> PieceCheck:
        """The check of a chunk that :func:`can_check_in_pieces` is true of; DEEP: with its hash."""
        reference = header.reference
        key = self._key_of(reference.epoch)
        if depth is not Depth.DEEP:
            return PieceCheck(reference, TagCheck(key, reference, associated))
        context = self._context(header)
        prefix = content_prefix(context, reference, reference.plain_bytes)
        hasher = content_hasher(context, prefix)
        return PieceCheck(reference, ContentCheck(key, reference, associated, hasher), len(prefix))

    def feed(self, source: ByteSource, prepared: PieceCheck, where: str) -> None:
        """Read what follows the header and check it: each piece where it was read to.

        Raises:
            FormatError: The input ends before the object does.
            AuthenticationError: The tag or, when DEEP, the content id does not match.
        """
        check = prepared.check
        left, size = prepared.reference.encoded_bytes, self._piece_bytes - prepared.hashed_bytes
        self._make_room(left + TAG_BYTES)
        if isinstance(check, ContentCheck):
            check.use(self._plain_room())
        update = check.update
        with located(where):
            while left:
                count = left if left <= size + _REST_BYTES_MAX else size
                left, size = left - count, self._piece_bytes
                # One read for the last piece and the tag: a read of sixteen bytes is not cheaper.
                piece = self._piece[: count if left else count + TAG_BYTES]
                source.fill(piece)
                update(piece[:count])
        check.finish(piece[count:], where)

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
