"""Reading objects one after the other: the part that both readers share, so that they agree.

An object is read by its own header. Nothing of the header's lengths is believed before the seal id
has been recomputed with the key, so a changed length is found before it leads anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvpack.bundle.payload import CACHED_PIECE_BYTES, Depth, PayloadCheck, PieceCheck
from kvpack.bundle.source import ByteSource, located
from kvpack.chunk import ChunkHeader, OpenedChunk
from kvpack.chunk.header import header_bytes, parse_header
from kvpack.chunk.open import check_seal_id, decrypt
from kvpack.chunk.reference import HEADER_BYTES_MAX, HEADER_FIXED_BYTES
from kvpack.chunk.tag import can_check_in_pieces
from kvpack.errors import AuthenticationError, FormatError, UnknownKeyError
from kvpack.header import HeaderPrefix
from kvpack.keys import EpochKey, Keyring


@dataclass(frozen=True, slots=True)
class LikelyChunk:
    """A chunk that is expected, with all that is done before its payload.

    Attributes:
        header: Its seal id was checked.
        associated: The header's bytes.
        checks: Of its payload; None where that is not read.
    """

    header: ChunkHeader
    associated: bytes
    checks: PieceCheck | None


class ChunkWalk:
    """Reads and checks one object at a time, in a buffer that grows to the largest one met.

    Args:
        source: Where the next bytes come from.
        keyring: The keys at hand.
        prefix: The bundle header's prefix: whose keys are meant.
        piece_bytes: How much of a chunk is checked in one call.
    """

    def __init__(
        self,
        source: ByteSource,
        keyring: Keyring,
        prefix: HeaderPrefix,
        piece_bytes: int = CACHED_PIECE_BYTES,
    ) -> None:
        self._source = source
        self._keyring = keyring
        self._tenant = prefix.tenant
        self._object = memoryview(bytearray(HEADER_BYTES_MAX))
        # Not self.key: a cycle would keep the buffers until somebody looks for cycles.
        self._payload = PayloadCheck(partial(keyring.get, prefix.tenant), piece_bytes)

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

    def prepare(self, likely: ChunkHeader, depth: Depth) -> LikelyChunk | None:
        """Make ready to check a chunk whose header will probably be ``likely``.

        None where nothing is gained or something is wrong: :meth:`read_header` and :meth:`check`
        then say what.
        """
        reference = likely.reference
        if not can_check_in_pieces(reference):
            return None
        associated = likely.encode()
        try:
            check_seal_id(self.key(reference.epoch), likely, "")
        except (UnknownKeyError, AuthenticationError):
            return None
        checks = None if depth is Depth.QUICK else self._payload.prepare(likely, associated, depth)
        return LikelyChunk(likely, associated, checks)

    def meets(self, likely: LikelyChunk) -> bool:
        """Whether the next object's header is the likely one, byte for byte.

        Whoever asks must be able to go back: where it is not, or not whole, it is read again.
        """
        view = self._object[: len(likely.associated)]
        try:
            self._source.fill(view)
        except FormatError:
            return False
        return view == likely.associated

    def feed(self, likely: LikelyChunk, where: str) -> None:
        """As :meth:`check`, for a header that :meth:`meets` was true of."""
        if likely.checks is not None:
            self._payload.feed(self._source, likely.checks, where)

    def read_likely(self, likely: ChunkHeader) -> memoryview | None:
        """The next object whole, valid until the next call, if its header will be ``likely``.

        None where it is not, byte for byte, or not whole, or not the sealer's: whoever asks must be
        able to go back, and then meets the fault by :meth:`read_header`.
        """
        reference, associated = likely.reference, likely.encode()
        view = self._room(reference.object_bytes)
        try:
            check_seal_id(self.key(reference.epoch), likely, "")
            self._source.fill(view)
        except (FormatError, UnknownKeyError, AuthenticationError):
            return None
        return view.toreadonly() if view[: len(associated)] == associated else None

    def _room(self, length: int) -> memoryview:
        """The first ``length`` bytes of the buffer, which are as they were."""
        if len(self._object) < length:
            # The length is below its cap and the sealer's own: its header passed both checks.
            larger = memoryview(bytearray(length))
            larger[: len(self._object)] = self._object
            self._object = larger
        return self._object[:length]

    def read_object(self, header: ChunkHeader, where: str) -> memoryview:
        """Read the rest of the object whose header was read last; valid until the next call.

        Raises:
            FormatError: The input ends before the object does.
        """
        view = self._room(header.reference.object_bytes)
        with located(where):
            self._source.fill(view[header.reference.header_bytes :])
        return view.toreadonly()

    def open(
        self, header: ChunkHeader, data: memoryview, where: str, scratch: bytearray | None = None
    ) -> OpenedChunk:
        """Open the object that was read last.

        The plaintext is a value of its own, or lies in ``scratch``, of ``encoded_bytes`` or more.

        Raises:
            AuthenticationError: The tag or the encoded digest does not match.
            FormatError: The codec's frame is not what was sealed.
        """
        return decrypt(self.key(header.reference.epoch), header, data, where, scratch)

    def check(self, header: ChunkHeader, where: str, depth: Depth) -> None:
        """Read and check the rest of the object whose header was read last; release nothing.

        Raises:
            FormatError: The input ends before the object does, or the codec's frame is not what was
                sealed.
            AuthenticationError: Tag, encoded digest or, when DEEP, the content id does not match.
        """
        associated = self.header_bytes(header)
        self._payload.check(self._source, header, associated, where, depth)

    def header_bytes(self, header: ChunkHeader) -> memoryview:
        """The bytes of the header that was read last; valid until the next is read."""
        return self._object[: header.reference.header_bytes].toreadonly()
