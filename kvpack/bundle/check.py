"""Checking the chunks of a bundle whose manifest is known: any of them, in any thread."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from kvpack.bundle.index import BundleIndex, beyond_its_place
from kvpack.bundle.payload import CACHED_PIECE_BYTES, SHARED_PIECE_BYTES, Depth
from kvpack.bundle.per_thread import PerThread
from kvpack.bundle.source import ByteSource, PlacedSource
from kvpack.bundle.walk import ChunkWalk, LikelyChunk
from kvpack.header import HeaderPrefix
from kvpack.keys import Keyring

#: Each takes some kB of cipher and hash, and a pack may be of tens of thousands of small chunks.
_PREPARED_MAX: Final = 32


class SeekableSource(ByteSource, Protocol):
    """Bytes from a place that the reader sets."""

    def seek(self, offset: int) -> None:
        """The next :meth:`fill` begins at ``offset``."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk must be, if it and all before it are those that the manifest names.

    Attributes:
        index: Its place in file order.
        offset: Of its object in the file.
        object_bytes: Length of its object.
        reads: Whether its payload is read; else only its header is.
    """

    index: int
    offset: int
    object_bytes: int
    reads: bool


def places_of(index: BundleIndex, depth: Depth, chosen: Container[int] | None) -> Iterator[Place]:
    """Every chunk that the manifest names, in file order.

    A reader that goes by the objects' own lengths comes to the same places: an object of another
    length is another chunk than the manifest names, and the first of those ends the verification.
    """
    offset = index.footer.header_bytes
    for number, reference in enumerate(index.manifest.references):
        reads = depth is not Depth.QUICK and (chosen is None or number in chosen)
        yield Place(number, offset, reference.object_bytes, reads)
        offset += reference.object_bytes


class PlaceCheck:
    """Checks chunks at their places, releasing none. One thread at a time.

    Args:
        source: Where the walk reads.
        walk: Reads and checks one object.
        index: What the bundle must hold.
        depth: How much of each chunk.
    """

    def __init__(
        self, source: SeekableSource, walk: ChunkWalk, index: BundleIndex, depth: Depth
    ) -> None:
        self._source = source
        self._walk = walk
        self._index = index
        self._depth = depth

    def check(self, places: Sequence[Place]) -> int:
        """Check the chunks at ``places``, one after the other; returns their bytes.

        Raises:
            FormatError: An object is not one; also VersionError, LimitError.
            AuthenticationError: An object was changed or replaced.
            IdentityMismatchError: A chunk of another model; also LayoutMismatchError.
        """
        for start in range(0, len(places), _PREPARED_MAX):
            self._check_some(places[start : start + _PREPARED_MAX])
        return sum(place.object_bytes for place in places)

    def _check_some(self, places: Sequence[Place]) -> None:
        # All at once before the first is read: small steps are quick while code and tables are in
        # the cache, which every payload sweeps.
        likely = [self._prepare(place) for place in places]
        for place, expected in zip(places, likely, strict=True):
            where = f"chunks[{place.index}]"
            self._source.seek(place.offset)
            # A header that is the manifest's, byte for byte, needs no other check.
            if expected is not None and self._walk.meets(expected):
                self._walk.feed(expected, where)
            else:
                self._check(place, where)

    def _prepare(self, place: Place) -> LikelyChunk | None:
        header = self._index.likely_header(place.index)
        if header is None:
            return None
        return self._walk.prepare(header, self._depth if place.reads else Depth.QUICK)

    def _check(self, place: Place, where: str) -> None:
        self._source.seek(place.offset)
        header = self._walk.read_header(where)
        if place.offset + header.reference.object_bytes > self._index.footer.manifest_offset:
            raise beyond_its_place(place.index)
        if place.reads:
            self._walk.check(header, where, self._depth)
        self._index.require(place.index, header, tag_checked=place.reads)


class SharedCheck:
    """As :class:`PlaceCheck`, by any number of threads: each has buffers of its own.

    Args:
        descriptor: The open file. It is read by place.
        keyring: The keys at hand.
        prefix: The bundle header's prefix.
        index: What the bundle must hold.
        depth: How much of each chunk.
        threads: How many there will be.
    """

    def __init__(
        self,
        descriptor: int,
        keyring: Keyring,
        prefix: HeaderPrefix,
        index: BundleIndex,
        depth: Depth,
        threads: int,
    ) -> None:
        piece_bytes = CACHED_PIECE_BYTES if threads == 1 else SHARED_PIECE_BYTES
        self._each = PerThread(
            partial(_placed_check, descriptor, keyring, prefix, index, depth, piece_bytes)
        )

    def check(self, places: Sequence[Place]) -> int:
        """As :meth:`PlaceCheck.check`, which says what it raises."""
        return self._each.mine().check(places)


def _placed_check(
    descriptor: int,
    keyring: Keyring,
    prefix: HeaderPrefix,
    index: BundleIndex,
    depth: Depth,
    piece_bytes: int,
) -> PlaceCheck:
    source = PlacedSource(descriptor)
    return PlaceCheck(source, ChunkWalk(source, keyring, prefix, piece_bytes), index, depth)
