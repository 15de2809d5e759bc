"""The giving end of a move or copy into a store. States and events are those of any source.

A store has no process, so its half runs here, too (:mod:`node.migration.shelf`), and so does the
one compare-and-swap, which makes the store the session's owner. As towards a node, a failure before
the freeze only ends the move, and one after it is settled by the directory alone: whoever reads
there that this node still owns the session raises the revision before it serves, so a write that
is still under way fails.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpack.chunk import ChunkClass
from kvpack.errors import KvpackError
from kvpack.layout import LayerKind
from node import fault_points
from node.directory import (
    NONCE_BYTES,
    Directory,
    Ownership,
    OwnershipToken,
    Whose,
    transfer_settled,
    whose,
)
from node.errors import DirectoryError, StaleTokenError, TransferFailedError
from node.migration.orders import WAIT_FIRST_S, WAIT_MOST_S, Source
from node.migration.shelf import Shelf
from node.migration.table import COPY, SOURCE, Machine, SourceEffect, SourceEvent, SourceState
from node.packs import manifest_blob
from node.parked import Parked, store_owner
from node.save import HeldCut, chunks_of, cut_now
from node.session import Phase, Session
from node.state import encode_state, with_boundary
from node.stores import StoreRoots

if TYPE_CHECKING:
    from engine import Logits

log = logging.getLogger(__name__)

#: What a chunk takes beside its plaintext, at most: header, layers, tag.
_CHUNK_OVERHEAD_BYTES: Final = 2048


@dataclass(frozen=True, slots=True)
class ParkOrder:
    """What is asked for.

    Attributes:
        place: The store's path on this machine.
        copy: The session also goes on where it is.
    """

    place: str
    copy: bool = False


@dataclass(frozen=True, slots=True)
class ParkedSession:
    """What came of it.

    Attributes:
        parked: Which cut in which store.
        objects: Chunks of the cut.
        object_bytes: Their bytes.
        written_bytes: Of them, those that the store did not have.
        token: What the store owns the session by; None for a copy.
    """

    parked: Parked
    objects: int
    object_bytes: int
    written_bytes: int
    token: OwnershipToken | None


class Park:
    """One session on its way into one store. ``run`` is called once; the caller holds the session.

    Args:
        source: This node.
        roots: Where stores may lie.
        session: The session, without a backlog.
        order: What is asked for.
    """

    def __init__(
        self, source: Source, roots: StoreRoots, session: Session, order: ParkOrder
    ) -> None:
        self._source = source
        self._roots = roots
        self._session = session
        self._order = order
        self._machine = Machine(COPY if order.copy else SOURCE, SourceState.IDLE)
        self._token = session.token
        self._wait_s = WAIT_FIRST_S
        self._failure: KvpackError | None = None
        self._shelf: Shelf | None = None
        self._cut: HeldCut | None = None
        self._parked: Parked | None = None
        self._stores: OwnershipToken | None = None
        self._effects: Mapping[SourceEffect, Callable[[], Awaitable[SourceEvent | None]]] = {
            SourceEffect.PREPARE: self._prepare,
            SourceEffect.STREAM: self._stream,
            SourceEffect.SEAL: self._seal,
            SourceEffect.COMMIT: self._commit,
            SourceEffect.READ_OWNER: self._read_owner,
            SourceEffect.RAISE: self._raise,
            SourceEffect.WAIT: self._wait,
            SourceEffect.ABORT: self._abort,
            SourceEffect.THAW: self._thaw,
            SourceEffect.RELEASE: self._release,
            SourceEffect.FINISH: self._finish,
        }

    @property
    def state(self) -> SourceState:
        """Where it stands."""
        return self._machine.state

    async def run(self) -> ParkedSession:
        """Put the session into the store, or leave it serving here.

        Raises:
            TransferFailedError: The session stayed, or is another node's; says which.
        """
        name = self._session.session_id
        try:
            event: SourceEvent | None = SourceEvent.START
            while event is not None:
                effect = self._machine.on(event)
                log.info("session %s into a store: %s", name, self._machine.state.value)
                event = await self._effects[effect]()
        finally:
            if self._shelf is not None:
                await asyncio.to_thread(self._shelf.close)
        return self._outcome()

    def _outcome(self) -> ParkedSession:
        ended, shelf = self._machine.state, self._shelf
        parked = ended is SourceState.COPIED or self._stores is not None
        if parked and self._parked is not None and shelf is not None:
            sizes = [reference.object_bytes for reference in shelf.references]
            return ParkedSession(
                self._parked, len(sizes), sum(sizes), shelf.written_bytes, self._stores
            )
        stays = "is another node's" if ended is SourceState.RELEASED else "stays on this node"
        raise TransferFailedError(f"{self._failure}; the session {stays}") from self._failure

    async def _prepare(self) -> SourceEvent:
        try:
            self._cut = await cut_now(self._source.engine, self._source.binding, self._session)
            await asyncio.to_thread(self._open, self._cut)
            fault_points.reach("park.opened.after")
        except KvpackError as error:
            return self._failed(error, SourceEvent.PREPARE_FAILED)
        return SourceEvent.PREPARED

    def _open(self, cut: HeldCut) -> None:
        order, binding, name = self._order, self._source.binding, self._session.session_id
        self._shelf = Shelf(self._roots, binding, order.place, name, moves=not order.copy)
        rows = sum(binding.layout.state_bytes(kind, cut.position) for kind in LayerKind)
        states = sum(map(len, cut.states.values())) + 4 * self._source.engine.model.vocab_size
        chunks = _CHUNK_OVERHEAD_BYTES * len(cut.tape.items)
        self._shelf.reserve(rows + 4 * cut.position + states + chunks)

    async def _stream(self) -> SourceEvent:
        """The boundary call, then every chunk. The session could serve on as it is."""
        cut, shelf = self._require_cut(), self._require_shelf()
        try:
            decoded = await self._source.engine.call(self._session.decode_next)
            if decoded.logits is None:
                raise RuntimeError("a boundary call without logits")
            cut = self._cut = self._with_boundary(cut, decoded.logits)
            async for chunk in chunks_of(self._source.engine, self._source.binding, cut):
                await asyncio.to_thread(shelf.add, chunk)
                fault_points.reach("park.chunk.added")
            await asyncio.to_thread(shelf.flush)
            fault_points.reach("park.flush.after")
        except KvpackError as error:
            return self._failed(error, SourceEvent.PUSH_FAILED)
        return SourceEvent.PUSHED

    def _with_boundary(self, cut: HeldCut, logits: Logits) -> HeldCut:
        """A store cannot be asked: what this node's boundary call gave lies with the cut."""
        state = with_boundary(self._session.state(cut.position), logits.digest(), logits.data)
        states = {**cut.states, ChunkClass.SESSION: encode_state(state)}
        return dataclasses.replace(cut, states=states)

    async def _seal(self) -> SourceEvent:
        cut, shelf, binding = self._require_cut(), self._require_shelf(), self._source.binding
        if not self._order.copy:
            self._session.phase = Phase.FROZEN
        mixed = cut.generation.is_mixed
        blob = manifest_blob(binding, cut.position, cut.schedule, shelf.references, mixed=mixed)
        try:
            fault_points.reach("park.publish.before")
            cut_id = await asyncio.to_thread(shelf.publish, blob)
            fault_points.reach("park.publish.after")
        except KvpackError as error:
            return self._failed(error, SourceEvent.SEAL_FAILED)
        self._parked = Parked(shelf.identity, cut_id, cut.position, self._order.place)
        return SourceEvent.SEALED

    async def _commit(self) -> SourceEvent:
        """The commit point. What is put before it names the cut, for people and for a restart."""
        if self._order.copy:
            return SourceEvent.COMMIT_ANSWERED
        directory, parked, name = self._directory, self._require_parked(), self._session.session_id
        try:
            fault_points.reach("park.put.before")
            await directory.put(name, self._token, parked.encode())
            fault_points.reach("park.put.after")
            self._stores = await transfer_settled(
                directory, name, self._token, store_owner(parked.identity), parked.nonce(name)
            )
            fault_points.reach("park.cas.after")
        except (DirectoryError, StaleTokenError) as error:
            return self._failed(error, SourceEvent.COMMIT_FAILED)
        return SourceEvent.COMMIT_ANSWERED

    async def _read_owner(self) -> SourceEvent:
        sessions, name = self._source.sessions, self._session.session_id
        try:
            entry = await sessions.directory.owner(name)
        except DirectoryError as error:
            return self._failed(error, SourceEvent.DIRECTORY_DOWN)
        fault_points.reach("park.owner.after")
        standing = whose(entry, sessions.node, self._token)
        if standing is Whose.UNKNOWN or entry is None:
            # As towards a node: a directory that was restored or lost may yet name us.
            unknown = DirectoryError(
                f"session {name}: the directory does not know the session, or is older than our "
                "token; frozen until it names an owner"
            )
            return self._failed(unknown, SourceEvent.DIRECTORY_DOWN)
        if standing is Whose.OTHERS:
            if isinstance(entry, Ownership) and self._is_ours(entry):
                self._stores = entry.token
            return SourceEvent.OWNER_OTHER
        self._token = entry.token
        return SourceEvent.OWNER_SELF

    def _is_ours(self, entry: Ownership) -> bool:
        """Whether ``entry`` is this very move, whose answer may have been lost."""
        parked = self._parked
        return (
            parked is not None
            and entry.node == store_owner(parked.identity)
            and entry.nonce == parked.nonce(self._session.session_id)
        )

    async def _raise(self) -> SourceEvent:
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            self._session.token = await self._directory.transfer(
                self._session.session_id, self._token, self._source.sessions.node, nonce
            )
        except StaleTokenError:
            return SourceEvent.RAISE_LOST
        except DirectoryError as error:
            return self._failed(error, SourceEvent.DIRECTORY_DOWN)
        return SourceEvent.RAISED

    async def _wait(self) -> SourceEvent:
        await asyncio.sleep(self._wait_s)
        self._wait_s = min(WAIT_MOST_S, 2 * self._wait_s)
        return await self._read_owner()

    async def _thaw(self) -> None:
        self._session.phase = Phase.ACTIVE
        await self._abort()

    async def _abort(self) -> None:
        if self._shelf is not None:
            await asyncio.to_thread(self._shelf.forget)

    async def _release(self) -> None:
        fault_points.reach("park.release.before")
        await self._source.sessions.drop(self._session)
        fault_points.reach("park.release.after")
        shelf = self._require_shelf()
        # What somebody took out of the store already he holds himself.
        await asyncio.to_thread(shelf.forget if self._stores is None else shelf.settle)

    async def _finish(self) -> None:
        log.info("session %s: a copy of it lies in a store", self._session.session_id)

    @property
    def _directory(self) -> Directory:
        return self._source.sessions.directory

    def _require_shelf(self) -> Shelf:
        if self._shelf is None:
            raise RuntimeError("no store is open")
        return self._shelf

    def _require_cut(self) -> HeldCut:
        if self._cut is None:
            raise RuntimeError("there is no cut yet")
        return self._cut

    def _require_parked(self) -> Parked:
        if self._parked is None:
            raise RuntimeError("nothing is published yet")
        return self._parked

    def _failed(self, error: KvpackError, event: SourceEvent) -> SourceEvent:
        log.warning("session %s into a store: %s: %s", self._session.session_id, event.value, error)
        self._failure = self._failure or error
        return event
