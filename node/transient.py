"""Sessions that exist for one remote prefill, and the names by which both ends know them.

One node asks another to compute a prompt for it. There the prompt needs a session, and here the
rows arrive in one; neither is anybody's conversation. Their names tell: whatever a restart finds
under such a name is nobody's, and is given up instead of being kept for its owner.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Final

from kvpack.errors import KvpackError, LimitError
from node.errors import TransferStateError

#: No conversation may be called so.
PREFIX: Final = "transient."

_RANDOM_BYTES: Final = 16


def transient_name() -> str:
    """A name that no session has or had."""
    return PREFIX + secrets.token_hex(_RANDOM_BYTES)


def is_transient(session_id: str) -> bool:
    """Whether a session of that name exists for one remote prefill."""
    return session_id.startswith(PREFIX)


def check_lasting(session_id: str) -> str:
    """Return ``session_id`` if it may be the name of a client's session.

    Raises:
        LimitError: Such names are this node's own.
    """
    if is_transient(session_id):
        raise LimitError("session_id", f"a name that does not begin with {PREFIX}", "one that does")
    return session_id


class Guests:
    """The transient sessions that this node waits for. All others are refused at Prepare."""

    def __init__(self) -> None:
        self._awaited: dict[str, KvpackError | None] = {}

    @contextlib.contextmanager
    def awaiting(self, session_id: str) -> Iterator[None]:
        """Let a transfer bring ``session_id`` while the block runs."""
        self._awaited[session_id] = None
        try:
            yield
        finally:
            del self._awaited[session_id]

    @contextlib.contextmanager
    def admitting(self, session_id: str) -> Iterator[None]:
        """Check an offer of ``session_id`` in the block: why it is refused is kept for who waits.

        Raises:
            TransferStateError: Nobody waits for it.
        """
        if is_transient(session_id) and session_id not in self._awaited:
            raise TransferStateError(f"session {session_id}: nobody here waits for it any more")
        try:
            yield
        except KvpackError as error:
            if session_id in self._awaited:
                self._awaited[session_id] = error
            raise

    def refusal(self, session_id: str) -> KvpackError | None:
        """Why the offer of an awaited session was refused here, if it was."""
        return self._awaited.get(session_id)
