"""Bundles into a store and out of one. Objects move as they are; nothing is sealed twice.

One thing is sealed anew: where a cut's window begins inside a stored block, a bundle needs that
block's head short. Only these head chunks and the manifest that names them are made again; every
other object keeps its bytes and its ids. Whoever names a codec has the rows sealed with it: their
content ids stay, their objects and the manifest become others.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvpack.bundle import BundleIndex, BundleWriter, Footer
from kvpack.bundle.writer import Sink
from kvpack.chunk import (
    ChunkReference,
    Codec,
    OpenedChunk,
    RowSealer,
    SealContext,
    check_content_id,
    open_chunk,
    parse_chunk,
    tile_of,
)
from kvpack.errors import IncompleteError, LayoutMismatchError
from kvpack.keys import Keyring
from kvpack.manifest import Bindings, manifest_id, seal_manifest
from kvpack.store.delta import WholeCut, flatten, open_parent
from kvpack.store.interface import ObjectStore
from kvpack.store.names import HoldKind
from kvpack.store.reader import CutReader, trim_tile
from kvpack.store.writer import CutWriter, WriterTools


class Trust(enum.Enum):
    """Who vouches that a chunk's content id is that of its rows.

    RECOMPUTE: this call does, chunk by chunk. PEER: nobody yet; the chunks serve their own cut
    until :func:`kvpack.store.peer.adopt_chunks` has recomputed them.
    """

    RECOMPUTE = "recompute"
    PEER = "peer"


class BundleObjects(Protocol):
    """A bundle that can be read by random access."""

    index: BundleIndex

    def objects(self) -> Iterable[bytes]:
        """Every object in file order, as stored."""


def import_bundle(
    store: ObjectStore,
    keyring: Keyring,
    bundle: BundleObjects,
    lineage: bytes,
    tools: WriterTools,
    *,
    trust: Trust = Trust.RECOMPUTE,
    kind: HoldKind = HoldKind.IMPORT,
    indexed_ids: Sequence[int] | None = None,
    codec: Codec | None = None,
) -> bytes:
    """Store every chunk of a bundle and publish its cut. Returns the cut's id.

    Every tag is checked before anything is stored; room for all of it is asked for first. A delta
    becomes a whole cut, with the chunks of its parent's cut, which must be in the store.

    Args:
        store: Where to.
        keyring: The tenant's keys.
        bundle: An open :class:`kvpack.bundle.BundleReader`.
        lineage: 16 bytes: which session it belongs to from now on.
        tools: Clock, random bytes and budget.
        trust: Who vouches for the content ids.
        kind: Why it is kept.
        indexed_ids: Its token ids, if other sessions may start from it: the caller then vouches
            for the rows, which no recomputation can. None: it serves its own session.
        codec: Seal the rows anew with it; the cut then has another id than the bundle's manifest,
            and no delta of the bundle finds it. None: every object keeps its bytes.

    Raises:
        RuntimeError: A codec for chunks that a peer vouches for.
        IncompleteError: The bundle is a delta, and its parent is not in the store, or the parent's
            window begins after the one that is needed.
        NotStoredError: Chunks of the parent came from a peer and were not recomputed yet.
        StoreFullError: No room. Nothing was written.
        AuthenticationError: A chunk was changed, or claims another content id than its own.
        KvpackError: What reading the bundle or publishing the cut raises.
    """
    header, header_bytes = bundle.index.header, bundle.index.header_bytes
    whole, blob = _whole_cut(store, keyring, bundle.index)
    if codec is not None and trust is Trust.PEER:
        raise RuntimeError("what a peer sent is stored as it came until it was recomputed")
    peer_cut = manifest_id(blob) if trust is Trust.PEER else None
    with CutWriter(store, keyring, header_bytes, tools, peer_cut) as writer:
        own = [len(chunk.object) for chunk in whole.sealed]
        received = [_room(reference, codec) for reference in bundle.index.manifest.references]
        writer.reserve(sum(own) + sum(received))
        writer.rely(whole.kept)
        writer.add(whole.sealed)
        deep = trust is Trust.RECOMPUTE
        recoder = _Recoder(keyring, header.tenant, bundle.index.bindings, codec)
        writer.add(recoder.checked(bundle.objects(), deep=deep))
        if not recoder.replaced:
            return writer.publish_sealed(blob, lineage, kind, indexed_ids)
        references = tuple(map(recoder.now, whole.manifest.references))
        manifest = dataclasses.replace(whole.manifest, references=references)
        return writer.publish(manifest, lineage, kind, indexed_ids)


def _room(reference: ChunkReference, codec: Codec | None) -> int:
    """Bytes that an object takes at most: one that is sealed anew may come out raw."""
    return reference.object_bytes if codec is None else reference.raw_object_bytes


def _whole_cut(store: ObjectStore, keyring: Keyring, index: BundleIndex) -> tuple[WholeCut, bytes]:
    """What the bundle holds as a whole cut, and its manifest as it is to be stored."""
    manifest = index.manifest
    if manifest.parent is None:
        return WholeCut(manifest, (), ()), index.manifest_blob
    parent = open_parent(store, keyring, manifest.parent, index.identity_digest)
    whole = flatten(parent, keyring, manifest, manifest.parent.position)
    key = keyring.get(index.header.tenant, index.header.epoch)
    try:
        blob = seal_manifest(key, index.header_bytes, whole.manifest, in_store=True)
    except LayoutMismatchError as error:
        raise IncompleteError(f"the parent does not hold what the delta needs: {error}") from error
    return whole, blob


class _Recoder:
    """Opens every object, and seals rows anew where a codec is wanted.

    Args:
        keyring: The tenant's keys.
        tenant: Whose.
        bindings: Of which model each chunk must be.
        codec: For rows, or None: everything stays as it is.
    """

    def __init__(
        self, keyring: Keyring, tenant: str, bindings: Bindings, codec: Codec | None
    ) -> None:
        self._keyring = keyring
        self._tenant = tenant
        self._bindings = bindings
        self._codec = codec
        self.replaced: dict[bytes, ChunkReference] = {}

    def checked(self, objects: Iterable[bytes], *, deep: bool) -> Iterator[bytes]:
        """The objects, each after its tag and, where ``deep``, its content id were checked."""
        for number, data in enumerate(objects):
            reference, where = parse_chunk(data), f"chunks[{number}]"
            binding = self._bindings.require(reference)
            context = binding.context(self._keyring.get(self._tenant, reference.epoch))
            opened = open_chunk(context, data, where)
            if deep:
                check_content_id(context, opened, where)
            yield self.recoded(opened, data)

    def recoded(self, opened: OpenedChunk, data: bytes) -> bytes:
        """The object of ``opened`` with the codec that is wanted, or ``data`` as it is.

        A chunk that is compressed already is not compressed again at another level.
        """
        reference = opened.reference
        rows = reference.has_rows or reference.has_draft_rows
        if self._codec is None or not rows or reference.codec is self._codec:
            return data
        binding = self._bindings.require(reference)
        context = binding.context(self._keyring.get(self._tenant, reference.epoch))
        chunk = RowSealer(context, binding.layout, self._codec).again(opened)
        if chunk.reference != reference:
            self.replaced[reference.seal_id] = chunk.reference
        return chunk.object

    def codec_for(self, reference: ChunkReference) -> Codec:
        """The codec of rows that have to be sealed in any case."""
        return reference.codec if self._codec is None else self._codec

    def now(self, reference: ChunkReference) -> ChunkReference:
        """What stands for ``reference`` after everything was sealed."""
        return self.replaced.get(reference.seal_id, reference)


def export_bundle(
    store: ObjectStore,
    keyring: Keyring,
    cut_id: bytes,
    sink: Sink,
    signer: Ed25519PrivateKey | None = None,
    codec: Codec | None = None,
) -> Footer:
    """Write a cut as one bundle: one forward pass, no seek. Every tag is checked on the way.

    Where no reference is trimmed and no codec is named, the bundle is the one that was imported,
    byte for byte. Pin the cut where a collector may run meanwhile.

    Args:
        store: Where from.
        keyring: The tenant's keys.
        cut_id: Which cut.
        sink: Where the bytes go.
        signer: Signs the stored bytes, or None.
        codec: Seal the rows anew with it. None: every object keeps its bytes.

    Raises:
        NotStoredError: The cut, or a chunk of it, is not there.
        AuthenticationError: Something was changed. And everything that reading a cut raises.
    """
    reader = CutReader(store, keyring, cut_id)
    header, manifest = reader.cut.header, reader.cut.manifest
    key = keyring.get(header.tenant, header.epoch)
    writer = BundleWriter(sink, key, reader.cut.header_bytes, signer)
    recoder = _Recoder(keyring, header.tenant, reader.bindings, codec)
    reader.expect()
    for reference in manifest.references:
        writer.add(_exported(reader, keyring, reference, recoder))
    blob = reader.cut.manifest_blob
    if writer.references != manifest.references:
        whole = dataclasses.replace(manifest, references=writer.references)
        blob = seal_manifest(key, reader.cut.header_bytes, whole)
    return writer.finish(blob)


def _exported(
    reader: CutReader, keyring: Keyring, reference: ChunkReference, recoder: _Recoder
) -> bytes:
    """The object for a bundle: as stored, or its used rows sealed anew."""
    data = reader.object(reference)
    opened = reader.open_object(reference, data)
    if not reference.is_trimmed:
        return recoder.recoded(opened, data)
    header = reader.cut.header
    key = keyring.get(header.tenant, reference.epoch)
    context = SealContext(key, header.identity_digest, header.layout_digest, reference.aead)
    tile = trim_tile(header.layout, tile_of(header.layout, opened), reference.used_spec())
    return RowSealer(context, header.layout, recoder.codec_for(reference)).seal(tile).object
