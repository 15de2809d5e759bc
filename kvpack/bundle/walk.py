"""Reading objects one after the other: the part that both readers share, so that they agree.

An object is read by its own header. Nothing of the header's lengths is believed before the seal id
has been recomputed with the key, so a changed length is found before it leads anywhere.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Protocol

from kvpack.chunk import ChunkHeader, OpenedChunk, SealContext, check_content_id
from kvpack.chunk.header import header_bytes, parse_header
from kvpack.chunk.open import (
    PIECE_BYTES,
    TagCheck,
    can_check_in_pieces,
    check_seal_id,
    decrypt,
)
from kvpack.chunk.reference import HEADER_BYTES_MAX, HEADER_FIXED_BYTES, TAG_BYTES
from kvpack.errors import FieldError, FormatError
from kvpack.header import HeaderPrefix
from kvpack.keys import EpochKey, Keyring


class Depth(enum.Enum):
    """How much of each chunk is checked.

    QUICK reads headers and no payload. FULL checks every tag. DEEP recomputes every content id.
    """

    QUICK = "quick"
    FULL = "full"
    DEEP = "deep"


class ByteSource(Protocol):
    """Bytes in file order."""

    def fill(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes. Raises FormatError where there are not enough."""


class ReadableFile(Protocol):
    """The one method of a binary file or pipe that is needed."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read at most ``len(buffer)`` bytes; 0 at the end."""


def fill_from(file: ReadableFile, view: memoryview) -> int:
    """Fill ``view`` from ``file``; returns how many bytes came before the end.

    Raises:
        FormatError: ``file`` is not blocking, so its end cannot be told.
    """
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])
        if count is None:
            raise FormatError("input", "a blocking file or pipe", "a non-blocking one")
        if count == 0:
            break
        filled += count
    return filled


class ChunkWalk:
    """Reads and checks one object at a time, in two buffers that grow to the largest one met.

    Args:
        source: Where the next bytes come from.
        keyring: The keys at hand.
        prefix: The bundle header's prefix: whose keys are meant.
    """

    def __init__(self, source: ByteSource, keyring: Keyring, prefix: HeaderPrefix) -> None:
        self._source = source
        self._keyring = keyring
        self._tenant = prefix.tenant
        self._object = memoryview(bytearray(HEADER_BYTES_MAX))
        self._scratch = bytearray()
        self._piece = memoryview(bytearray(PIECE_BYTES))

    def key(self, epoch: int) -> EpochKey:
        """The tenant's key of ``epoch``.

        Raises:
            UnknownKeyError: It is not at hand.
        """
        return self._keyring.get(self._tenant, epoch)

    def read_header(self, where: str, lead: bytes = b"") -> ChunkHeader:
        """Read the next object's header, of which ``lead`` was read already.

        Raises:
            FormatError: Not a chunk header; also VersionError, LimitError.
            UnknownKeyError: No key for its epoch.
            AuthenticationError: The seal id is not the one these fields have.
        """
        view = self._object
        view[: len(lead)] = lead
        with located(where):
            self._source.fill(view[len(lead) : HEADER_FIXED_BYTES])
            length = header_bytes(view[:HEADER_FIXED_BYTES])
            self._source.fill(view[HEADER_FIXED_BYTES:length])
            header = parse_header(view[:length])
        check_seal_id(self.key(header.reference.epoch), header, where)
        return header

    def read_object(self, header: ChunkHeader, where: str) -> memoryview:
        """Read the rest of the object whose header was read last; valid until the next call.

        Raises:
            FormatError: The input ends before the object does.
        """
        start, end = header.reference.header_bytes, header.reference.object_bytes
        if len(self._object) < end:
            # The length is below its cap and the sealer's own: its header passed both checks.
            larger = memoryview(bytearray(end))
            larger[:start] = self._object[:start]
            self._object = larger
        with located(where):
            self._source.fill(self._object[start:end])
        return self._object[:end].toreadonly()

    def open(self, header: ChunkHeader, data: memoryview, where: str) -> OpenedChunk:
        """Open the object that was read last; the plaintext is a value of its own.

        Raises:
            AuthenticationError: The tag or the encoded digest does not match.
            FormatError: The codec's frame is not what was sealed.
        """
        return decrypt(self.key(header.reference.epoch), header, data, where)

    def check(self, header: ChunkHeader, where: str, depth: Depth) -> None:
        """Read and check the rest of the object whose header was read last; release nothing.

        Raises:
            FormatError: The input ends before the object does, or the codec's frame is not what was
                sealed.
            AuthenticationError: Tag, encoded digest or, when DEEP, the content id does not match.
        """
        reference = header.reference
        if depth is Depth.QUICK:
            for _ in self._pieces(reference.encoded_bytes + TAG_BYTES, where):
                pass
        elif depth is Depth.FULL and can_check_in_pieces(reference):
            self._check_in_pieces(header, where)
        else:
            self._check_whole(header, where, depth)

    def _check_in_pieces(self, header: ChunkHeader, where: str) -> None:
        """Only the tag is asked, so no more than one piece is ever in memory, and that in cache."""
        reference = header.reference
        associated = self._object[: reference.header_bytes]
        tag_check = TagCheck(self.key(reference.epoch), reference, associated)
        for piece in self._pieces(reference.encoded_bytes, where):
            tag_check.update(piece)
        (tag,) = self._pieces(TAG_BYTES, where)
        tag_check.finish(tag, where)

    def _check_whole(self, header: ChunkHeader, where: str, depth: Depth) -> None:
        key = self.key(header.reference.epoch)
        if len(self._scratch) < header.reference.encoded_bytes:
            self._scratch = bytearray(header.reference.encoded_bytes)
        opened = decrypt(key, header, self.read_object(header, where), where, self._scratch)
        if depth is Depth.DEEP:
            context = SealContext(key, header.identity_digest, header.layout_digest)
            check_content_id(context, opened, where)

    def _pieces(self, byte_count: int, where: str) -> Iterator[memoryview]:
        """The next ``byte_count`` bytes; each piece is valid until the next."""
        with located(where):
            while byte_count:
                piece = self._piece[: min(byte_count, PIECE_BYTES)]
                self._source.fill(piece)
                byte_count -= len(piece)
                yield piece


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Name the chunk in an error about one of its fields."""
    try:
        yield
    except FieldError as error:
        raise type(error)(f"{where}: {error.field}", error.expected, error.found) from error
