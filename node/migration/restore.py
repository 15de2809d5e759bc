"""The taking end of a session that lies in a store: a transfer whose source is this node itself.

The store cannot push, so this node reads the cut and hands the pieces to its own
:class:`node.migration.target.Transfers`, under the store's name. So gate, probe, spool, the
compare-and-swap from the store's token, the swap and what a restart does about each are those of a
transfer from a node. What differs: every content id is recomputed on the way in, and what the
boundary call gave where the cut was made is read from the cut itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvpack.chunk import ChunkClass, ChunkReference, seal_component
from kvpack.errors import FormatError, KvpackError
from kvpack.keys import Keyring
from kvpack.store import (
    CutReader,
    Hold,
    HoldKind,
    ObjectStore,
    cuts_of,
    pinned_cut,
)
from kvpack.wire import encode_numerics
from node import fault_points
from node.directory import Directory, Ownership, OwnershipToken
from node.errors import (
    DirectoryAmbiguousError,
    InventoryError,
    SessionMovedError,
    SessionNotFoundError,
    SessionStateError,
)
from node.migration import versions, wire
from node.migration.admission import Target
from node.migration.inbound import Outcome
from node.migration.journal import TransferKey
from node.migration.messages import read_inventory, read_offer
from node.migration.orders import Patience
from node.migration.source import ASK_S
from node.migration.table import TargetState
from node.migration.target import Transfers
from node.migration.wire import Piece
from node.parked import Parked, store_owner
from node.pb.v1 import migration_pb2 as pb
from node.state import SessionState, decode_state
from node.stores import StoreRoots
from node.tier import lineage_of

#: Random low bits of a transfer's number. Two nodes that take one session out of one store would
#: else give the directory equal nonces, and each would take the other's write for its own.
_RANDOM_BITS: Final = 40


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """What is asked for.

    Attributes:
        session_id: The session's name when it was put into the store.
        place: The store's path on this machine.
        restore_as: A name of its own for what comes out; empty: the session itself.
        accept_compatible: A continuation that is not bit-exact will do.
    """

    session_id: str
    place: str
    restore_as: str = ""
    accept_compatible: bool = False

    @property
    def name(self) -> str:
        """The session's name on this node."""
        return self.restore_as or self.session_id


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of it."""

    identity: bytes
    cut_id: bytes
    objects: int
    object_bytes: int
    outcome: Outcome


class Restorer:
    """Takes sessions out of stores, one call at a time for each session.

    Args:
        target: This node.
        transfers: Its transfers.
        roots: Where stores may lie.
    """

    def __init__(self, target: Target, transfers: Transfers, roots: StoreRoots) -> None:
        self._target = target
        self._transfers = transfers
        self._roots = roots
        self._under_way: set[str] = set()
        self._numbering = asyncio.Lock()

    async def restore(self, order: RestoreOrder) -> Restored:
        """Bring a session to this node, or leave it where it lies.

        Raises:
            UsageError: The store may not be opened.
            SessionNotFoundError: The session does not lie in this store.
            NotStoredError: The cut, or a chunk of it, is gone.
            ConsentError: The numerics differ and nobody consented.
            StaleTokenError: Another node was faster.
            DirectoryAmbiguousError: Nobody knows yet; the directory's next answer settles it.
            KvpackError: The cut is refused, as a transfer from a node would be.
        """
        with self._one(order.name), contextlib.ExitStack() as stack:
            store = await asyncio.to_thread(stack.enter_context, self._roots.opened(order.place))
            stores = _Stored(self._target, self._roots, store, order)
            await stores.find()
            fault_points.reach("restore.found.after")
            restored = await self._transfer(stores, order)
            if not order.restore_as:
                fault_points.reach("restore.drop.before")
                await asyncio.to_thread(stores.let_go)
                fault_points.reach("restore.drop.after")
        return restored

    @contextlib.contextmanager
    def _one(self, session_id: str) -> Iterator[None]:
        if session_id in self._under_way:
            raise SessionStateError(f"session {session_id}: being restored already")
        self._under_way.add(session_id)
        try:
            yield
        finally:
            self._under_way.discard(session_id)

    async def _transfer(self, stores: _Stored, order: RestoreOrder) -> Restored:
        with contextlib.ExitStack() as stack:
            await asyncio.to_thread(stack.enter_context, stores.pinned())
            cut = await asyncio.to_thread(stores.open)
            key, minor = await self._prepare(cut, stores, order)
            try:
                await self._transfers.push(key, cut.pieces())
                seal = cut.seal_request(self._target)
                seal.protocol_minor = minor
                fault_points.reach("restore.seal.before")
                await self._transfers.seal(key, read_inventory(seal))
                fault_points.reach("restore.commit.before")
                outcome = await self._commit(key)
                fault_points.reach("restore.commit.after")
            except KvpackError:
                # What nobody knew is settled by it, and may be settled well.
                if await self._transfers.abort(key) is not TargetState.COMMITTED:
                    raise
                outcome = await self._transfers.commit(key)
        sizes = [reference.object_bytes for reference in cut.references]
        return Restored(stores.identity, stores.cut_id, len(sizes), sum(sizes), outcome)

    async def _prepare(
        self, cut: _Cut, stores: _Stored, order: RestoreOrder
    ) -> tuple[TransferKey, int]:
        """The transfer's name and the version of the protocol: this node's own, on both ends."""
        # One number after the other: of two the later one must not come to the ledger first.
        async with self._numbering:
            epoch = self._target.binding.key.epoch
            count = await self._target.journal.next_number(stores.owner, epoch)
            number = (count << _RANDOM_BITS) + secrets.randbits(_RANDOM_BITS)
            request = cut.prepare_request(order, wire.transfer_ref(epoch, number), stores.token)
            versions.state(request, self._target.speaker)
            offer = read_offer(request, stores.owner)
            inbound = await self._transfers.prepare(offer)
        return offer.key, inbound.minor

    async def _commit(self, key: TransferKey) -> Outcome:
        patience = Patience(ASK_S)
        while True:
            try:
                return await self._transfers.commit(key)
            except DirectoryAmbiguousError:
                if not patience.left():
                    raise
            await patience.wait()


class _Stored:
    """Where a session lies: which store, by which token, at which cut."""

    def __init__(
        self, target: Target, roots: StoreRoots, store: ObjectStore, order: RestoreOrder
    ) -> None:
        self._target = target
        self._roots = roots
        self._store = store
        self._order = order
        self._lineage = lineage_of(target.binding, order.session_id)
        self._moved: Sequence[Hold] = ()
        self.identity = b""
        self.owner = ""
        self.cut_id = b""
        self.token: OwnershipToken | None = None

    async def find(self) -> None:
        """Learn which cut it is.

        Raises:
            SessionNotFoundError: It does not lie in this store.
        """
        self.identity = await asyncio.to_thread(self._store.identity, secrets.token_bytes(16))
        self.owner = store_owner(self.identity)
        order, directory = self._order, self._target.sessions.directory
        entry = await directory.owner(order.session_id)
        if isinstance(entry, Ownership) and entry.node == self.owner:
            self.cut_id = await parked_cut(directory, entry, self.identity)
            self.token = None if order.restore_as else entry.token
            # Those of now: what lies here under its name later is another stay of it.
            self._moved = await asyncio.to_thread(self._holds, HoldKind.MOVED)
        elif order.restore_as:
            self.cut_id = await asyncio.to_thread(self._newest_copy)
        elif isinstance(entry, Ownership):
            raise SessionMovedError(order.session_id, entry.node, "")
        else:
            raise SessionNotFoundError(f"session {order.session_id}: nobody put it into a store")

    def pinned(self) -> contextlib.AbstractContextManager[None]:
        """Keep the cut while the block runs."""
        return pinned_cut(self._store, self.cut_id, self._roots.tools())

    def open(self) -> _Cut:
        """Read the manifest and the session chunk."""
        keyring = Keyring([self._target.binding.key])
        return _Cut(CutReader(self._store, keyring, self.cut_id))

    def let_go(self) -> None:
        """The session is this node's: nothing keeps the cut any more."""
        with contextlib.suppress(KvpackError):
            self._store.delete([hold.name for hold in self._moved])

    def _holds(self, kind: HoldKind) -> list[Hold]:
        return [hold for hold in cuts_of(self._store, self._lineage) if hold.kind is kind]

    def _newest_copy(self) -> bytes:
        holds = self._holds(HoldKind.IMPORT)
        if not holds:
            raise SessionNotFoundError(f"session {self._order.session_id}: no copy in this store")
        return max(holds, key=lambda hold: (hold.stamp, hold.position)).cut_id


class _Cut:
    """A cut on its way out of a store.

    Raises:
        InventoryError: It has no session chunk, or one without what its boundary call gave.
        KvpackError: Not authentic, of another tenant, damaged.
    """

    def __init__(self, reader: CutReader) -> None:
        self._reader = reader
        self.state = _session_state(reader)

    @property
    def references(self) -> tuple[ChunkReference, ...]:
        """Its chunks, in order."""
        return self._reader.cut.manifest.references

    def prepare_request(
        self, order: RestoreOrder, transfer: pb.TransferRef, token: OwnershipToken | None
    ) -> pb.PrepareRequest:
        """What the store would send."""
        manifest = self._reader.cut.manifest
        request = pb.PrepareRequest(
            transfer=transfer,
            session_id=order.name,
            mode=pb.MODE_COPY if token is None else pb.MODE_MOVE,
            pack_header=self._reader.cut.header_bytes,
            numerics=encode_numerics(manifest.numerics),
            position=manifest.position,
            accept_compatible=order.accept_compatible,
        )
        if token is not None:
            request.token.CopyFrom(wire.token_message(token))
        return request

    async def pieces(self) -> AsyncIterator[Piece]:
        """Every object, after its tag was checked and its content id recomputed."""
        self._reader.expect()
        for reference in self.references:
            yield memoryview(await asyncio.to_thread(self._checked, reference))
            fault_points.reach("restore.piece.read")

    def _checked(self, reference: ChunkReference) -> bytes:
        if reference.is_trimmed:
            raise FormatError("cut.references", "whole chunks", "a part of one")
        data = self._reader.object(reference)
        self._reader.open_object(reference, data, deep=True)
        return data

    def seal_request(self, target: Target) -> pb.SealRequest:
        """The end marker: the stored manifest, and what the boundary call gave."""
        manifest, state, logits = self._reader.cut.manifest, self.state, b""
        if state.boundary_logits:
            logits = seal_component(
                target.binding.context, ChunkClass.FINAL_LOGITS, manifest.position, 1,
                state.boundary_logits,
            ).object  # fmt: skip
        return pb.SealRequest(
            manifest=self._reader.cut.manifest_blob,
            objects=len(self.references),
            object_bytes=sum(reference.object_bytes for reference in self.references),
            boundary_digest=state.boundary_digest,
            boundary_logits=logits,
        )


def _session_state(reader: CutReader) -> SessionState:
    for reference in reader.references(ChunkClass.SESSION):
        state = decode_state(reader.open(reference, deep=True).plaintext)
        if not state.boundary_digest:
            raise InventoryError("cut: nothing of its boundary call, so nothing to probe against")
        return state
    raise InventoryError("cut: no session chunk")


async def parked_cut(directory: Directory, entry: Ownership, identity: bytes) -> bytes:
    """The cut that a session is which lies in the store of that identity.

    The entry decides: its nonce is drawn from the cut. The value beside it only names the cut.

    Raises:
        SessionStateError: The value is gone, or names another cut than the entry was written for.
    """
    published = await directory.published(entry.session_id)
    if published is not None:
        with contextlib.suppress(KvpackError):
            parked = Parked.decode(published.value)
            if parked.identity == identity and parked.nonce(entry.session_id) == entry.nonce:
                return parked.cut_id
    raise SessionStateError(f"session {entry.session_id}: the directory does not say at which cut")
