"""A store's half of a move into it: chunks under an intent, then the cut with its hold.

A store has no process of its own, so the source does this itself, on worker threads.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Final

from kvpack.chunk import ChunkReference, SealedChunk
from kvpack.errors import KvpackError
from kvpack.keys import Keyring
from kvpack.manifest import manifest_id
from kvpack.store import CutWriter, Hold, HoldKind, ObjectStore, cuts_of, held
from node.binding import PackBinding
from node.stores import StoreRoots
from node.tier import lineage_of

#: Chunks that are sealed before they are written: one renewal of the intent for all of them.
BATCH_BYTES: Final = 8 << 20


class Shelf:
    """Where one cut of one session goes. Blocking; one call at a time.

    Args:
        roots: Where stores may lie.
        binding: What this node's packs are bound to.
        place: The store's path.
        session_id: Whose cut.
        moves: The session itself goes there: no collector may ever take the cut.

    Raises:
        UsageError: The store may not be opened.
        KvpackError: It cannot be.
    """

    def __init__(
        self, roots: StoreRoots, binding: PackBinding, place: str, session_id: str, *, moves: bool
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._lineage = lineage_of(binding, session_id)
        self._kind = HoldKind.MOVED if moves else HoldKind.IMPORT
        self._batch: list[SealedChunk] = []
        self._batch_bytes = 0
        self._references: list[ChunkReference] = []
        self._cut_id = b""
        self._published = False
        self.written_bytes = 0
        with contextlib.ExitStack() as stack:
            self._store: ObjectStore = stack.enter_context(roots.opened(place, create=True))
            self.identity = self._store.identity(secrets.token_bytes(16))
            self._older = self._moved_here()
            self._writer = CutWriter(
                self._store, Keyring([binding.key]), binding.header_bytes, roots.tools()
            )
            self._stack = stack.pop_all()

    @property
    def references(self) -> tuple[ChunkReference, ...]:
        """All chunks so far, in order."""
        return tuple(self._references)

    def reserve(self, needed_bytes: int) -> None:
        """Make sure of room.

        Raises:
            StoreFullError: There is none.
        """
        self._writer.reserve(needed_bytes)

    def add(self, chunk: SealedChunk) -> None:
        """Take one chunk. It is stored by :meth:`flush` at the latest.

        Raises:
            KvpackError: The store refuses.
        """
        self._references.append(chunk.reference)
        self._batch.append(chunk)
        self._batch_bytes += len(chunk.object)
        if self._batch_bytes >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Store what was taken; durable on return.

        Raises:
            KvpackError: The store refuses.
        """
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        present = held(self._store, [chunk.reference for chunk in batch])
        self._writer.add(batch)
        self.written_bytes += sum(
            len(chunk.object) for chunk, there in zip(batch, present, strict=True) if not there
        )

    def publish(self, manifest_blob: bytes) -> bytes:
        """Publish the cut, which nobody may take from now on. Returns its id; durable.

        Raises:
            KvpackError: The store refuses.
        """
        self._cut_id = manifest_id(manifest_blob)
        self._writer.publish_sealed(manifest_blob, self._lineage, self._kind)
        self._published = True
        return self._cut_id

    def settle(self) -> None:
        """The session is the store's: what attempts before this one left may go."""
        self._drop([hold for hold in self._older if hold.cut_id != self._cut_id])

    def forget(self) -> None:
        """The session is not the store's, and by this attempt never will be: let the cut go."""
        # Whatever fails here leaves an intent, which expires, or a hold, which the session's next
        # stay in this store removes.
        with contextlib.suppress(KvpackError):
            if not self._published:
                self._writer.abandon()
            self._drop([hold for hold in self._moved_here() if hold.cut_id == self._cut_id])

    def close(self) -> None:
        """End the intent and let go of the store."""
        with self._stack, contextlib.suppress(KvpackError):
            self._writer.close()

    def _moved_here(self) -> list[Hold]:
        return [hold for hold in cuts_of(self._store, self._lineage) if hold.kind is HoldKind.MOVED]

    def _drop(self, holds: Sequence[Hold]) -> None:
        with contextlib.suppress(KvpackError):
            self._store.delete([hold.name for hold in holds])
