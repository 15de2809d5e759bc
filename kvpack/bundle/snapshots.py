"""A whole snapshot into a bundle, and out of one; its draft model's beside it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvpack import limits
from kvpack.bundle.footer import Footer
from kvpack.bundle.in_order import in_order, thread_count
from kvpack.bundle.index import BundleIndex
from kvpack.bundle.writer import BundleWriter, Sink
from kvpack.chunk import (
    ChunkClass,
    Codec,
    OpenedChunk,
    SealContext,
    SealedChunk,
    seal_draft_tile,
    seal_tile,
    seal_token_ids,
    tile_of,
)
from kvpack.codes import ComponentKind
from kvpack.errors import IncompleteError, LayoutMismatchError
from kvpack.header import Header, encode_header
from kvpack.identity import CallSchedule, NumericsFingerprint, require_same_layout
from kvpack.keys import EpochKey
from kvpack.manifest import Component, DraftModel, Manifest, seal_manifest
from kvpack.snapshot import SessionCacheSnapshot, Tile
from kvpack.wire import identity_digest, layout_digest


class Reader(Protocol):
    """Either reader: random access, or forward with a spool."""

    index: BundleIndex

    def chunks(self) -> Iterable[OpenedChunk]:
        """Every chunk in file order."""


@dataclass(frozen=True, slots=True, repr=False)
class DraftSnapshot:
    """A draft model's state, to travel with its target's.

    Attributes:
        model: Which model, and how its rows were computed.
        snapshot: Its rows; the token ids are the target's.

    Raises:
        LayoutMismatchError: The snapshot is of another layout than the model's.
    """

    model: DraftModel
    snapshot: SessionCacheSnapshot

    def __post_init__(self) -> None:
        require_same_layout(self.model.layout, self.snapshot.layout)

    def require_beside(self, target: SessionCacheSnapshot) -> None:
        """Refuse a draft that stands elsewhere than ``target``.

        Raises:
            LayoutMismatchError: It has other tokens, or another producer.
        """
        ours, theirs = target.position, self.snapshot.position
        if ours != theirs:
            raise LayoutMismatchError("draft.position", ours, theirs)
        if target.token_ids != self.snapshot.token_ids:
            raise LayoutMismatchError("draft.token_ids", "those of the target", "others")
        if target.producer is not self.snapshot.producer:
            raise LayoutMismatchError(
                "draft.producer", target.producer.value, self.snapshot.producer.value
            )


def write_snapshot(
    sink: Sink,
    key: EpochKey,
    header: Header,
    snapshot: SessionCacheSnapshot,
    numerics: NumericsFingerprint,
    schedule: CallSchedule,
    *,
    components: Sequence[SealedChunk] = (),
    draft: DraftSnapshot | None = None,
    codec: Codec = Codec.RAW,
    signer: Ed25519PrivateKey | None = None,
) -> Footer:
    """Write ``snapshot`` as one whole bundle: rows, token ids, ``components``, the draft's rows.

    Args:
        sink: Where the bytes go; no seek is needed.
        key: Root of the header's tenant and epoch.
        header: Whose rows.
        snapshot: The state.
        numerics: What decided its bits.
        schedule: In which calls it was computed.
        components: Sealed final logits, sampler, session or draft state.
        draft: The draft model's state, or None.
        codec: For the rows.
        signer: Signs the stored bytes, or None.

    Raises:
        LayoutMismatchError: The snapshot is of another layout than the header's, or the draft
            stands elsewhere.
        IdentityMismatchError: The draft has another tokenizer.
        FormatError: A component or a schedule does not fit the cut.
    """
    if draft is not None:
        draft.require_beside(snapshot)
    context = SealContext(key, header.identity_digest, header.layout_digest)
    header_bytes = encode_header(header)
    writer = BundleWriter(sink, key, header_bytes, signer)
    element_bytes = header.layout.encoding.element_bytes
    jobs = [
        partial(seal_tile, context, tile, codec, element_bytes=element_bytes)
        for tile in snapshot.tiles
    ]
    threads = thread_count(None, sum(len(tile.data) for tile in snapshot.tiles))
    # Sealing is deterministic: what comes out does not depend on how many do it.
    with closing(in_order(jobs, threads)) as sealed:
        for chunk in sealed:
            writer.add(chunk)
    for chunk in (*seal_token_ids(context, snapshot.token_ids), *components):
        writer.add(chunk)
    models = [Component(ComponentKind.TARGET, context.identity_digest)]
    if draft is not None:
        models.append(Component.of_draft(draft.model))
        for chunk in _seal_draft(key, draft, codec):
            writer.add(chunk)
    manifest = Manifest(
        producer=snapshot.producer,
        position=snapshot.position,
        numerics=numerics,
        schedule=schedule,
        references=writer.references,
        components=tuple(models),
    )
    return writer.finish(seal_manifest(key, header_bytes, manifest))


def draft_context(key: EpochKey, model: DraftModel) -> SealContext:
    """What the chunks of a draft are bound to: the draft's own identity and layout."""
    return SealContext(key, identity_digest(model.identity), layout_digest(model.layout))


def _seal_draft(key: EpochKey, draft: DraftSnapshot, codec: Codec) -> Iterator[SealedChunk]:
    context = draft_context(key, draft.model)
    element_bytes = draft.model.layout.encoding.element_bytes
    for tile in draft.snapshot.tiles:
        yield seal_draft_tile(context, tile, codec, element_bytes=element_bytes)


def read_draft_snapshot(reader: Reader) -> DraftSnapshot | None:
    """The draft model's state, all of it checked and in memory, or None: the bundle has none.

    A delta holds all rows of its draft, but not all token ids.

    Raises:
        IncompleteError: The bundle is a delta: its parent is needed.
        FormatError: An object is not one; also everything that ``reader.chunks()`` raises.
    """
    manifest = reader.index.manifest
    require_whole(manifest)
    if manifest.draft is None:
        return None
    tiles: list[Tile] = []
    token_ids: list[int] = []
    for opened in reader.chunks():
        if opened.reference.has_draft_rows:
            tiles.append(tile_of(manifest.draft.layout, opened))
        elif opened.reference.chunk_class is ChunkClass.TOKEN_IDS:
            token_ids.extend(parse_token_ids(opened))
    snapshot = SessionCacheSnapshot(
        layout=manifest.draft.layout,
        producer=manifest.producer,
        position=manifest.position,
        token_ids=tuple(token_ids),
        tiles=tuple(tiles),
    )
    return DraftSnapshot(manifest.draft, snapshot)


def read_snapshot(reader: Reader) -> SessionCacheSnapshot:
    """The target's state that a bundle holds, all of it checked and in memory.

    Raises:
        IncompleteError: The bundle is a delta: its parent is needed.
        FormatError: An object is not one; also everything that ``reader.chunks()`` raises.
    """
    manifest = reader.index.manifest
    require_whole(manifest)
    layout = reader.index.header.layout
    tiles: list[Tile] = []
    token_ids: list[int] = []
    for opened in reader.chunks():
        if opened.reference.has_rows:
            tiles.append(tile_of(layout, opened))
        elif opened.reference.chunk_class is ChunkClass.TOKEN_IDS:
            token_ids.extend(parse_token_ids(opened))
    return SessionCacheSnapshot(
        layout=layout,
        producer=manifest.producer,
        position=manifest.position,
        token_ids=tuple(token_ids),
        tiles=tuple(tiles),
    )


def parse_token_ids(opened: OpenedChunk) -> tuple[int, ...]:
    """The ids of an opened TOKEN_IDS chunk, in order.

    Raises:
        LimitError: An id is outside its cap.
    """
    ids = struct.unpack(f"<{opened.reference.token_count}I", opened.plaintext)
    limits.check_range("token_ids.max", max(ids), 0, limits.TOKEN_ID_MAX)
    return ids


def require_whole(manifest: Manifest) -> None:
    """Refuse a delta that stands alone.

    Raises:
        IncompleteError: Names the parent and the cut.
    """
    if manifest.parent is not None:
        raise IncompleteError(
            f"parent {manifest.parent.manifest_id.hex()[:16]}… (epoch {manifest.parent.epoch}) "
            f"holds the first {manifest.parent.position} of {manifest.position} tokens"
        )
