"""A delta bundle and its parent's cut become one whole cut: in a store no cut needs another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from kvpack import limits
from kvpack.bundle import parse_token_ids
from kvpack.chunk import ChunkClass, ChunkReference, SealContext, SealedChunk, seal_tile, tile_of
from kvpack.chunk.seal import seal_token_ids
from kvpack.errors import IdentityMismatchError, IncompleteError
from kvpack.keys import Keyring
from kvpack.layout import LayerKind
from kvpack.manifest import Manifest, ParentReference
from kvpack.snapshot import TileSpec
from kvpack.store.errors import NotStoredError
from kvpack.store.grid import trimmed
from kvpack.store.interface import ObjectStore
from kvpack.store.reader import CutReader, trim_tile


@dataclass(frozen=True, slots=True, repr=False)
class WholeCut:
    """What a delta and its parent are together.

    Attributes:
        manifest: The delta's, whole.
        kept: The parent's chunks that it refers to, possibly trimmed.
        sealed: Pieces of the parent's chunks that had to be sealed for it.
    """

    manifest: Manifest
    kept: tuple[ChunkReference, ...]
    sealed: tuple[SealedChunk, ...]


def open_parent(
    store: ObjectStore, keyring: Keyring, parent: ParentReference, identity_digest: bytes
) -> CutReader:
    """The parent's cut.

    Raises:
        IncompleteError: It is not in this store, or holds less than the delta takes from it.
        IdentityMismatchError: It is another model's. And what :class:`CutReader` raises.
    """
    name = f"parent {parent.manifest_id.hex()[:16]}… (epoch {parent.epoch})"
    try:
        reader = CutReader(store, keyring, parent.manifest_id)
    except NotStoredError:
        raise IncompleteError(f"{name} is not in this store: import it first") from None
    cut = reader.cut
    if cut.header.epoch != parent.epoch or cut.position < parent.position:
        raise IncompleteError(f"{name} holds {cut.position} of {parent.position} tokens")
    if cut.header.identity_digest != identity_digest:
        raise IdentityMismatchError(
            "parent.identity_digest",
            identity_digest.hex()[:16],
            cut.header.identity_digest.hex()[:16],
        )
    return reader


def flatten(reader: CutReader, keyring: Keyring, delta: Manifest, at: int) -> WholeCut:
    """The whole cut of ``delta``, whose first ``at`` tokens are those of the parent.

    Row chunks never cross ``at``, which lies on the grid. A window that begins inside a parent's
    chunk trims it, or seals its end anew where it is no whole block; token ids that cross ``at``
    are sealed up to it.

    Raises:
        AuthenticationError: A chunk of the parent was changed. And what opening one raises.
    """
    kept: list[ChunkReference] = []
    sealed: list[SealedChunk] = []
    for reference in reader.cut.manifest.references:
        for piece in _pieces(reader, keyring, reference, delta.position, at):
            if isinstance(piece, SealedChunk):
                sealed.append(piece)
            else:
                kept.append(piece)
    taken = [*kept, *(chunk.reference for chunk in sealed)]
    # The gate wants token ids in order; rows may come in any.
    taken.sort(key=lambda ref: (ref.chunk_class is ChunkClass.TOKEN_IDS, ref.first_position))
    references = (*taken, *delta.references)
    manifest = dataclasses.replace(delta, parent=None, references=references)
    return WholeCut(manifest, tuple(kept), tuple(sealed))


def _pieces(
    reader: CutReader, keyring: Keyring, reference: ChunkReference, position: int, at: int
) -> Iterator[ChunkReference | SealedChunk]:
    """What of one of the parent's chunks the whole cut needs: nothing, a reference, or a piece."""
    if reference.has_rows:
        used = _needed_rows(reader, reference, position, at)
        if used is not None:
            yield _rows(reader, keyring, reference, used)
    elif reference.chunk_class is ChunkClass.TOKEN_IDS and reference.first_position < at:
        if reference.first_position + reference.token_count <= at:
            yield reference
        else:
            ids = parse_token_ids(reader.open(reference))
            context = _context(reader, keyring, reference)
            first = reference.first_position
            yield from seal_token_ids(context, ids[: at - first], first)


def _needed_rows(
    reader: CutReader, reference: ChunkReference, position: int, at: int
) -> TileSpec | None:
    used = reference.used_spec()
    layer = reader.cut.header.layout.layers[used.layers[0]]
    first = 0 if used.kind is LayerKind.FULL else layer.first_row(position)
    start, end = max(used.first_position, first), min(used.end_position, at)
    return TileSpec(used.kind, used.layers, start, end - start) if start < end else None


def _rows(
    reader: CutReader, keyring: Keyring, reference: ChunkReference, used: TileSpec
) -> ChunkReference | SealedChunk:
    if used == reference.used_spec():
        return reference
    if reference.token_count == limits.GRID_TOKENS and used.kind is LayerKind.SWA:
        return trimmed(reference.untrimmed(), used)
    layout = reader.cut.header.layout
    tile = trim_tile(layout, tile_of(layout, reader.open(reference)), used)
    element_bytes = layout.encoding.element_bytes
    context = _context(reader, keyring, reference)
    return seal_tile(context, tile, reference.codec, element_bytes=element_bytes)


def _context(reader: CutReader, keyring: Keyring, reference: ChunkReference) -> SealContext:
    header = reader.cut.header
    key = keyring.get(header.tenant, reference.epoch)
    return SealContext(key, header.identity_digest, header.layout_digest, reference.aead)
