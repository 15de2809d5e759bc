"""Reading a bundle by random access: footer first, then manifest, then any chunk."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Container, Iterator
from functools import partial
from types import TracebackType
from typing import Protocol

from kvpack.bundle.check import PlaceCheck, SharedCheck, places_of
from kvpack.bundle.footer import FOOTER_BYTES, decode_footer
from kvpack.bundle.in_order import group_bytes, grouped, thread_count, verdict_of_all
from kvpack.bundle.index import BundleIndex, beyond_its_place, open_index
from kvpack.bundle.passing import PlacePass, SharedPass
from kvpack.bundle.payload import Depth
from kvpack.bundle.source import ReadableFile, fill_from
from kvpack.bundle.walk import ChunkWalk
from kvpack.chunk import ChunkHeader, OpenedChunk
from kvpack.errors import FormatError
from kvpack.header import FIXED_BYTES, Header, HeaderPrefix, parse_prefix, tenant_bytes
from kvpack.keys import Keyring
from kvpack.manifest import Manifest


class SeekableFile(ReadableFile, Protocol):
    """A binary file that is read by one thread."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to ``offset``."""


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open ``path`` for reading, unbuffered, if it is a regular file.

    Raises:
        FormatError: It is a folder, a FIFO or a device. A FIFO is not waited for.
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FormatError("file", "a regular file", "something else; - reads a pipe")
    return io.FileIO(descriptor, "rb")


class FileSource:
    """Bytes of a seekable file from a place that the reader sets."""

    def __init__(self, file: SeekableFile) -> None:
        self._file = file
        self.file_bytes = file.seek(0, os.SEEK_END)

    def seek(self, offset: int) -> None:
        """The next :meth:`fill` begins at ``offset``."""
        self._file.seek(offset)

    def fill(self, view: memoryview) -> None:
        """Fill ``view``.

        Raises:
            FormatError: The file ends before.
        """
        filled = fill_from(self._file, view)
        if filled < len(view):
            raise FormatError("file", f"{len(view)} more bytes", f"{filled} before its end")

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``.

        Raises:
            FormatError: The file ends before.
        """
        data = bytearray(length)
        self.seek(offset)
        self.fill(memoryview(data))
        return bytes(data)


def read_prefix(source: FileSource) -> HeaderPrefix:
    """Tenant, epoch and lengths from the beginning of the file.

    Raises:
        FormatError: Not the beginning of a pack; also VersionError, LimitError.
    """
    fixed = source.read(0, FIXED_BYTES)
    return parse_prefix(fixed + source.read(FIXED_BYTES, tenant_bytes(fixed)))


def read_tail(source: FileSource) -> bytes:
    """Everything after the last chunk, found through the footer.

    Raises:
        FormatError: No footer, or of a file of another size; also VersionError, LimitError.
    """
    start = source.file_bytes - FOOTER_BYTES
    if start < 0:
        raise FormatError("file", f"at least {FOOTER_BYTES} bytes", f"{source.file_bytes} bytes")
    footer = decode_footer(source.read(start, FOOTER_BYTES), source.file_bytes)
    return source.read(footer.manifest_offset, footer.tail_bytes)


class BundleReader:
    """One bundle, its manifest authentic and gated when the constructor returns.

    Chunks are checked one by one as they are read; each comes out only after its own tag, and is a
    value that later changes of the file cannot reach. Callers: one thread at a time.

    Args:
        file: A seekable binary file. It stays open while the reader is used.
        keyring: Must hold the key of the header's tenant and epoch.

    Raises:
        FormatError: Not a bundle; also VersionError, LimitError.
        UnknownKeyError: No key for the header's tenant and epoch.
        AuthenticationError: Header, manifest, signature block or footer was changed.
        IdentityMismatchError: The target component is another model than the header's.
        LayoutMismatchError: The manifest does not describe one whole state.
    """

    def __init__(self, file: SeekableFile, keyring: Keyring) -> None:
        self._source = FileSource(file)
        prefix = read_prefix(self._source)
        key = keyring.get(prefix.tenant, prefix.epoch)
        tail = read_tail(self._source)
        header_bytes = self._source.read(0, prefix.header_bytes)
        self.index: BundleIndex = open_index(key, header_bytes, tail, self._source.file_bytes)
        self._keyring = keyring
        self._prefix = prefix
        self._walk = ChunkWalk(self._source, keyring, prefix)
        # Only of this kind is it known that a place of it can be read without its position.
        self._descriptor = file.fileno() if isinstance(file, io.FileIO) else None
        self._close = getattr(file, "close", None)

    @classmethod
    def open(cls, path: str | os.PathLike[str], keyring: Keyring) -> BundleReader:
        """Open the bundle at ``path``. The reader is a context manager that closes the file.

        Raises:
            OSError: The file cannot be opened. And everything that the constructor raises.
        """
        file = open_regular(path)
        try:
            return cls(file, keyring)
        except BaseException:
            file.close()
            raise

    def __enter__(self) -> BundleReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._close is not None:
            self._close()

    @property
    def header(self) -> Header:
        """Whose rows, under which epoch."""
        return self.index.header

    @property
    def manifest(self) -> Manifest:
        """What the bundle holds."""
        return self.index.manifest

    def chunks(self) -> Iterator[OpenedChunk]:
        """Every chunk in file order, each opened and compared with its reference.

        Raises:
            FormatError: An object is not one; also VersionError, LimitError.
            AuthenticationError: An object was changed or replaced.
            IdentityMismatchError: A chunk of another model; also LayoutMismatchError.
        """
        for index, header, data in self._objects():
            opened = self._walk.open(header, data, f"chunks[{index}]")
            self._require(index, header, tag_checked=True)
            yield opened

    def pass_chunks(
        self,
        take: Callable[[OpenedChunk], object],
        progress: Callable[[int], None] | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        """Give every chunk to ``take``, opened and compared with its reference.

        Rows first, in any order and from several threads at once, each in memory that is used
        again: valid until ``take`` returns. Then the other chunks in file order, from this thread.

        Fresh memory for each chunk costs about what decrypting it does: it is zeroed, and on most
        machines its pages are touched for the first time.

        Args:
            take: What it raises ends this, once the chunks in hand are done.
            progress: Told, in this thread, the bytes of objects that are done.
            threads: As for :meth:`check`.

        Raises:
            KvpackError: As :meth:`chunks`; of several faults in rows the first in the file.
        """
        places = list(places_of(self.index, Depth.FULL, None))
        references = self.manifest.references
        count = thread_count(threads, self.index.footer.chunks_bytes)
        here: PlacePass | SharedPass
        if self._descriptor is None:
            here, count = PlacePass(self._source, self._walk, self.index, take), 1
        else:
            here = SharedPass(self._descriptor, self._keyring, self._prefix, self.index, take)
        for rows, at_once in ((True, count), (False, 1)):
            chosen = [place for place in places if references[place.index].has_rows is rows]
            size = group_bytes(sum(place.object_bytes for place in chosen))
            groups = grouped(chosen, lambda place: place.object_bytes, size)
            verdict_of_all((partial(here.give, group) for group in groups), at_once, progress)

    def check(
        self,
        depth: Depth = Depth.FULL,
        chosen: Container[int] | None = None,
        progress: Callable[[int], None] | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        """Check every chunk and release none.

        Args:
            depth: How much of each.
            chosen: The chunks whose payload is read; of the others only the headers. None: all.
            progress: Told the bytes of every object that is done.
            threads: How many chunks at a time, where the file allows it. None: as many as there are
                cores for it. The verdict is the same.

        Raises:
            FormatError: An object is not one; also VersionError, LimitError.
            AuthenticationError: An object was changed or replaced.
            IdentityMismatchError: A chunk of another model; also LayoutMismatchError.
        """
        places = places_of(self.index, depth, chosen)
        count = thread_count(threads, self.index.footer.chunks_bytes)
        if depth is Depth.QUICK or self._descriptor is None:
            count = 1
        here: PlaceCheck | SharedCheck
        if self._descriptor is None:
            here = PlaceCheck(self._source, self._walk, self.index, depth)
        else:
            here = SharedCheck(
                self._descriptor, self._keyring, self._prefix, self.index, depth, count
            )
        # One thread need not share evenly; it gains from preparing more at once.
        size = group_bytes(self.index.footer.chunks_bytes) * (2 if count == 1 else 1)
        groups = grouped(places, lambda place: place.object_bytes, size)
        verdict_of_all((partial(here.check, group) for group in groups), count, progress)

    def objects(self) -> Iterator[bytes]:
        """Every object in file order, as stored: to send, or to write into another bundle.

        Raises:
            FormatError: An object is not one; also VersionError, LimitError.
            AuthenticationError: Another object than the manifest names; tags are not checked.
        """
        for index, header, data in self._objects():
            self._require(index, header, tag_checked=False)
            yield bytes(data)

    def read_chunk(self, index: int) -> OpenedChunk:
        """Chunk ``index`` of the manifest's references.

        Raises:
            IndexError: There is no such chunk. And everything that :meth:`chunks` raises.
        """
        references = self.manifest.references
        if not 0 <= index < len(references):
            raise IndexError(f"chunk {index} of {len(references)}")
        before = sum(reference.object_bytes for reference in references[:index])
        header = self._read_header(index, self.index.footer.header_bytes + before)
        data = self._walk.read_object(header, f"chunks[{index}]")
        opened = self._walk.open(header, data, f"chunks[{index}]")
        self._require(index, header, tag_checked=True)
        return opened

    def _headers(self) -> Iterator[tuple[int, ChunkHeader]]:
        """Walk by the objects' own lengths, as a forward reader must: both then agree."""
        offset = self.index.footer.header_bytes
        for index in range(len(self.manifest.references)):
            header = self._read_header(index, offset)
            yield index, header
            offset += header.reference.object_bytes

    def _objects(self) -> Iterator[tuple[int, ChunkHeader, memoryview]]:
        for index, header in self._headers():
            yield index, header, self._walk.read_object(header, f"chunks[{index}]")

    def _read_header(self, index: int, offset: int) -> ChunkHeader:
        where = f"chunks[{index}]"
        self._source.seek(offset)
        header = self._walk.read_header(where)
        if offset + header.reference.object_bytes > self.index.footer.manifest_offset:
            raise beyond_its_place(index)
        return header

    def _require(self, index: int, header: ChunkHeader, *, tag_checked: bool) -> None:
        self.index.require(index, header, tag_checked=tag_checked)
