"""Conversations: sessions of this node whose text is remembered, and that one request writes.

A conversation and its session have one id. The record says what the client was told last; the
session carries the same along (:class:`node.serving.said.Heading` and the messages behind it), so
that after a move the other node's record is made from it. Whichever counts a higher revision is
the newer one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpack.errors import KvpackError, LimitError
from node.directory import Ownership, Record, Released
from node.errors import SessionNotFoundError
from node.records import (
    BusyError,
    ConflictError,
    Context,
    ConversationRecord,
    RecordMissingError,
    Records,
    RecordsFullError,
    Turn,
)
from node.records.values import CONTEXT_BYTES_MAX
from node.remembered import Remembered
from node.serving.said import Heading, Said, new_id
from node.session import Session
from node.sessions import Sessions
from node.state import MESSAGES_MAX, STATE_BYTES_MAX

log = logging.getLogger(__name__)

PREFIX: Final = "conv_"

#: What stands beside the messages in a session's chunk.
_STATE_ROOM_BYTES: Final = 8192


@dataclass(slots=True)
class Writing:
    """A conversation that one request writes.

    Attributes:
        record: As it stands.
        session: Its session, here.
    """

    record: ConversationRecord
    session: Session


class Conversations:
    """All conversations of this node.

    Args:
        records: Where they are remembered.
        sessions: Whose their sessions are.
        tenant: This node's own: its conversations are the ones that move.
    """

    def __init__(self, records: Records, sessions: Sessions, tenant: str) -> None:
        self._records = records
        self._sessions = sessions
        self._tenant = tenant
        self._writing: set[str] = set()

    async def start(self) -> None:
        """Forget conversations whose deletion a restart interrupted.

        Raises:
            RecordsError: The records cannot be read.
            DirectoryError: The directory cannot be read.
        """
        await self._sweep(lambda owner: isinstance(owner, Released))

    async def create(
        self, tenant: str, said: Sequence[Said], metadata: bytes
    ) -> ConversationRecord:
        """A new conversation, which this node owns.

        Raises:
            RecordsFullError: The tenant has as many as it may; also NodeBusyError, for the node.
            LimitError: More text than a conversation holds.
        """
        context = with_messages(Context(), said)
        record = ConversationRecord(
            tenant, new_id(PREFIX.rstrip("_")), self._records.now(), 0, 0, metadata, context
        )
        carried = carried_by(record)
        # The record first: a claim without one would be a session that nobody knows.
        try:
            await self._records.make_conversation(record)
        except RecordsFullError:
            await self._sweep(self._is_elsewhere)
            await self._records.make_conversation(record)
        try:
            session = await self._sessions.open(record.conversation_id)
        except KvpackError:
            await self._records.delete_conversation(record)
            raise
        session.tenant, session.messages = self._tag(tenant), carried
        return record

    async def read(self, tenant: str, name: str) -> ConversationRecord:
        """The conversation as it stands.

        Raises:
            RecordMissingError: This tenant has none of that name.
            SessionMovedError: Another node owns it.
        """
        record, _ = await self._find(tenant, name)
        return record

    @contextlib.asynccontextmanager
    async def writing(
        self, tenant: str, name: str, expected_revision: int | None = None
    ) -> AsyncIterator[Writing]:
        """Be the one that writes a conversation while the block runs.

        Raises:
            RecordMissingError: This tenant has none of that name.
            SessionMovedError: Another node owns it.
            BusyError: Another request writes it.
            ConflictError: It stands at another revision than ``expected_revision``.
        """
        record, session = await self._find(tenant, name)
        if name in self._writing:
            raise BusyError(f"conversation {name}: another request writes it")
        self._writing.add(name)
        try:
            # Again: whoever wrote it may just have ended.
            record, session = await self._find(tenant, name)
            if expected_revision not in (None, record.revision):
                raise ConflictError(
                    f"conversation {name}: expected revision {expected_revision}, "
                    f"found {record.revision}"
                )
            session.writers += 1
            try:
                yield Writing(record, session)
            finally:
                session.writers -= 1
        finally:
            self._writing.discard(name)

    async def commit(self, writing: Writing, turn: Turn) -> ConversationRecord:
        """Make a change true, in the record and in what the session carries.

        Args:
            writing: Which conversation.
            turn: What becomes true; its ``conversation`` is the changed record, whose revision
                and context epoch are filled in here.

        Raises:
            SessionMovedError: It went elsewhere meanwhile: the change did not happen here.
            KvpackError: It did not happen.
        """
        before, session = writing.record, writing.session
        changed = turn.conversation or before
        async with self._sessions.hold(session.session_id, session.token, wake=False) as held:
            record = dataclasses.replace(
                changed, revision=before.revision + 1, context_epoch=held.context_epoch
            )
            carried = carried_by(record)
            whole = dataclasses.replace(
                turn, conversation=record, expected_revision=before.revision
            )
            await self._records.commit(whole)
            held.messages = carried
        writing.record = record
        return record

    async def delete(self, tenant: str, name: str) -> None:
        """Give a conversation up for ever. Responses made in it stay.

        Raises:
            RecordMissingError: This tenant has none of that name.
            SessionMovedError: Another node owns it.
            BusyError: Another request writes it.
        """
        async with self.writing(tenant, name) as writing:
            session = writing.session
            async with self._sessions.hold(session.session_id, session.token, wake=False) as held:
                await self._sessions.close(held)
            await self._records.delete_conversation(writing.record)

    async def recall(self, session_id: str, loaded: Session | None) -> Remembered | None:
        """See :class:`node.remembered.Memory`."""
        record = await self._records.conversation(session_id)
        if record is None:
            return None
        heading = None if loaded is None else heading_of(loaded)
        if heading is not None and heading.revision >= record.revision:
            return None
        return Remembered(
            record.context.token_ids, record.revision, record.context_epoch, carried_by(record),
            self._tag(record.tenant),
        )  # fmt: skip

    def may_sleep(self, session: Session) -> bool:
        """Whether ``session`` is a conversation that nobody writes."""
        return is_conversation(session) and session.session_id not in self._writing

    def _tag(self, tenant: str) -> str:
        """How sessions name a tenant."""
        return "" if tenant == self._tenant else tenant

    async def _find(self, tenant: str, name: str) -> tuple[ConversationRecord, Session]:
        if not name.startswith(PREFIX):
            raise RecordMissingError("conversation: not found")
        record = await self._records.conversation(name)
        if record is not None and record.tenant != tenant:
            raise RecordMissingError(f"conversation {name}: not found")
        try:
            session = await self._sessions.find(name, self._tag(tenant))
        except LimitError:
            raise RecordMissingError("conversation: not found") from None
        except SessionNotFoundError as error:
            # Where another node owns it, whoever knows its name may be told which.
            if record is None and type(error) is SessionNotFoundError:
                raise RecordMissingError(f"conversation {name}: not found") from None
            raise
        if name in self._writing and record is not None:
            return record, session
        return await self._newest(name, tenant, record, session), session

    async def _newest(
        self, name: str, tenant: str, record: ConversationRecord | None, session: Session
    ) -> ConversationRecord:
        """The record, made from what the session carries where that is newer: it was moved here."""
        heading = heading_of(session)
        if heading is None:
            if record is None:
                raise RecordMissingError(f"conversation {name}: not found")
            return record
        if record is not None and record.revision >= heading.revision:
            return record
        adopted = ConversationRecord(
            tenant, name, heading.created_at, heading.revision, session.context_epoch,
            heading.metadata, _merged(record, heading, session),
        )  # fmt: skip
        await self._records.adopt_conversation(adopted)
        log.info("conversation %s: came at revision %d", name, heading.revision)
        return adopted

    async def _sweep(self, wanted: Callable[[Record | None], bool]) -> None:
        """Forget the conversations whose owner is ``wanted``."""
        for name in await self._records.conversations():
            if wanted(await self._sessions.directory.owner(name)):
                record = await self._records.conversation(name)
                if record is not None:
                    await self._records.delete_conversation(record)

    def _is_elsewhere(self, owner: Record | None) -> bool:
        """Whether a conversation went away: of it, only what was dropped is known here alone."""
        moved = isinstance(owner, Ownership) and owner.node != self._sessions.node
        return moved or isinstance(owner, Released)


def is_conversation(session: Session) -> bool:
    """Whether a session carries a conversation."""
    return session.session_id.startswith(PREFIX) and heading_of(session) is not None


def heading_of(session: Session) -> Heading | None:
    """The heading that a session carries; None where it carries no conversation."""
    if not session.messages:
        return None
    with contextlib.suppress(KvpackError):
        return Heading.decode(session.messages[0])
    return None


def said_by(context: Context) -> list[Said]:
    """All messages of a context, the dropped ones among them."""
    return [Said.decode(message) for message in context.messages]


def with_messages(context: Context, said: Sequence[Said]) -> Context:
    """``context`` with ``said`` at its end. Its tokens stay those of before.

    Where that is more than one holds, the oldest of those messages go that a policy dropped.

    Raises:
        LimitError: More than a conversation holds without them.
    """
    messages = [*context.messages, *(one.encode() for one in said)]
    lead = context.lead
    if lead == len(context.messages):
        lead += _leading(said)
    kept_from = max(context.kept_from, lead)
    size = sum(map(len, messages))
    while kept_from > lead and (len(messages) > MESSAGES_MAX or size > CONTEXT_BYTES_MAX):
        size -= len(messages.pop(lead))
        kept_from -= 1
    return dataclasses.replace(context, messages=tuple(messages), lead=lead, kept_from=kept_from)


def carried_by(record: ConversationRecord) -> tuple[bytes, ...]:
    """What the session of ``record`` carries: a heading, and the messages that are not dropped.

    Raises:
        LimitError: More than a session can carry.
    """
    context = record.context
    heading = Heading(
        record.created_at, record.revision, context.lead, record.metadata
    )  # fmt: skip
    carried = (heading.encode(), *context.kept)
    taken = sum(len(one) + 8 for one in carried)
    if taken > STATE_BYTES_MAX - _STATE_ROOM_BYTES:
        raise LimitError(
            "conversation", f"at most {STATE_BYTES_MAX - _STATE_ROOM_BYTES} bytes of text", taken
        )
    return carried


def _merged(before: ConversationRecord | None, heading: Heading, session: Session) -> Context:
    """What a session carries, behind those dropped messages that this node still remembers."""
    carried, lead = session.messages[1:], min(heading.lead, len(session.messages) - 1)
    older: tuple[bytes, ...] = ()
    if before is not None and before.context.kept == carried[: len(before.context.kept)]:
        old = before.context
        older = old.messages[old.lead : old.kept_from]
    return Context(
        (*carried[:lead], *older, *carried[lead:]), lead, lead + len(older),
        tuple(session.token_ids),
    )  # fmt: skip


def _leading(said: Sequence[Said]) -> int:
    count = 0
    for one in said:
        if one.message["role"] not in ("system", "developer"):
            break
        count += 1
    return count
