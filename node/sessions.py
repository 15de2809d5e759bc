"""The sessions of this node: opening, feeding, generating, and who may do so when.

One operation at a time touches a session. Each one begins with the same question (``hold``): is
the caller's token the one that we own it by, does the directory say so too, and may it serve now?
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from kvpack.errors import KvpackError
from node.config import Address
from node.directory import (
    NONCE_BYTES,
    Directory,
    Ownership,
    OwnershipToken,
    Whose,
    transfer_settled,
    whose,
)
from node.engine_thread import EngineThread
from node.errors import (
    DirectoryError,
    DrainingError,
    JournalError,
    NodeBusyError,
    SessionExistsError,
    SessionFrozenError,
    SessionMovedError,
    SessionNotFoundError,
    SessionStateError,
    StaleTokenError,
)
from node.lease import NodeLease
from node.migration.journal import Journal
from node.session import Decoded, Phase, Session, check_session_id

if TYPE_CHECKING:
    from engine import DecodingState

log = logging.getLogger(__name__)

#: Live sessions of one node; each holds the memory of its rows.
SESSIONS_MAX: Final = 64

#: Moved sessions whose new address is remembered, for clients that still ask here.
FORWARDED_MAX: Final = 1024

#: How long a call waits for the operation before it, a move included, until it is sent away.
HOLD_S: Final = 10.0


class Waker(Protocol):
    """Whoever gives the rows of idle sessions back, and brings them back when they are needed."""

    async def wake(self, session: Session) -> None:
        """Bring its rows back as far as they are kept. The caller holds the session."""

    def poke(self) -> None:
        """Sessions have grown or come: look whether some should give their rows back."""


class Sessions:
    """The sessions that this node owns, by id.

    Attributes:
        waker: Asked before a session is held that gave its rows back; None: none ever does.
        leaving: This node is being drained: no session is opened or placed here.
    """

    def __init__(
        self,
        node: str,
        engine: EngineThread,
        directory: Directory,
        journal: Journal,
        lease: NodeLease,
    ) -> None:
        self.node = node
        self.engine = engine
        self.directory = directory
        self.lease = lease
        self._journal = journal
        self._live: dict[str, Session] = {}
        self._opening: set[str] = set()
        self._forwarded: dict[str, tuple[str, Address]] = {}
        self._lost: set[str] = set()
        self._uses = 0
        self.waker: Waker | None = None
        self.leaving = False
        #: Operations that came under a token that was not the current one.
        self.stale_refused = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._live

    def all(self) -> list[Session]:
        """All of them, whoever's, the longest unused first."""
        return sorted(self._live.values(), key=lambda session: session.used)

    def page(self, after: str, size: int) -> tuple[list[Session], str]:
        """Up to ``size`` sessions after the id ``after``, and the id to go on from; empty: none.

        Only sessions of this node's own tenant.
        """
        ids = sorted(name for name, one in self._live.items() if name > after and not one.tenant)
        chosen = ids[:size]
        return [self._live[i] for i in chosen], chosen[-1] if len(ids) > size else ""

    async def open(self, session_id: str, decoding: DecodingState | None = None) -> Session:
        """Claim a new session; ``decoding`` is how its tokens are chosen, greedy by default.

        Raises:
            SessionExistsError: It lives here, or another node owns it.
            NodeBusyError: This node holds as many sessions as it may.
            DrainingError: This node is being drained.
        """
        check_session_id(session_id)
        if self.leaving:
            raise DrainingError("this node is being drained: nothing is opened here any more")
        if session_id in self._live or session_id in self._opening:
            raise SessionExistsError(f"session {session_id}: lives here already")
        self._require_room()
        self.lease.require()
        self._opening.add(session_id)
        try:
            # Before the claim: one that nothing stands behind would keep the name taken.
            generation = await self.engine.call(self.engine.model.new_generation)
            token = await self._claim(session_id)
            vocab_size = self.engine.model.vocab_size
            session = Session(session_id, token, generation, (), vocab_size, decoding)
            self._live[session_id] = session
        finally:
            self._opening.discard(session_id)
        return session

    async def find(self, session_id: str, tenant: str = "") -> Session:
        """The session of that id; ``tenant`` is whose, empty for this node's own.

        Raises:
            SessionNotFoundError: It does not live here; the message names its owner, if any.
        """
        session = self._live.get(session_id)
        if session is not None and session.tenant == tenant:
            return session
        check_session_id(session_id)
        if session is not None:
            raise SessionNotFoundError(f"session {session_id}: not on this node")
        entry = await self.directory.owner(session_id)
        if isinstance(entry, Ownership) and entry.node != self.node:
            raise self._moved(session_id, entry.node)
        raise SessionNotFoundError(f"session {session_id}: not on this node")

    def forward(self, session_id: str, node: str, address: Address) -> None:
        """Remember where a session went. The oldest of too many is forgotten."""
        self._forwarded.pop(session_id, None)
        self._forwarded[session_id] = (node, address)
        if len(self._forwarded) > FORWARDED_MAX:
            del self._forwarded[next(iter(self._forwarded))]

    @contextlib.asynccontextmanager
    async def hold(
        self,
        session_id: str,
        token: OwnershipToken,
        wait_s: float = HOLD_S,
        *,
        wake: bool = True,
    ) -> AsyncIterator[Session]:
        """The session, for one operation under ``token``.

        Args:
            session_id: Which.
            token: What the caller believes that this node owns it by.
            wait_s: How long the operation before may take, in seconds.
            wake: Whether the operation needs the rows of a session that is asleep.

        Raises:
            SessionNotFoundError: It does not live here.
            StaleTokenError: ``token`` is not what this node owns it by.
            SessionFrozenError: It is being handed over, or an operation before took too long.
            FencedError: This node's lease is over, or was while the operation ran: what came of
                it may be stale and is not given out.
        """
        # Whoever knows the token was told it: whose the session is was asked then.
        session = self._live.get(session_id) or await self.find(session_id)
        try:
            async with asyncio.timeout(wait_s):
                await session.lock.acquire()
        except TimeoutError:
            raise SessionFrozenError(f"session {session_id}: another operation runs") from None
        try:
            mark = self.lease.require()
            try:
                await self._require_owned(session, token)
            except StaleTokenError:
                self.stale_refused += 1
                raise
            if wake and session.asleep and self.waker is not None:
                await self.waker.wake(session)
            # Again: the process may have been paused since the directory answered.
            self.lease.require(mark)
            self._uses += 1
            session.used = self._uses
            yield session
            if session.phase is not Phase.GONE:
                self.lease.require(mark)
        except asyncio.CancelledError:
            # A call that was made for this operation may be under way. Whoever is next would
            # measure a session that still changes: a step would be passed over, a prefill call
            # would run into the boundary token.
            await self.engine.passed()
            raise
        finally:
            session.lock.release()

    async def append(self, session: Session, token_ids: Sequence[int]) -> None:
        """Make tokens known and compute all but the last. The caller holds the session.

        A caller that vanishes leaves a backlog, which the next operation works off.
        """
        await self.engine.call(session.extend, token_ids)
        await self.work_off(session)

    async def work_off(self, session: Session) -> None:
        """Compute the backlog, one grid call after the other. The caller holds the session."""
        while not session.is_worked_off:
            async with self.engine.pace.prefill_turn() as grid_tokens:
                call_tokens = session.backlog_call(grid_tokens)
                await self.engine.call(session.prefill_next, call_tokens)

    async def generate(
        self, session_id: str, token: OwnershipToken, resume_index: int, max_tokens: int
    ) -> AsyncIterator[tuple[OwnershipToken, Decoded]]:
        """Up to ``max_tokens`` tokens from ``resume_index`` on; known ones first.

        The session is held for one token at a time, so a move may come in between: then the
        stream ends with the error that the move left behind.

        Raises:
            SessionStateError: ``resume_index`` is beyond the next token.
        """
        async with self.hold(session_id, token) as session:
            if not 0 < resume_index <= session.next_index:
                raise SessionStateError(
                    f"resume index {resume_index}: expected 1 to {session.next_index}"
                )
            await self.work_off(session)
        with self.engine.pace.decoding() as decoder:
            for index in range(resume_index, resume_index + max_tokens):
                async with self.hold(session_id, token) as session:
                    if index < session.next_index:
                        decoded = session.recall(index)
                    else:
                        with decoder.step():
                            decoded = await self.engine.call(session.decode_next)
                    session.told_index = max(session.told_index, index + 1)
                yield session.token, decoded

    async def close(self, session: Session) -> None:
        """Give the session up and remove its entry. The caller holds the session."""
        await self.directory.release(session.session_id, session.token)
        await self.drop(session)

    async def end(self, session: Session) -> None:
        """Give up a session that nobody will ask for again. The caller alone knows it."""
        try:
            await self.directory.release(session.session_id, session.token)
        except KvpackError as error:
            # Its name stays behind in the directory; the next start of this node releases it.
            log.warning("session %s: not released: %s", session.session_id, error)
        await self.drop(session)

    def note_lost(self, session_id: str) -> None:
        """The directory calls this node its owner, but its state is gone: it may be opened anew."""
        self._lost.add(session_id)

    def adopt(self, session: Session) -> None:
        """Let an installed session serve. Cannot fail: this is the swap of a commit."""
        self._live[session.session_id] = session
        if self.waker is not None:
            self.waker.poke()

    async def drop(self, session: Session) -> None:
        """Forget a session that this node does not own any more, and the pack it arrived in."""
        session.phase = Phase.GONE
        if self._live.get(session.session_id) is session:
            del self._live[session.session_id]
        if session.spool is None:
            return
        with contextlib.suppress(OSError):
            await asyncio.to_thread(session.spool.unlink, missing_ok=True)
        try:
            await self._journal.let_go(session.session_id, session.spool.name)
        except JournalError as error:
            # A restart finds that the session is not ours, and lets go then.
            log.error("session %s: %s", session.session_id, error)

    def _require_room(self) -> None:
        if len(self._live) + len(self._opening) >= SESSIONS_MAX:
            raise NodeBusyError(f"this node holds {len(self._live)} sessions, as many as it may")

    async def _claim(self, session_id: str) -> OwnershipToken:
        nonce = secrets.token_bytes(NONCE_BYTES)
        entry = await self.directory.owner(session_id)
        if not isinstance(entry, Ownership):
            return await self.directory.claim(session_id, self.node, nonce)
        if entry.node != self.node:
            raise SessionExistsError(f"session {session_id}: owned by node {entry.node}")
        if session_id not in self._lost:
            raise SessionExistsError(f"session {session_id}: being handed over to this node")
        # Ours, but lost with a restart. A raised revision fences whoever still holds the old token.
        log.warning("session %s: claimed again, its state was lost", session_id)
        token = await transfer_settled(self.directory, session_id, entry.token, self.node, nonce)
        self._lost.discard(session_id)
        return token

    def require_token(self, session: Session, token: OwnershipToken) -> None:
        """Refuse a caller that does not know by what this node owns the session.

        Raises:
            SessionNotFoundError: It moved away.
            SessionFrozenError: It is being handed over.
            StaleTokenError: The token is not the current one.
        """
        if session.phase is Phase.GONE:
            raise self._moved(session.session_id, "")
        if session.phase is Phase.FROZEN:
            raise SessionFrozenError(f"session {session.session_id}: being handed over")
        if token.generation < session.token.generation:
            raise StaleTokenError(
                f"session {session.session_id}: generation {token.generation} is below "
                f"{session.token.generation}: the directory was adopted since"
            )
        if token != session.token:
            raise StaleTokenError(
                f"session {session.session_id}: revision {token.revision} is not the current one"
            )

    def _moved(self, session_id: str, owner: str) -> SessionMovedError:
        node, address = self._forwarded.get(session_id, ("", None))
        if owner not in ("", node):
            node, address = owner, None
        return SessionMovedError(session_id, node, "" if address is None else str(address))

    async def _require_owned(self, session: Session, token: OwnershipToken) -> None:
        self.require_token(session, token)
        entry = await self.directory.owner(session.session_id)
        standing = whose(entry, self.node, session.token)
        if standing is Whose.OTHERS:
            await self.drop(session)
            raise StaleTokenError(f"session {session.session_id}: this node does not own it")
        if standing is Whose.UNKNOWN or entry is None:
            # A directory that lost it proves nothing: the rows are kept, but they serve nobody.
            raise DirectoryError(
                f"session {session.session_id}: the directory does not know it, or is older "
                f"than revision {session.token.revision}"
            )
        if entry.token.generation != session.token.generation:
            _follow_adoption(session, entry.token)
        if entry.token != session.token:
            raise StaleTokenError(f"session {session.session_id}: claimed anew since")


def _follow_adoption(session: Session, token: OwnershipToken) -> None:
    """The same write under a raised generation: the rows are still its rows.

    Raises:
        StaleTokenError: Whoever called must learn the new token first.
    """
    if token.revision == session.token.revision:
        session.token = token
        raise StaleTokenError(
            f"session {session.session_id}: the directory was adopted, "
            f"generation {token.generation}"
        )
