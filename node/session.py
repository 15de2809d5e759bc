"""One live session: its tokens, its rows, and what comes next.

Known tokens are those given by a client or generated here. Rows exist for the first
``generation.position`` of them; the rest is the backlog. The last known token is always left to a
single-token call, the boundary call, on whichever node makes it: a call of another shape gives
other bits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpack.errors import LimitError
from node.directory import OwnershipToken
from node.errors import SessionStateError
from node.state import SessionState

if TYPE_CHECKING:
    from engine import DecodingState, Generation, Logits, SamplerState

#: One path component on every file system, and never a hidden or a special one.
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Phase(enum.Enum):
    """Whether the session may serve."""

    ACTIVE = "active"
    FROZEN = "frozen"  # from Seal until the directory said who owns it
    GONE = "gone"  # released: whoever still holds this object holds nothing


@dataclass(frozen=True, slots=True, repr=False)
class Decoded:
    """One generated token.

    Attributes:
        index: Its position.
        token_id: The token.
        logits: What it was chosen from; None where that was not kept.
    """

    index: int
    token_id: int
    logits: Logits | None


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


class Session:
    """A session that this node holds.

    ``extend``, ``prefill_next`` and ``decode_next`` run on the engine thread, one at a time, and
    each leaves tokens and rows in agreement: a caller may vanish between any two of them.

    Attributes:
        session_id: Its name.
        token: What this node owns it by.
        phase: Whether it may serve.
        token_ids: Known tokens, by position. The user's text: never logged.
        generation: The rows.
        decoding: How the next token is chosen, and what of the text waits. Greedy by default.
        revision: How often tokens were given to the session.
        context_epoch: How often its context was rebuilt.
        told_index: The first token that no client was given yet, by position.
        messages: The conversation that a rebuild would begin from. The user's text.
        spool: The durable pack it arrived in, if it did; superseded, but the last published cut.
        lock: Held by the one operation that is under way.
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
        from engine import DecodingState

        self.session_id = check_session_id(session_id)
        self.decoding = decoding or DecodingState()
        self.revision = 0
        self.context_epoch = 0
        self.messages: tuple[bytes, ...] = ()
        self.token = token
        self.phase = Phase.ACTIVE
        self.token_ids = list(token_ids)
        self.told_index = len(self.token_ids)
        self.generation = generation
        self.spool: Path | None = None
        self.lock = asyncio.Lock()
        self._vocab_size = vocab_size
        self._last: Decoded | None = None

    def __repr__(self) -> str:
        return f"Session({self.session_id!r}, {self.phase.value}, {len(self.token_ids)} tokens)"

    @property
    def position(self) -> int:
        """Tokens computed."""
        return self.generation.position

    @property
    def next_index(self) -> int:
        """Tokens known; the position of the next one to be generated."""
        return len(self.token_ids)

    @property
    def is_worked_off(self) -> bool:
        """Whether all known tokens but the last are computed."""
        return self.position >= self.next_index - 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Make ``token_ids`` known. Computes nothing.

        Raises:
            LimitError: An id is outside the vocabulary.
            SessionStateError: The context would overflow. Nothing changed.
        """
        limit = self.generation.layout.max_context_tokens
        if self.next_index + len(token_ids) > limit:
            raise SessionStateError(
                f"the context holds {limit} tokens; {self.next_index} are known and "
                f"{len(token_ids)} were given"
            )
        if token_ids and max(token_ids) >= self._vocab_size:
            raise LimitError("token_ids", f"ids below {self._vocab_size}", "an id outside")
        if token_ids:
            sampler = self.decoding.sampler.observe(token_ids)
            self.decoding = dataclasses.replace(self.decoding, sampler=sampler)
            self.token_ids.extend(token_ids)
            self.told_index = self.next_index
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

    def backlog_calls(self) -> list[int]:
        """Sizes of the prefill calls that lead up to the boundary token."""
        from engine import prefill_calls

        return prefill_calls(self.position, max(self.position, self.next_index - 1))

    def prefill_next(self, call_tokens: int) -> None:
        """Compute the next ``call_tokens`` known tokens in one forward call."""
        start = self.position
        self.generation.prefill(self.token_ids[start : start + call_tokens])

    def decode_next(self) -> Decoded:
        """The boundary call: compute the last known token alone, and choose the next one.

        Raises:
            SessionStateError: Nothing is known, or a backlog is left.
        """
        if not self.token_ids or self.position != self.next_index - 1:
            raise SessionStateError(
                f"{self.next_index} tokens are known and {self.position} computed: "
                "there is no single next call"
            )
        logits = self.generation.step(self.token_ids[-1])
        token_id, sampler = _choose(self.decoding.sampler, logits)
        self.decoding = dataclasses.replace(self.decoding, sampler=sampler)
        self._last = Decoded(self.next_index, token_id, logits)
        self.token_ids.append(token_id)
        return self._last

    def recall(self, index: int) -> Decoded:
        """The known token at ``index``, with its logits if it was the last one generated here."""
        if self._last is not None and self._last.index == index:
            return self._last
        return Decoded(index, self.token_ids[index], None)


def _choose(sampler: SamplerState, logits: Logits) -> tuple[int, SamplerState]:
    parameters = sampler.parameters
    if parameters.temperature == 0 and not parameters.history_tokens and not parameters.logit_bias:
        # The same token, without a copy of all logits.
        return logits.argmax(), sampler
    return sampler.choose(logits)
