"""How an answer gets at its stream: at once, or as the owner of a session, one call at a time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from node.errors import SessionStateError
from node.serving.order import SessionRef

if TYPE_CHECKING:
    from node.session import Session
    from node.sessions import Sessions
    from node.stream import Stream


class Access(Protocol):
    """Whoever may work on one stream."""

    def held(self) -> AbstractAsyncContextManager[Stream]:
        """The stream, for one operation: nobody else touches it while the block runs."""

    def require(self) -> None:
        """Refuse to give out what the operation came to, inside of its block.

        Raises:
            FencedError: Somebody else may own the stream by now.
        """


class Alone:
    """A stream that nobody else knows."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[Stream]:
        """The stream, at once."""
        yield self.stream

    def require(self) -> None:
        """It is nobody else's."""


class Owned:
    """A session that this node owns, and others may work on between two of our operations."""

    def __init__(self, sessions: Sessions, ref: SessionRef) -> None:
        self._sessions = sessions
        self._ref = ref
        self._left: tuple[int, int, int] | None = None
        self._lease_mark: int | None = None

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[Session]:
        """The session, if it is as we left it. A move may have come between.

        Raises:
            SessionNotFoundError: It does not live here any more.
            StaleTokenError: This node does not own it by the order's token.
            SessionFrozenError: It is being handed over, or another operation takes too long.
            FencedError: This node's lease is over.
            SessionStateError: Somebody else went on in it.
        """
        async with self._sessions.hold(self._ref.session_id, self._ref.token) as session:
            self._lease_mark = self._sessions.lease.require()
            if self._left not in (None, _standing(session)):
                raise SessionStateError(
                    f"session {session.session_id}: somebody else went on in it"
                )
            yield session
            self._left = _standing(session)

    def require(self) -> None:
        """See :class:`Access`. What is told inside the block is out before its end is checked."""
        self._sessions.lease.require(self._lease_mark)


def _standing(session: Session) -> tuple[int, int, int]:
    return session.next_index, session.revision, session.context_epoch
