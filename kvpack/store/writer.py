"""Writing cuts: chunks first, then the cut, and an intent around everything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, TypeVar

from kvpack.chunk import ChunkReference, SealedChunk, parse_chunk, parse_object
from kvpack.chunk.open import check_seal_id, decrypt
from kvpack.errors import KvpackError, LayoutMismatchError
from kvpack.header import decode_header, parse_prefix
from kvpack.keys import Keyring
from kvpack.manifest import Manifest, manifest_id, open_manifest, seal_manifest
from kvpack.store import names
from kvpack.store.budget import Budget, measure, require_room
from kvpack.store.chain import read_chains
from kvpack.store.cut import join_cut
from kvpack.store.errors import ConflictError
from kvpack.store.index import index_names
from kvpack.store.intent import Intent, end, pin, publish, rely
from kvpack.store.interface import ObjectData, ObjectStore
from kvpack.store.names import Hold, HoldKind
from kvpack.store.steps import Steps, delete, drive, put
from kvpack.store.sweep import discard

#: How long an intent lives without a renewal. Every call of a writer renews it.
INTENT_S: Final = 900

#: Chunks that are written between two renewals: what a writer holds in memory at a time.
BATCH_BYTES: Final = 16 << 20

_PAUSES_MAX: Final = 600

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class WriterTools:
    """What a writer may not draw by itself.

    Attributes:
        writer_id: 16 random bytes, used once.
        clock: Seconds since 1970.
        pause: Waits for a moment: a collector may be at work on what is needed.
        budget: What the store may take.
        intent_s: How long the intent lives without a renewal.
        pauses_max: How many pauses before :class:`StoreBusyError`.
    """

    writer_id: bytes
    clock: Callable[[], float]
    pause: Callable[[], None]
    budget: Budget = field(default_factory=Budget)
    intent_s: int = INTENT_S
    pauses_max: int = _PAUSES_MAX


class CutWriter:
    """Writes cuts of one session. A context manager: on an error nothing of it stays behind.

    Args:
        store: Where to.
        keyring: Holds the keys of the header's tenant.
        header_bytes: The pack header of every cut.
        tools: Clock, random bytes and budget.
        peer_cut: For chunks that a peer sent and nobody has recomputed yet: the id of the one cut
            that they may serve. None for chunks that this node sealed or recomputed.

    Raises:
        UnknownKeyError: No key for the header's tenant and epoch.
        FormatError: Not a header; also VersionError, LimitError.
    """

    def __init__(
        self,
        store: ObjectStore,
        keyring: Keyring,
        header_bytes: bytes,
        tools: WriterTools,
        peer_cut: bytes | None = None,
    ) -> None:
        prefix = parse_prefix(header_bytes)
        self._tenant = prefix.tenant
        self._key = keyring.get(prefix.tenant, prefix.epoch)
        self._store = store
        self._keyring = keyring
        self._header = header_bytes
        self._tools = tools
        self._peer_cut = peer_cut
        self._intent = Intent(tools.writer_id)
        self._allowance_bytes = 0
        self._created: list[str] = []
        self._located: dict[bytes, str] = {}

    def __enter__(self) -> CutWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            # What went wrong first says more than what then went wrong with clearing up.
            with contextlib.suppress(KvpackError):
                self.abandon()

    def reserve(self, needed_bytes: int) -> None:
        """Make sure of room for ``needed_bytes``, and let other writers know that it is taken.

        Raises:
            StoreFullError: There is no room. Nothing was written.
        """
        self._require_room(needed_bytes)
        self._allowance_bytes = needed_bytes
        self.renew()

    def add(self, chunks: Iterable[bytes | SealedChunk]) -> tuple[ChunkReference, ...]:
        """Store chunk objects; a chunk that is there already costs no room.

        Raises:
            FormatError: Not a chunk object; also LimitError, VersionError.
            ConflictError: Another authentic object has the same name: its sealer lied.
            IntentLostError: The intent expired; begin again with a new writer.
            StoreBusyError: A collector is at work on one of them; call again.
            StoreFullError: No room; also PublishError.
        """
        references: list[ChunkReference] = []
        batch: dict[bytes, bytes] = {}
        for chunk in chunks:
            data = chunk.object if isinstance(chunk, SealedChunk) else chunk
            references.append(parse_chunk(data))
            batch[references[-1].seal_id] = data
            if sum(map(len, batch.values())) >= BATCH_BYTES:
                self._store_batch(batch)
                batch = {}
        self._store_batch(batch)
        return tuple(references)

    def rely(self, references: Iterable[ChunkReference]) -> None:
        """Rely on chunks that are in the store already, and that this node vouches for.

        Raises:
            NotStoredError: Names the first that is not there.
            IntentLostError: The intent expired. StoreBusyError: call again.
        """
        wanted = {ref.seal_id: names.chunk_name(ref.seal_id) for ref in references}
        steps = rely(self._intent, tuple(wanted.values()), *self._terms())
        self._drive(steps)
        self._located.update(wanted)

    def renew(self) -> None:
        """Let the intent live longer. Every other call does so too.

        Raises:
            IntentLostError: It had expired and was closed.
        """
        self._pin(())

    def publish(
        self,
        manifest: Manifest,
        lineage: bytes,
        kind: HoldKind,
        indexed_ids: Sequence[int] | None = None,
    ) -> bytes:
        """Publish a cut whose chunks were all added or relied on. Returns its id.

        Args:
            manifest: The cut. References may be trimmed.
            lineage: 16 bytes: which session.
            kind: Why it is made.
            indexed_ids: All ids of the cut, if other sessions may start from it; None if not.
                Rows that a peer sent never get into the index.

        Raises:
            FormatError: The manifest does not describe one whole state; also LimitError,
                LayoutMismatchError, IdentityMismatchError.
            NotStoredError: A chunk is missing.
            RuntimeError: A chunk was neither added nor relied on.
            IntentLostError: The intent expired. StoreBusyError: call again.
            StoreFullError: No room; also PublishError.
        """
        blob = seal_manifest(self._key, self._header, manifest, in_store=True)
        return self.publish_sealed(blob, lineage, kind, indexed_ids)

    def publish_sealed(
        self,
        manifest_blob: bytes,
        lineage: bytes,
        kind: HoldKind,
        indexed_ids: Sequence[int] | None = None,
    ) -> bytes:
        """The same for a manifest that is sealed already, here or by a peer."""
        if self._peer_cut is not None and indexed_ids is not None:
            raise RuntimeError("rows that a peer sent serve its own session and nobody else")
        manifest = open_manifest(self._key, self._header, manifest_blob, in_store=True)
        cut_id = manifest_id(manifest_blob)
        now = int(self._tools.clock())
        hold = Hold(now, manifest.position, lineage, kind, cut_id)
        if not all(reference.seal_id in self._located for reference in manifest.references):
            raise RuntimeError("a cut refers to a chunk that was neither added nor relied on")
        chunks = [self._located[reference.seal_id] for reference in manifest.references]
        data = join_cut(self._header, manifest_blob)
        self._allow(len(data))
        completions = (hold.name, *self._index_names(manifest, indexed_ids, cut_id))
        expires, _, pauses_max = self._terms()
        self._drive(publish(self._intent, chunks, data, completions, expires, pauses_max))
        self._created = []
        return cut_id

    def _index_names(
        self, manifest: Manifest, indexed_ids: Sequence[int] | None, cut_id: bytes
    ) -> list[str]:
        if indexed_ids is None:
            return []
        if len(indexed_ids) != manifest.position:
            raise LayoutMismatchError("indexed_ids", f"{manifest.position} ids", len(indexed_ids))
        return index_names(self._key, decode_header(self._header), indexed_ids, cut_id)

    def close(self) -> None:
        """End the intent: nothing is relied on any more."""
        self._drive(end(self._intent))

    def abandon(self) -> None:
        """End the intent and delete what was added since the last cut and serves nobody else."""
        self.close()
        if self._created:
            discard(self._store, self._created, self._tools.writer_id, self._tools.pause)
            self._created = []

    def _store_batch(self, objects: dict[bytes, bytes]) -> None:
        """Store objects by their seal ids."""
        if not objects:
            return
        self._allow(sum(map(len, objects.values())))
        located = {seal_id: names.chunk_name(seal_id) for seal_id in objects}
        if self._peer_cut is not None:
            self._pin(located.values())
            for seal_id, data in objects.items():
                # Ours and of the same bytes: then it does not matter who sent it.
                if not self._is_stored(located[seal_id], data):
                    located[seal_id] = names.peer_name(self._peer_cut, seal_id)
        batch = [ObjectData(located[seal_id], data) for seal_id, data in objects.items()]
        self._pin(item.name for item in batch)
        # What is there already is not ours to clear away, should this go wrong half way.
        present = self._store.stat([item.name for item in batch])
        new = [item.name for item, found in zip(batch, present, strict=True) if found is None]
        self._created.extend(new)
        try:
            self._drive(put(batch))
        except ConflictError:
            self._drive(self._put_each(batch))
        self._located.update(located)

    def _is_stored(self, name: str, data: bytes) -> bool:
        try:
            return self._store.get(name) == data
        except KvpackError:
            return False

    def _put_each(self, batch: Sequence[ObjectData]) -> Steps[None]:
        """Store one by one; a damaged object that is in the way is replaced.

        Equal ids mean equal bytes, so what differs and does not open is damage, and our bytes heal
        every cut that needs them. What differs and does open was sealed by a liar.
        """
        for item in batch:
            try:
                yield from put([item])
            except ConflictError:
                if self._opens(item.name):
                    raise
                yield from delete([item.name], 1)
                yield from put([item])

    def _opens(self, name: str) -> bool:
        try:
            data = self._store.get(name)
            header = parse_object(data)
            key = self._keyring.get(self._tenant, header.reference.epoch)
            check_seal_id(key, header, name)
            decrypt(key, header, memoryview(data), name)
        except KvpackError:
            return False
        return True

    def _pin(self, wanted: Iterable[str]) -> None:
        self._drive(pin(self._intent, wanted, *self._terms()))

    def _terms(self) -> tuple[int, int, int]:
        """When a record expires, what is still to write, and how long to wait for a collector."""
        tools = self._tools
        return int(tools.clock()) + tools.intent_s, self._allowance_bytes, tools.pauses_max

    def _allow(self, needed_bytes: int) -> None:
        """Take ``needed_bytes`` from what was reserved, or ask for room."""
        if needed_bytes > self._allowance_bytes:
            self._require_room(needed_bytes)
            self._allowance_bytes = needed_bytes
        self._allowance_bytes -= needed_bytes

    def _require_room(self, needed_bytes: int) -> None:
        chains = [
            chain for chain in self._drive(read_chains())
            if chain.writer_id != self._tools.writer_id
        ]  # fmt: skip
        usage = measure(self._store, chains, int(self._tools.clock()))
        require_room(self._store.place, usage, self._tools.budget, needed_bytes)

    def _drive(self, steps: Steps[_Result]) -> _Result:
        return drive(self._store, steps, self._tools.pause)
