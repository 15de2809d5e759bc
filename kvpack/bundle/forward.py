"""Reading a bundle from a pipe: forwards, once, and releasing nothing before its end was seen.

The verdict is that of :class:`kvpack.bundle.reader.BundleReader` on the same bytes, reason and exit
code included. That reader judges the tail before any chunk; so here a fault in a chunk is kept, the
stream is read to its end, and the tail speaks first. Everything that is asked only of authentic
headers (whose rows, which manifest) waits for the tail too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from blake3 import blake3

from kvpack import limits
from kvpack.bundle.bound import BoundHeaders
from kvpack.bundle.footer import FOOTER_BYTES, decode_footer
from kvpack.bundle.index import (
    TAIL_BYTES_MAX,
    BundleIndex,
    beyond_its_place,
    not_named_here,
    open_index,
)
from kvpack.bundle.payload import Depth
from kvpack.bundle.reader import BundleReader, SeekableFile
from kvpack.bundle.source import ReadableFile, fill_from
from kvpack.bundle.walk import ChunkWalk
from kvpack.bundle.writer import write_all
from kvpack.chunk import (
    OBJECT_BYTES_MAX,
    ChunkHeader,
    ChunkReference,
    Codec,
    OpenedChunk,
)
from kvpack.chunk.header import MAGIC as CHUNK_MAGIC
from kvpack.errors import FormatError, KvpackError, LimitError
from kvpack.header import FIXED_BYTES, Header, parse_prefix, tenant_bytes
from kvpack.keys import Keyring
from kvpack.manifest import Manifest
from kvpack.manifest.sealed import MAGIC as MANIFEST_MAGIC

_PIECE_BYTES: Final = 1 << 20
_RECENT_BYTES_MIN: Final = 16 << 10
_NO_DIGEST: Final = bytes(32)


class Spool(SeekableFile, Protocol):
    """A seekable binary file of one's own that holds the bundle until it is proved whole."""

    def write(self, data: bytes | memoryview, /) -> int | None:
        """Append ``data``."""


class StreamSource:
    """Bytes of a pipe, counted, and copied to a spool where there is one.

    What was read since the last mark, at most one object, is kept: where that object is not whole
    the tail of the bundle may be among it.
    """

    def __init__(self, stream: ReadableFile, spool: Spool | None) -> None:
        self._stream = stream
        self._spool = spool
        self._recent = memoryview(bytearray())
        self._recent_bytes = 0
        self.read_bytes = 0

    def mark(self) -> None:
        """What was read so far need not be kept."""
        self._recent_bytes = 0

    def fill(self, view: memoryview) -> None:
        """Fill ``view``.

        Raises:
            FormatError: The stream ends before.
        """
        filled = self._fill_part(view)
        self._keep(view[:filled])
        if filled < len(view):
            raise FormatError("stream", f"{len(view)} more bytes", f"{filled} before its end")

    def _keep(self, view: memoryview) -> None:
        start, end = self._recent_bytes, self._recent_bytes + len(view)
        if end > len(self._recent):
            # A bundle of small objects needs little, and the largest object's room is 4 MiB.
            room = min(max(2 * end, _RECENT_BYTES_MIN), OBJECT_BYTES_MAX)
            larger = memoryview(bytearray(room))
            larger[:start] = self._recent[:start]
            self._recent = larger
        self._recent[start:end] = view
        self._recent_bytes = end

    def _fill_part(self, view: memoryview) -> int:
        """Fill ``view`` as far as the stream goes; returns how many bytes came."""
        filled = fill_from(self._stream, view)
        self.read_bytes += filled
        if self._spool is not None:
            write_all(self._spool, view[:filled])
        return filled

    def read(self, length: int) -> bytes:
        """The next ``length`` bytes.

        Raises:
            FormatError: The stream ends before.
        """
        data = bytearray(length)
        self.fill(memoryview(data))
        return bytes(data)

    def read_to_end(self, kept_max: int) -> bytes:
        """Read the rest; returns the last bytes of all since the mark, at most ``kept_max``.

        Raises:
            LimitError: The stream is longer than a bundle may be.
        """
        data = bytearray(self._recent[: self._recent_bytes])
        piece = memoryview(bytearray(_PIECE_BYTES))
        while filled := self._fill_part(piece):
            data += piece[:filled]
            del data[: max(0, len(data) - kept_max)]
            limits.check_range("stream", self.read_bytes, 0, limits.BUNDLE_BYTES_MAX, "bytes")
        return bytes(data)

    def spool_no_more(self) -> None:
        """The bundle is not good: what follows is only read."""
        self._spool = None


class _Seen:
    """What went by, in 32 bytes for each chunk: whether it belongs there is asked at the end."""

    def __init__(self) -> None:
        self.count = 0
        self._marks = bytearray()
        self._bound = BoundHeaders()

    def add(self, header: ChunkHeader) -> None:
        """Note the next chunk.

        Raises:
            LimitError: More chunks than a bundle may have.
        """
        if self.count == limits.REFERENCES_MAX:
            raise LimitError("chunks", f"at most {limits.REFERENCES_MAX}", "more")
        self._bound.add(self.count, header)
        self._marks += _mark(header.reference)
        self.count += 1

    def require(self, index: BundleIndex, depth: Depth) -> None:
        """Refuse what is not the first chunks of ``index``, in its order.

        Raises:
            FormatError: There are more.
            AuthenticationError: The manifest names another chunk at some place.
            IdentityMismatchError: A chunk of another model; also LayoutMismatchError.
        """
        references, bound = index.manifest.references, self._bound.by_number()
        for number in range(self.count):
            if number == len(references):
                raise FormatError("manifest.references", f"{number} chunks", "more")
            if self._marks[32 * number : 32 * number + 32] != _mark(references[number]):
                raise not_named_here(number)
            if number in bound:
                index.require(number, bound[number], tag_checked=depth is not Depth.QUICK)


def _mark(reference: ChunkReference) -> bytes:
    digest = b"" if reference.codec is Codec.RAW else _NO_DIGEST
    return blake3(ChunkHeader(reference, _NO_DIGEST, _NO_DIGEST, digest).encode()).digest()


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why the first object that is not good is not.

    Attributes:
        error: What a reader from the footer would raise at it.
        end_offset: Where the object ends by its own authentic header, 0 where that is unknown.
    """

    error: KvpackError
    end_offset: int = 0


def _read_chunks(source: StreamSource, walk: ChunkWalk, depth: Depth, seen: _Seen) -> _Fault | None:
    """Read and check objects until the manifest begins, or up to the first that is not good."""
    while True:
        source.mark()
        start, end = source.read_bytes, 0
        where = f"chunks[{seen.count}]"
        try:
            lead = source.read(len(MANIFEST_MAGIC))
            if lead == MANIFEST_MAGIC:
                return None
            header = walk.read_header(where, lead)
            end = start + header.reference.object_bytes
            walk.check(header, where, depth)
            seen.add(header)
        except KvpackError as error:
            source.spool_no_more()
            return _Fault(error, end)


def _tail(data: bytes, read_bytes: int) -> bytes:
    """The manifest and what follows it, as the footer at the end of ``data`` says."""
    footer = decode_footer(data[-FOOTER_BYTES:], read_bytes)
    if footer.tail_bytes > len(data):
        raise FormatError("footer.manifest_bytes", f"a tail of {len(data)}", footer.tail_bytes)
    return data[len(data) - footer.tail_bytes :]


def _raise_fault(fault: _Fault | None, index: BundleIndex, seen: _Seen, tail_begins: int) -> None:
    """What stands after the chunks that are good, or instead of the next one.

    Raises:
        KvpackError: The fault, or that an object passes the manifest's beginning.
    """
    manifest_offset = index.footer.manifest_offset
    if fault is not None:
        if fault.end_offset > manifest_offset:
            raise beyond_its_place(seen.count) from fault.error
        raise fault.error
    if tail_begins != manifest_offset:
        where = f"chunks[{seen.count}]: chunk.magic"
        raise FormatError(where, CHUNK_MAGIC.hex(), MANIFEST_MAGIC.hex())


class ForwardReader:
    """One bundle from a pipe. When the constructor returns, all of it was read and is good.

    Args:
        stream: The pipe. It is read to its end.
        keyring: Must hold the key of the header's tenant and epoch.
        spool: Where the bytes are kept. Without one the chunks are checked and dropped.
        depth: How much of each chunk is checked on the way.

    Raises:
        FormatError: Not a bundle, or bytes after it; also VersionError, LimitError.
        UnknownKeyError: No key for the header's tenant and epoch.
        AuthenticationError: Something was changed, replaced or moved.
        IdentityMismatchError: A component or chunk of another model; also LayoutMismatchError.
    """

    def __init__(
        self,
        stream: ReadableFile,
        keyring: Keyring,
        spool: Spool | None = None,
        depth: Depth = Depth.FULL,
    ) -> None:
        source = StreamSource(stream, spool)
        fixed = source.read(FIXED_BYTES)
        lead = fixed + source.read(tenant_bytes(fixed))
        prefix = parse_prefix(lead)
        key = keyring.get(prefix.tenant, prefix.epoch)
        header_bytes = lead + source.read(prefix.header_bytes - len(lead))
        walk, seen = ChunkWalk(source, keyring, prefix), _Seen()
        fault = _read_chunks(source, walk, depth, seen)
        tail_begins = source.read_bytes - len(MANIFEST_MAGIC)
        tail = _tail(source.read_to_end(TAIL_BYTES_MAX), source.read_bytes)
        self.index: BundleIndex = open_index(key, header_bytes, tail, source.read_bytes)
        seen.require(self.index, depth)
        _raise_fault(fault, self.index, seen, tail_begins)
        self._spooled = None if spool is None else BundleReader(spool, keyring)

    @property
    def header(self) -> Header:
        """Whose rows, under which epoch."""
        return self.index.header

    @property
    def manifest(self) -> Manifest:
        """What the bundle holds."""
        return self.index.manifest

    def chunks(self) -> Iterator[OpenedChunk]:
        """Every chunk in file order, opened from the spool.

        Raises:
            RuntimeError: There is no spool. And everything that :meth:`BundleReader.chunks` raises.
        """
        if self._spooled is None:
            raise RuntimeError("a forward reader without a spool keeps no chunks")
        return self._spooled.chunks()
