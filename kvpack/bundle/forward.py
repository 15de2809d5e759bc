"""Reading a bundle from a pipe: forwards, once, and releasing nothing before its end was seen.

The verdict is that of :class:`kvpack.bundle.reader.BundleReader` on the same bytes. Everything that
is asked only of authentic headers (whose rows, which manifest) waits for the tail.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from blake3 import blake3

from kvpack import limits
from kvpack.bundle.index import TAIL_BYTES_MAX, BundleIndex, not_named_here, open_index
from kvpack.bundle.payload import Depth
from kvpack.bundle.reader import BundleReader, SeekableFile
from kvpack.bundle.source import ReadableFile, fill_from
from kvpack.bundle.walk import ChunkWalk
from kvpack.bundle.writer import write_all
from kvpack.chunk import ChunkHeader, ChunkReference, Codec, OpenedChunk
from kvpack.errors import FormatError, LimitError
from kvpack.header import FIXED_BYTES, Header, parse_prefix, tenant_bytes
from kvpack.keys import Keyring
from kvpack.manifest import Manifest
from kvpack.manifest.sealed import MAGIC as MANIFEST_MAGIC

_PIECE_BYTES: Final = 1 << 20
_NO_DIGEST: Final = bytes(32)


class Spool(SeekableFile, Protocol):
    """A seekable binary file of one's own that holds the bundle until it is proved whole."""

    def write(self, data: bytes | memoryview, /) -> int | None:
        """Append ``data``."""


class StreamSource:
    """Bytes of a pipe, counted, and copied to a spool where there is one."""

    def __init__(self, stream: ReadableFile, spool: Spool | None) -> None:
        self._stream = stream
        self._spool = spool
        self.read_bytes = 0

    def fill(self, view: memoryview) -> None:
        """Fill ``view``.

        Raises:
            FormatError: The stream ends before.
        """
        filled = self.fill_part(view)
        if filled < len(view):
            raise FormatError("stream", f"{len(view)} more bytes", f"{filled} before its end")

    def fill_part(self, view: memoryview) -> int:
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

    def read_to_end(self, bytes_max: int) -> bytes:
        """Everything up to the end of the stream.

        Raises:
            LimitError: There is more than ``bytes_max``.
        """
        data = bytearray()
        piece = memoryview(bytearray(_PIECE_BYTES))
        while filled := self.fill_part(piece):
            data += piece[:filled]
            if len(data) > bytes_max:
                raise LimitError("stream", f"at most {bytes_max} bytes after the chunks", "more")
        return bytes(data)


class _Seen:
    """What went by, in 32 bytes for each chunk: whether it belongs there is asked at the end.

    One header is kept whole, and the first one that is bound to another model or layout than it.
    """

    def __init__(self) -> None:
        self.count = 0
        self._marks = bytearray()
        self._kept: list[tuple[int, ChunkHeader]] = []

    def add(self, header: ChunkHeader) -> None:
        """Note the next chunk.

        Raises:
            LimitError: More chunks than a bundle may have.
        """
        if self.count == limits.REFERENCES_MAX:
            raise LimitError("chunks", f"at most {limits.REFERENCES_MAX}", "more")
        bindings = [(kept.identity_digest, kept.layout_digest) for _, kept in self._kept]
        if not bindings or (
            len(bindings) == 1 and (header.identity_digest, header.layout_digest) != bindings[0]
        ):
            self._kept.append((self.count, header))
        self._marks += _mark(header.reference)
        self.count += 1

    def require(self, index: BundleIndex, walk: ChunkWalk, depth: Depth) -> None:
        """Refuse what is not the chunks of ``index``, in its order.

        Raises:
            FormatError: There are more or fewer.
            AuthenticationError: The manifest names another chunk at some place.
            IdentityMismatchError: A chunk of another model; also LayoutMismatchError.
        """
        references = index.manifest.references
        if self.count != len(references):
            expected = f"{len(references)} chunks"
            raise FormatError("manifest.references", expected, f"{self.count} chunks")
        for number, reference in enumerate(references):
            if self._marks[32 * number : 32 * number + 32] != _mark(reference):
                raise not_named_here(number)
        for number, header in self._kept:
            key = walk.key(header.reference.epoch)
            index.require(key, number, header, tag_checked=depth is not Depth.QUICK)


def _mark(reference: ChunkReference) -> bytes:
    digest = b"" if reference.codec is Codec.RAW else _NO_DIGEST
    return blake3(ChunkHeader(reference, _NO_DIGEST, _NO_DIGEST, digest).encode()).digest()


def _read_chunks(source: StreamSource, walk: ChunkWalk, depth: Depth) -> _Seen:
    """Read and check objects until the manifest begins."""
    seen = _Seen()
    while True:
        lead = source.read(len(MANIFEST_MAGIC))
        if lead == MANIFEST_MAGIC:
            return seen
        where = f"chunks[{seen.count}]"
        header = walk.read_header(where, lead)
        walk.check(header, where, depth)
        seen.add(header)


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
        walk = ChunkWalk(source, keyring, prefix)
        seen = _read_chunks(source, walk, depth)
        tail = MANIFEST_MAGIC + source.read_to_end(TAIL_BYTES_MAX)
        self.index: BundleIndex = open_index(key, header_bytes, tail, source.read_bytes)
        seen.require(self.index, walk, depth)
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
