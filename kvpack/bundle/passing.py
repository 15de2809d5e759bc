"""Giving away the chunks of a bundle whose manifest is known: any of them, in any thread.

Each thread reads a chunk, checks it, gives it away and uses its memory for the next one, so one
decrypts while another one's rows are copied. Nothing is given away before its own tag was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvpack.bundle.check import Place, SeekableSource
from kvpack.bundle.index import BundleIndex, beyond_its_place
from kvpack.bundle.per_thread import PerThread
from kvpack.bundle.source import PlacedSource
from kvpack.bundle.walk import ChunkWalk
from kvpack.chunk import ChunkReference, OpenedChunk
from kvpack.header import HeaderPrefix
from kvpack.keys import Keyring


class PlacePass:
    """Opens chunks at their places and gives each away. One thread at a time.

    Args:
        source: Where the walk reads.
        walk: Reads and opens one object.
        index: What the bundle must hold.
        take: Is given each chunk. The plaintext of rows is valid until it returns.
    """

    def __init__(
        self,
        source: SeekableSource,
        walk: ChunkWalk,
        index: BundleIndex,
        take: Callable[[OpenedChunk], object],
    ) -> None:
        self._source = source
        self._walk = walk
        self._index = index
        self._take = take
        self._scratch = bytearray()

    def give(self, places: Sequence[Place]) -> int:
        """Give away the chunks at ``places``, one after the other; returns their bytes.

        Raises:
            FormatError: An object is not one; also VersionError, LimitError.
            AuthenticationError: An object was changed or replaced.
            IdentityMismatchError: A chunk of another model; also LayoutMismatchError.
        """
        for place in places:
            self._take(self._opened(place))
        return sum(place.object_bytes for place in places)

    def _opened(self, place: Place) -> OpenedChunk:
        where = f"chunks[{place.index}]"
        self._source.seek(place.offset)
        # A header that is the manifest's, byte for byte, needs no other check.
        header = self._index.likely_header(place.index)
        data = None if header is None else self._walk.read_likely(header)
        if header is not None and data is not None:
            return self._walk.open(header, data, where, self._room(header.reference))
        self._source.seek(place.offset)
        header = self._walk.read_header(where)
        if place.offset + header.reference.object_bytes > self._index.footer.manifest_offset:
            raise beyond_its_place(place.index)
        data = self._walk.read_object(header, where)
        opened = self._walk.open(header, data, where, self._room(header.reference))
        self._index.require(place.index, header, tag_checked=True)
        return opened

    def _room(self, reference: ChunkReference) -> bytearray | None:
        """Where rows are decrypted to; other chunks are values of their own."""
        if not reference.has_rows:
            return None
        if len(self._scratch) < reference.encoded_bytes:
            # Below its cap and the sealer's own: its header passed both checks.
            self._scratch = bytearray(reference.encoded_bytes)
        return self._scratch


class SharedPass:
    """As :class:`PlacePass`, by any number of threads: each has buffers of its own.

    Args:
        descriptor: The open file. It is read by place.
        keyring: The keys at hand.
        prefix: The bundle header's prefix.
        index: What the bundle must hold.
        take: Is given each chunk, in any thread.
    """

    def __init__(
        self,
        descriptor: int,
        keyring: Keyring,
        prefix: HeaderPrefix,
        index: BundleIndex,
        take: Callable[[OpenedChunk], object],
    ) -> None:
        self._each = PerThread(partial(_placed_pass, descriptor, keyring, prefix, index, take))

    def give(self, places: Sequence[Place]) -> int:
        """As :meth:`PlacePass.give`, which says what it raises."""
        return self._each.mine().give(places)


def _placed_pass(
    descriptor: int,
    keyring: Keyring,
    prefix: HeaderPrefix,
    index: BundleIndex,
    take: Callable[[OpenedChunk], object],
) -> PlacePass:
    source = PlacedSource(descriptor)
    return PlacePass(source, ChunkWalk(source, keyring, prefix), index, take)
