"""The ladder itself: where a prompt may begin, and who keeps what grows from there."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from kvpack.errors import KvpackError
from kvpack.store import Budget, HoldKind, NotStoredError, cuts_of
from node.economics.values import Tier
from node.errors import ConsentError, NodeBusyError, SessionStateError
from node.pace import CALL_TOKENS
from node.packs import state_bytes
from node.serving.ladder.accounts import Accounts
from node.serving.ladder.capture import Reuse
from node.serving.ladder.keeper import Keeper
from node.serving.ladder.line import CutGrid, Line, Sealed
from node.serving.ladder.lineages import Lineages
from node.serving.ladder.lookup import Found, find
from node.serving.ladder.pace import Pace
from node.serving.ladder.resident import Resident
from node.serving.ladder.restore import RestoredRows, Restoring
from node.serving.ladder.trail import RowTrail
from node.serving.ladder.woken import (
    SessionText,
    Woken,
    is_session_cut,
    read_session,
    require_same_numerics,
)
from node.serving.order import MissReason, Rung
from node.serving.reuse import Base, ForeignTrail, Trail
from node.session import Session
from node.tier import lineage_of

if TYPE_CHECKING:
    from kvpack.store import CutReader, ObjectStore
    from node.binding import PackBinding
    from node.economics.book import Book
    from node.engine_thread import EngineThread
    from node.stream import Stream

log = logging.getLogger(__name__)

#: Plaintext of chunks that stays in memory: two thirds of a window set of the reference geometry
#: and some thousand tokens of its full layers.
RESIDENT_BYTES: Final = 256 << 20

#: Cuts that are tried one after the other where one cannot be read.
TRIES_MAX: Final = 4

#: Threads that look into the store for answers: each slot's, and that of a session that wakes.
READERS: Final = 6

#: How long an answer waits for the store to say where it may begin.
FIND_S: Final = 5.0

#: How long a stopping node goes on making cuts durable.
DRAIN_S: Final = 10.0


class RowLadder:
    """A :class:`node.serving.reuse.Ladder` over one store and one model.

    Args:
        engine: The model.
        bindings: What a tenant's packs are bound to.
        store: Where cuts lie.
        budget: What it may take.
        resident_bytes: Plaintext of chunks that stays in memory.
        busy: Whether answers are being made, so that the background holds back; None: while
            somebody decodes.
        book: Where measured times go; None: nowhere.

    Attributes:
        accounts: What is counted.
        book: The same.
    """

    def __init__(
        self,
        engine: EngineThread,
        bindings: Callable[[str], PackBinding],
        store: ObjectStore,
        budget: Budget | None = None,
        resident_bytes: int = RESIDENT_BYTES,
        busy: Callable[[], bool] | None = None,
        book: Book | None = None,
    ) -> None:
        self._engine = engine
        self._bindings = bindings
        self._store = store
        self.accounts = Accounts()
        self.book = book
        self._resident = Resident(resident_bytes)
        # Of its own: a store that hangs must not take the threads of records and directory.
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="cuts")
        self._is_closed = False
        self._lineages = Lineages()
        self._keeper = Keeper(
            store, budget or Budget(), self._resident,
            Pace(engine, self._somebody_decodes if busy is None else busy),
            self._lineages, self.accounts, book,
        )  # fmt: skip

    def _somebody_decodes(self) -> bool:
        return self._engine.pace.grid_tokens() < CALL_TOKENS

    @property
    def pending(self) -> int:
        """Cuts that are not durable yet."""
        return self._keeper.pending

    @property
    def pending_bytes(self) -> int:
        """What they hold in memory."""
        return self._keeper.waiting_bytes

    @property
    def resident_bytes(self) -> int:
        """Plaintext of chunks in memory."""
        return self._resident.used_bytes

    def start(self) -> None:
        """Begin to keep cuts."""
        self._keeper.start()

    async def settled(self) -> None:
        """Return once all cuts are durable or given up."""
        await self._keeper.settled()

    async def collect(self) -> None:
        """Collect garbage now.

        Raises:
            StoreBusyError: Another process does.
            KvpackError: It cannot be told what is in use, or the volume refuses.
        """
        await self._keeper.collect()

    async def close(self, drain_s: float = DRAIN_S) -> None:
        """Make durable what waits, for so many seconds at most, and stop."""
        await self._keeper.close(drain_s)
        self._is_closed = True
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._resident.clear()

    async def begin(
        self, tenant: str, token_ids: Sequence[int], *, reuse: bool = True, above: int = 0
    ) -> Base:
        """See :class:`node.serving.reuse.Ladder`."""
        if self._is_closed:
            base = await self._empty(MissReason.COLD)
        elif reuse:
            base = await self._deepest(self._bindings(tenant), tuple(token_ids), above)
        else:
            base = await self._empty(MissReason.DISABLED)
        # Where the caller holds more than the store, it goes on in what it holds.
        goes_on = base.rung is Rung.NONE and above > 0 and reuse
        self.accounts.began(Rung.CURRENT if goes_on else base.rung, base.miss)
        return base

    def trail(self, tenant: str, stream: Stream, base: Base | None) -> Trail:
        """See :class:`node.serving.reuse.Ladder`. Rows of another build's numerics are not kept."""
        if stream.generation.is_mixed or (base is not None and not base.exact):
            return ForeignTrail()
        return self._trail(tenant, stream, base)

    def _trail(self, tenant: str, stream: Stream, base: Base | None) -> RowTrail:
        binding = self._bindings(tenant)
        grid = base.grid if base is not None and isinstance(base.grid, CutGrid) else None
        sealed, cut_id = (Sealed(), b"") if grid is None else (grid.sealed, grid.cut_id)
        if isinstance(stream, Session):
            # A session's cuts are found by its name, and nobody else's text grows among them.
            lineage, ended = lineage_of(binding, stream.session_id), _nothing
        else:
            lineage = self._lineages.take(binding, b"" if base is None else base.lineage)
            ended = functools.partial(self._lineages.give_back, lineage)
        line = Line(binding, lineage, sealed, cut_id)
        return RowTrail(self._engine, self._keeper, stream, line, ended)

    async def keep_session(
        self, tenant: str, session: Session, kind: HoldKind = HoldKind.TURN
    ) -> bytes:
        """A cut from which the session can be woken; durable on return.

        The caller holds the session, which has no backlog. Its rings are copied first; the hold may
        end only when this returns.

        Returns:
            The cut's id.

        Raises:
            SessionStateError: Nothing is computed, or a backlog is left.
            NodeBusyError: Too many cuts wait, or the node stops.
            ConsentError: Its rows are mixed: no answer could begin from such a cut.
            KvpackError: The store refuses.
        """
        position = session.position
        if session.generation.is_mixed:
            raise ConsentError(f"session {session.session_id}: its rows are another build's")
        if not 0 < position < session.next_index:
            raise SessionStateError(
                f"session {session.session_id}: nothing to keep: {position} tokens are computed"
            )
        trail = self._trail_of(tenant, session)
        return await trail.keep(kind, state_bytes(session, position))

    def _trail_of(self, tenant: str, session: Session) -> RowTrail:
        """The session's trail, under its own name: one that was rebuilt has that of its staging."""
        trail, lineage = session.trail, lineage_of(self._bindings(tenant), session.session_id)
        if not isinstance(trail, RowTrail) or trail.has_ended:
            trail = self._trail(tenant, session, None)
        elif trail.line.lineage != lineage:
            sealed, cut_id = trail.line.sealed, trail.line.cut_id
            trail.end()
            line = Line(self._bindings(tenant), lineage, sealed, cut_id)
            trail = RowTrail(self._engine, self._keeper, session, line, _nothing)
        session.trail = trail
        return trail

    async def newest_cut(self, tenant: str, session_id: str) -> bytes | None:
        """The deepest cut that the session can be woken from; None: there is none.

        Raises:
            StoreError: The store cannot be read.
        """
        return await asyncio.to_thread(self._newest_cut, self._bindings(tenant), session_id)

    def _newest_cut(self, binding: PackBinding, session_id: str) -> bytes | None:
        for hold in cuts_of(self._store, lineage_of(binding, session_id)):
            if is_session_cut(self._store, binding, hold.cut_id):
                return hold.cut_id
        return None

    async def read_session(self, tenant: str, cut_id: bytes) -> SessionText:
        """A session's tokens and state without its rows: enough to compute it anew.

        Raises:
            NotStoredError: The cut, or a chunk of it, is gone.
            InventoryError: It is no session's cut.
            KvpackError: It is damaged, or another tenant's.
        """
        return await asyncio.to_thread(read_session, self._store, self._bindings(tenant), cut_id)

    async def restore_session(
        self, tenant: str, cut_id: bytes, *, accept_compatible: bool = False
    ) -> Woken:
        """A session as it was at a cut.

        Args:
            tenant: Whose.
            cut_id: What :meth:`keep_session` gave.
            accept_compatible: Also go on with rows of another build.

        Raises:
            ConsentError: Another build computed the rows.
            And what :meth:`read_session` raises, and restoring rows.
        """
        binding = self._bindings(tenant)
        text = await self.read_session(tenant, cut_id)
        if not accept_compatible:
            require_same_numerics(text, binding)
        rows = await self._restored(binding, text.reader)
        return Woken(
            cut_id, rows.generation, text.token_ids, text.state, text.decoding, rows.plain_bytes,
            _grid(text.reader),
        )  # fmt: skip

    async def _deepest(self, binding: PackBinding, token_ids: tuple[int, ...], above: int) -> Base:
        """The deepest cut that can be read. One that cannot costs a try and is counted."""
        await self._keeper.settle(binding.key, token_ids, above)
        refused: frozenset[bytes] = frozenset()
        miss = MissReason.DAMAGED
        for _ in range(TRIES_MAX):
            found = await self._find(binding, token_ids, above, refused)
            miss, reader = found.miss, found.reader
            if reader is None:
                break
            try:
                rows = await self._restored(binding, reader)
            except NodeBusyError:
                raise
            except NotStoredError:
                # A collector took it since it was found; where only a chunk is gone, the next
                # lookup sees that.
                miss = MissReason.DAMAGED
            except KvpackError as error:
                log.warning("a cut of %d tokens cannot be used: %s", found.position, error)
                self.accounts.damaged += 1
                refused |= {reader.cut.cut_id}
                miss = MissReason.DAMAGED
            else:
                return self._base(binding, found, reader, rows)
        return await self._empty(miss)

    async def _find(
        self,
        binding: PackBinding,
        token_ids: tuple[int, ...],
        above: int,
        refused: frozenset[bytes],
    ) -> Found:
        work = asyncio.get_running_loop().run_in_executor(
            self._readers,
            functools.partial(
                find,
                self._store,
                binding,
                token_ids,
                above=above,
                refused=refused,
                tip_of=self._lineages.tip_of,
            ),
        )
        try:
            async with asyncio.timeout(FIND_S):
                return await work
        except TimeoutError:
            log.warning("the store of cuts takes longer than %.0f s", FIND_S)
            return Found(None, MissReason.COLD)

    async def _restored(self, binding: PackBinding, reader: CutReader) -> RestoredRows:
        restoring = Restoring(self._engine, binding, reader, self._resident, self._readers)
        began = time.perf_counter()
        rows = await restoring.run()
        self._note(reader, rows, time.perf_counter() - began)
        self.accounts.restored_bytes += rows.plain_bytes
        self.accounts.restored_tokens += reader.cut.position
        self.accounts.memory_bytes += rows.memory_bytes
        return rows

    def _note(self, reader: CutReader, rows: RestoredRows, seconds: float) -> None:
        """Write down how long it took; nobody waits for that."""
        if self.book is None or self._is_closed:
            return
        tier = Tier.DISK if rows.disk_bytes else Tier.MEMORY
        cut = reader.cut
        self._readers.submit(
            self.book.restored, cut.cut_id, cut.position, rows.plain_bytes, tier, seconds
        )

    def _base(
        self, binding: PackBinding, found: Found, reader: CutReader, rows: RestoredRows
    ) -> Base:
        cut_id = reader.cut.cut_id
        self._keeper.hand_in(Reuse(HoldKind.PROMPT, cut_id))
        return Base(
            rows.generation,
            found.position,
            Rung.DURABLE if rows.disk_bytes else Rung.RESIDENT,
            found.miss,
            rows.plain_bytes,
            self._lineages.going_on_from(binding, cut_id),
            _grid(reader),
        )

    async def _empty(self, miss: MissReason) -> Base:
        return Base(await self._engine.call(self._engine.model.new_generation), miss=miss)


def _grid(reader: CutReader) -> CutGrid:
    cut = reader.cut
    return CutGrid(cut.header.layout, cut.cut_id, cut.position, cut.manifest.references)


def _nothing() -> None:
    """A session's lineage is nobody else's before and after."""
