"""Reading a cut: every chunk opened, compared with its reference, and trimmed to what counts."""

from __future__ import annotations

from collections.abc import Iterator

from kvpack.bundle import DraftSnapshot, parse_token_ids, require_whole
from kvpack.chunk import (
    ChunkClass,
    ChunkReference,
    OpenedChunk,
    check_content_id,
    open_chunk,
    tile_of,
)
from kvpack.chunk.reference import TOKEN_ID_BYTES
from kvpack.errors import AuthenticationError
from kvpack.keys import Keyring
from kvpack.layout import CacheLayout
from kvpack.manifest import Bindings
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec
from kvpack.store.cut import StoredCut, open_cut
from kvpack.store.errors import NotStoredError
from kvpack.store.interface import ObjectStore
from kvpack.store.names import cut_name


class CutReader:
    """One cut of a store, its manifest authentic and gated when the constructor returns.

    Chunks are read one by one: memory is one chunk, whatever the cut's size. Pin the cut
    (:class:`kvpack.store.pin.Pin`) where a collector may run meanwhile; without a pin a chunk that
    was collected is :class:`NotStoredError`, which for a cache is a miss.

    Args:
        store: Which store.
        keyring: Must hold the tenant's keys.
        cut_id: The manifest's MAC, 32 bytes.
        data: The cut's object, where it was read already.

    Raises:
        NotStoredError: There is no such cut.
        UnknownKeyError: No key for its tenant and epoch.
        FormatError: Not a cut; also VersionError, LimitError, AuthenticationError,
            IdentityMismatchError, LayoutMismatchError.
    """

    def __init__(
        self, store: ObjectStore, keyring: Keyring, cut_id: bytes, data: bytes | None = None
    ) -> None:
        found = store.get(cut_name(cut_id)) if data is None else data
        self.cut: StoredCut = open_cut(keyring, found, cut_id)
        self.bindings = Bindings.of(self.cut.header, self.cut.manifest)
        self._store = store
        self._keyring = keyring

    def expect(self) -> None:
        """Tell the store that every chunk will be read, in the manifest's order."""
        self._store.expect([self.cut.chunk_names(ref)[0] for ref in self.cut.manifest.references])

    def object(self, reference: ChunkReference) -> bytes:
        """The sealed object of ``reference``, as it is stored.

        Raises:
            NotStoredError: It is not there. FormatError: a file of another length.
        """
        shared, peer = self.cut.chunk_names(reference)
        try:
            return self._store.get(shared)
        except NotStoredError:
            return self._store.get(peer)

    def open(self, reference: ChunkReference, *, deep: bool = False) -> OpenedChunk:
        """The whole chunk of ``reference``, opened; trimming is up to the caller.

        Args:
            reference: One of the manifest's.
            deep: Recompute the content id too.

        Raises:
            NotStoredError: It is not there.
            AuthenticationError: It was changed or replaced.
            FormatError: Not a chunk object; also UnknownKeyError, IdentityMismatchError,
                LayoutMismatchError.
        """
        return self.open_object(reference, self.object(reference), deep=deep)

    def open_object(
        self, reference: ChunkReference, data: bytes, *, deep: bool = False
    ) -> OpenedChunk:
        """The same for an object that was read already."""
        key = self._keyring.get(self.cut.header.tenant, reference.epoch)
        context = self.bindings.require(reference).context(key)
        where = f"chunk {reference.seal_id.hex()[:16]}"
        opened = open_chunk(context, data, where)
        if opened.reference != reference.untrimmed():
            raise AuthenticationError(where, "another chunk than the manifest names")
        if deep:
            check_content_id(context, opened, where)
        return opened

    def tiles(self) -> Iterator[Tile]:
        """All rows of the cut, tile by tile, trimmed.

        Raises:
            NotStoredError: A chunk is missing. And everything that :meth:`open` raises.
        """
        layout = self.cut.header.layout
        self._store.expect(
            [
                self.cut.chunk_names(reference)[0]
                for reference in self.cut.manifest.references
                if reference.has_rows
            ]
        )
        for reference in self.cut.manifest.references:
            if reference.has_rows:
                whole = tile_of(layout, self.open(reference))
                yield trim_tile(layout, whole, reference.used_spec())

    def token_ids(self) -> tuple[int, ...]:
        """The ids that the cut stands for, in order. They are the user's text.

        Raises:
            NotStoredError: A chunk is missing. And everything that :meth:`open` raises.
        """
        ids: list[int] = []
        for reference in self.references(ChunkClass.TOKEN_IDS):
            ids.extend(parse_token_ids(self.open(reference)))
        return tuple(ids)

    def packed_token_ids(self) -> bytes:
        """The same as :func:`kvpack.prefix.pack_ids` has them: to compare, which is quicker so.

        Raises:
            NotStoredError: A chunk is missing. And everything that :meth:`open` raises.
        """
        references = self.references(ChunkClass.TOKEN_IDS)
        return b"".join(self.open(reference).plaintext for reference in references)

    def references(self, chunk_class: ChunkClass) -> Iterator[ChunkReference]:
        """References of one class, in order."""
        return (ref for ref in self.cut.manifest.references if ref.chunk_class is chunk_class)

    def snapshot(self) -> SessionCacheSnapshot:
        """The whole state, checked and in memory.

        Raises:
            IncompleteError: The cut is a delta. And everything that :meth:`open` raises.
        """
        manifest = self.cut.manifest
        require_whole(manifest)
        return SessionCacheSnapshot(
            layout=self.cut.header.layout,
            producer=manifest.producer,
            position=manifest.position,
            token_ids=self.token_ids(),
            tiles=tuple(self.tiles()),
        )

    def draft_snapshot(self) -> DraftSnapshot | None:
        """The draft model's state, checked and in memory, or None: the cut has none.

        Raises:
            IncompleteError: The cut is a delta. And everything that :meth:`open` raises.
        """
        manifest = self.cut.manifest
        require_whole(manifest)
        model = manifest.draft
        if model is None:
            return None
        rows = (ref for ref in manifest.references if ref.has_draft_rows)
        snapshot = SessionCacheSnapshot(
            layout=model.layout,
            producer=manifest.producer,
            position=manifest.position,
            token_ids=self.token_ids(),
            tiles=tuple(tile_of(model.layout, self.open(reference)) for reference in rows),
        )
        return DraftSnapshot(model, snapshot)

    def check(self, *, deep: bool = False) -> None:
        """Open every chunk and release none.

        Raises:
            NotStoredError: A chunk is missing. And everything that :meth:`open` raises.
        """
        self.expect()
        for reference in self.cut.manifest.references:
            self.open(reference, deep=deep)


def trim_tile(layout: CacheLayout, tile: Tile, used: TileSpec) -> Tile:
    """The rows of ``used`` out of ``tile``, which holds them and perhaps more.

    Raises:
        LayoutMismatchError: The tile does not have the size that ``layout`` implies.
    """
    if used == tile.spec:
        return tile
    first = used.first_position - tile.spec.first_position
    end = first + used.token_count
    pieces: list[memoryview] = []
    for layer, keys, values in tile.planes(layout):
        key_bytes, value_bytes = layout.key_row_bytes(layer), layout.value_row_bytes(layer)
        pieces.append(keys[first * key_bytes : end * key_bytes])
        pieces.append(values[first * value_bytes : end * value_bytes])
    return Tile(used, b"".join(pieces))


def token_bytes(cut: StoredCut) -> int:
    """How many bytes of token ids a cut has: what it costs to compare them."""
    return cut.position * TOKEN_ID_BYTES
