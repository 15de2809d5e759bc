"""Conversations that nobody writes to give their rows back once they are safe on disk.

What stays of one is its tokens and its text; a call that holds it brings the rows back from the
deepest cut, and what no cut has is computed like any new token. So a node may own many more
conversations than its memory holds rows of, and one that fell asleep answers like one that did not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, Protocol

from kvpack.errors import KvpackError
from kvpack.layout import LayerKind
from kvpack.store import HoldKind
from node.serving.reuse import Ladder
from node.session import Phase, Session
from node.sessions import Sessions

log = logging.getLogger(__name__)

#: Rows of sessions in memory, in bytes, above which idle conversations fall asleep.
AWAKE_BYTES: Final = 4 << 30


class Keeper(Ladder, Protocol):
    """Whoever keeps rows, and can say when they are on disk."""

    async def keep_session(
        self, tenant: str, session: Session, kind: HoldKind = HoldKind.TURN
    ) -> bytes:
        """Cut a session that the caller holds and that has no backlog; durable on return."""


class Dormancy:
    """Gives rows of idle sessions back, and brings them back when they are needed.

    Args:
        sessions: Of this node.
        keeper: Where rows are kept.
        tenant: This node's own.
        may_sleep: Whether a session can: its text is remembered, so a cut is all it needs.
        awake_bytes: Rows in memory above which idle sessions fall asleep, the longest unused first.

    Attributes:
        fell_asleep: How often a session gave its rows back.
        woke: How often one got them again.
    """

    def __init__(
        self,
        sessions: Sessions,
        keeper: Keeper,
        tenant: str,
        may_sleep: Callable[[Session], bool],
        awake_bytes: int = AWAKE_BYTES,
    ) -> None:
        self._sessions = sessions
        self._keeper = keeper
        self._tenant = tenant
        self._may_sleep = may_sleep
        self._awake_bytes = awake_bytes
        self._poked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.fell_asleep = 0
        self.woke = 0

    def start(self) -> None:
        """Begin to look after sessions."""
        self._sessions.waker = self
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop. A session that falls asleep just now stays awake."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    @property
    def used_bytes(self) -> int:
        """Rows of all sessions in memory."""
        return sum(map(_row_bytes, self._sessions.all()))

    def poke(self) -> None:
        """Look whether some should give their rows back."""
        self._poked.set()

    async def wake(self, session: Session) -> None:
        """Bring its rows back as far as they are kept. The caller holds the session.

        Where nothing can be brought back it has a backlog, which the caller works off.
        """
        if not session.token_ids:
            session.asleep = False
            return
        tenant = session.tenant or self._tenant
        try:
            base = await self._keeper.begin(tenant, tuple(session.token_ids))
        except KvpackError as error:
            log.warning("session %s: its rows are computed anew: %s", session.session_id, error)
            session.asleep = False
            return
        session.wake(base)
        session.trail = self._keeper.trail(tenant, session, base)
        self.woke += 1
        known = session.next_index
        log.info("session %s: woke, %d of %d tokens", session.session_id, base.position, known)
        self.poke()

    async def settle(self) -> None:
        """Let idle sessions fall asleep until the rest fits, or none is left that may."""
        for session in self._sessions.all():
            if self.used_bytes <= self._awake_bytes:
                return
            if self._is_idle(session) and _row_bytes(session):
                await self.sleep(session)

    async def sleep(self, session: Session) -> bool:
        """Let one fall asleep, if it is still idle and its rows can be made durable."""
        if not self._is_idle(session):
            return False
        async with session.lock:
            try:
                if session.is_worked_off:
                    await self._keeper.keep_session(session.tenant or self._tenant, session)
                empty = await self._sessions.engine.call(self._sessions.engine.model.new_generation)
            except KvpackError as error:
                log.warning("session %s: stays awake: %s", session.session_id, error)
                return False
            if session.phase is not Phase.ACTIVE or session.pinned:
                return False
            session.fall_asleep(empty)
        self.fell_asleep += 1
        log.info("session %s: asleep, %d tokens", session.session_id, session.next_index)
        return True

    def _is_idle(self, session: Session) -> bool:
        busy = session.lock.locked() or session.pinned or session.asleep
        return session.phase is Phase.ACTIVE and not busy and self._may_sleep(session)

    async def _run(self) -> None:
        while True:
            await self._poked.wait()
            self._poked.clear()
            with contextlib.suppress(KvpackError):
                await self.settle()


def _row_bytes(session: Session) -> int:
    generation = session.generation
    layout, position = generation.layout, generation.position
    return sum(layout.state_bytes(kind, position) for kind in LayerKind) if position else 0
