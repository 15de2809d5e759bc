"""What a node remembers of a session beside any pack: enough to own it again after a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvpack import limits
from node.engine_thread import EngineThread
from node.session import Session


@dataclass(frozen=True, slots=True)
class Remembered:
    """A session as of its last whole change.

    Attributes:
        token_ids: Its known tokens. The user's text.
        revision: How often it was changed.
        context_epoch: How often its context was rebuilt.
        messages: The conversation that it is. The user's text.
        tenant: Whose; empty: this node's own.

    Raises:
        LimitError: A number is outside its range.
    """

    token_ids: tuple[int, ...] = field(repr=False)
    revision: int
    context_epoch: int
    messages: tuple[bytes, ...] = field(repr=False)
    tenant: str = ""

    def __post_init__(self) -> None:
        high = (1 << 63) - 1
        limits.check_range("remembered.tokens", len(self.token_ids), 0, limits.POSITION_MAX)
        limits.check_range("remembered.revision", self.revision, 0, high)
        limits.check_range("remembered.context_epoch", self.context_epoch, 0, high)


class Memory(Protocol):
    """Whoever remembers sessions."""

    async def recall(self, session_id: str, loaded: Session | None) -> Remembered | None:
        """The session of that id; None where nothing is, or nothing newer than ``loaded``.

        Raises:
            RecordsError: It could not be read: nothing older may be served instead.
        """


async def recalled(engine: EngineThread, session: Session, remembered: Remembered) -> Session:
    """``session`` as it is remembered. Its rows are brought back when they are first needed."""
    session.token_ids = list(remembered.token_ids)
    session.told_index = session.next_index
    session.revision = remembered.revision
    session.context_epoch = remembered.context_epoch
    session.messages = remembered.messages
    session.tenant = remembered.tenant
    session.fall_asleep(await engine.call(engine.model.new_generation))
    return session
