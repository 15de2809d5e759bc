"""One live session: a stream of tokens that somebody owns."""

from __future__ import annotations

import asyncio
import enum
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpack.errors import LimitError
from node.directory import OwnershipToken
from node.errors import SessionStateError
from node.state import SessionState
from node.stream import Decoded, Stream

if TYPE_CHECKING:
    from engine import DecodingState, Generation
    from node.serving.reuse import Base

__all__ = ["Decoded", "Phase", "Session", "check_session_id"]

#: One path component on every file system, and never a hidden or a special one.
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Phase(enum.Enum):
    """Whether the session may serve."""

    ACTIVE = "active"
    FROZEN = "frozen"  # from Seal until the directory said who owns it
    GONE = "gone"  # released: whoever still holds this object holds nothing


def check_session_id(session_id: str) -> str:
    """Return ``session_id`` if it can be a name on any disk.

    Raises:
        LimitError: It cannot.
    """
    if not _SESSION_ID.fullmatch(session_id):
        raise LimitError(
            "session_id",
            "1 to 100 of A-Z, a-z, 0-9, dot, hyphen, underscore; first a letter or digit",
            f"{len(session_id)} characters",
        )
    return session_id


class Session(Stream):
    """A session that this node holds.

    Attributes:
        session_id: Its name.
        token: What this node owns it by.
        phase: Whether it may serve.
        revision: How often tokens were given to the session.
        context_epoch: How often its context was rebuilt.
        messages: The conversation that a rebuild would begin from. The user's text.
        spool: The durable pack it arrived in, if it did; superseded, but the last published cut.
        lock: Held by the one operation that is under way.
        tenant: Whose it is; empty: this node's own, as everything that moves is.
        asleep: Its rows were given back. All of its tokens are known, so whoever needs rows
            computes them, or brings them back from where they are kept (:meth:`wake`).
        woken: Where it was brought back from last; None: never.
        pinned: Readers of its rows that do not hold the lock: it does not fall asleep.
        writers: Requests that make a turn in it, true as a whole or not at all: a move waits.
        used: When it was held last, as a number that grows.
        rewrites: How often known tokens were replaced here. Whoever reads rows or tokens without
            the lock has read two contexts if it changes meanwhile.
    """

    def __init__(
        self,
        session_id: str,
        token: OwnershipToken,
        generation: Generation,
        token_ids: Sequence[int] = (),
        vocab_size: int = 0,
        decoding: DecodingState | None = None,
    ) -> None:
        super().__init__(generation, token_ids, vocab_size, decoding)
        self.session_id = check_session_id(session_id)
        self.revision = 0
        self.context_epoch = 0
        self.messages: tuple[bytes, ...] = ()
        self.token = token
        self.phase = Phase.ACTIVE
        self.spool: Path | None = None
        self.lock = asyncio.Lock()
        self.tenant = ""
        self.asleep = False
        self.woken: Base | None = None
        self.pinned = 0
        self.writers = 0
        self.used = 0
        self.rewrites = 0

    def __repr__(self) -> str:
        return f"Session({self.session_id!r}, {self.phase.value}, {len(self.token_ids)} tokens)"

    def extend(self, token_ids: Sequence[int]) -> None:
        """Make ``token_ids`` known, which raises the revision. Computes nothing.

        Raises:
            LimitError: An id is outside the vocabulary.
            SessionStateError: The context would overflow. Nothing changed.
        """
        super().extend(token_ids)
        if token_ids:
            self.revision += 1

    def state(self, position: int) -> SessionState:
        """What the session is at the cut ``position``, beyond rows, tokens and decoding state."""
        return SessionState(
            self.token_ids[position], self.revision, self.context_epoch, self.messages,
            untold_tokens=max(0, position + 1 - self.told_index),
        )  # fmt: skip

    def restore(self, state: SessionState) -> None:
        """Be what ``state`` says. Its pending token is the caller's to place."""
        self.revision = state.revision
        self.context_epoch = state.context_epoch
        self.messages = state.messages
        self.told_index = max(0, self.next_index - state.untold_tokens)

    def begin_from(self, generation: Generation, token_ids: Sequence[int]) -> None:
        """Let a session that knows nothing yet know ``token_ids``, whose rows ``generation`` holds.

        Raises:
            SessionStateError: It knows something. Nothing changed.
        """
        if self.token_ids:
            raise SessionStateError(f"session {self.session_id}: it has begun already")
        self.generation = generation
        self.extend(token_ids)

    def go_on(self, token_ids: Sequence[int]) -> None:
        """Be the context ``token_ids``, which goes on from this one. Computes nothing.

        It begins with all known tokens, or at least with all computed ones. What is known and not
        computed may differ: the token that ended an answer may be none that a template writes.

        Raises:
            LimitError: An id is outside the vocabulary.
            SessionStateError: It does not go on from this one, or overflows. Nothing changed.
        """
        known = self.next_index
        if self.token_ids == list(token_ids[:known]):
            self.extend(token_ids[known:])
            return
        position = self.position
        if not self.holds_beginning_of(token_ids):
            raise SessionStateError(
                f"session {self.session_id}: its {position} computed tokens are no beginning of "
                f"the {len(token_ids)} that were given"
            )
        self._require_room(position, token_ids[position:])
        del self.token_ids[position:]
        self.rewrites += 1
        self.extend(token_ids[position:])

    def rebuild(self, staged: Stream) -> None:
        """Go on in the context that ``staged`` holds: a swap, on the engine thread; cannot fail.

        Both are one context from here on, tokens and rows, so the trail of ``staged`` goes on.
        """
        self.generation, self.token_ids = staged.generation, staged.token_ids
        self.decoding, self.trail = staged.decoding, staged.trail
        self.told_index, self._last = self.next_index, None
        self.revision += 1
        self.rewrites += 1
        self.context_epoch += 1

    def fall_asleep(self, empty: Generation) -> None:
        """Give the rows back: ``empty`` stands in their place, and every token is backlog."""
        if self.trail is not None:
            self.trail.end()
        self.generation, self.trail, self.woken = empty, None, None
        self.asleep = True

    def wake(self, base: Base) -> None:
        """Go on from the rows of ``base``, which are of this session's first tokens."""
        self.generation, self.woken = base.generation, base
        self.asleep = False
