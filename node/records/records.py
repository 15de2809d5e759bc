"""The records of one node: every call is one transaction on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from node.database import Database, DatabaseUnavailable
from node.records import answers, conversations, responses
from node.records.errors import BusyError, RecordMissingError, RecordsError
from node.records.tables import APPLICATION_ID, SCHEMA, SECURE_DELETE, put_context
from node.records.values import (
    Answer,
    Bounds,
    ConversationRecord,
    ResponseRecord,
    check_tenant,
)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, repr=False)
class Turn:
    """What becomes true with one answer: all of it together, or nothing.

    Attributes:
        tenant: Whose.
        response: The answer's record; None: it is not kept.
        begun_from: The response that it goes on from; empty: none.
        conversation: The conversation after it; None: it belongs to none.
        expected_revision: Where that conversation stood before.
        answer: What a retry is told; None: the request had no key.
    """

    tenant: str
    response: ResponseRecord | None = None
    begun_from: str = ""
    conversation: ConversationRecord | None = None
    expected_revision: int = 0
    answer: Answer | None = None


class Records:
    """What a node remembers of its clients.

    Args:
        path: The database, made with mode 0600 where it is missing.
        bounds: How much of it for each tenant.
        now: Seconds since 1970.

    Raises:
        RecordsError: The file cannot be used.
    """

    def __init__(
        self, path: Path, bounds: Bounds | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self.bounds = bounds or Bounds()
        self._now = now
        self._running: dict[tuple[str, str], bytes] = {}
        with _told():
            self._database = Database(path, APPLICATION_ID, SCHEMA)
            self._database.look(lambda connection: connection.execute(SECURE_DELETE).fetchall())

    def now(self) -> int:
        """Whole seconds since 1970."""
        return int(self._now())

    async def commit(self, turn: Turn) -> None:
        """Make ``turn`` durable.

        Raises:
            ConflictError: The conversation stands elsewhere by now. Nothing is kept.
            RecordMissingError: The conversation is gone. Nothing is kept.
            RecordsError: The disk refused. Nothing is kept.
        """
        await self._run(lambda connection: self._commit(connection, turn))

    async def response(self, tenant: str, response_id: str) -> ResponseRecord:
        """The stored answer of that name.

        Raises:
            RecordMissingError: This tenant has none.
        """
        found = await self._look(
            lambda connection: responses.find_response(connection, tenant, response_id)
        )
        if found is None:
            raise RecordMissingError(f"response {_name(response_id)}: not found")
        return found

    async def delete_response(self, tenant: str, response_id: str) -> None:
        """Remove a stored answer, and what retries of its request would be told.

        Raises:
            RecordMissingError: This tenant has none of that name.
        """

        def work(connection: sqlite3.Connection) -> bool:
            answers.delete_answers(connection, tenant, f'"{response_id}"')
            return responses.delete_response(connection, tenant, response_id)

        if not await self._run(work):
            raise RecordMissingError(f"response {_name(response_id)}: not found")
        await self._wipe()

    async def make_conversation(self, record: ConversationRecord) -> None:
        """Keep a new conversation.

        Raises:
            RecordsFullError: The tenant has as many as it may.
            ConflictError: The name is taken.
        """
        await self._run(
            lambda connection: conversations.make_conversation(connection, record, self.bounds)
        )

    async def adopt_conversation(self, record: ConversationRecord) -> None:
        """Keep a conversation that came with its session, in the place of what was known of it."""
        await self._run(lambda connection: conversations.adopt_conversation(connection, record))

    async def conversation(self, conversation_id: str) -> ConversationRecord | None:
        """The conversation of that name, whoever's; None where there is none."""
        return await self._look(
            lambda connection: conversations.find_conversation(connection, conversation_id)
        )

    async def conversations(self) -> list[str]:
        """Names of all conversations, sorted."""
        return await self._look(conversations.all_conversations)

    async def delete_conversation(self, record: ConversationRecord) -> None:
        """Remove a conversation. Its responses stay. Does nothing where there is none."""

        def work(connection: sqlite3.Connection) -> None:
            mark = f'"{record.conversation_id}"'
            answers.delete_answers(connection, record.tenant, mark)
            conversations.delete_conversation(connection, record.conversation_id)

        await self._run(work)
        await self._wipe()

    @contextlib.asynccontextmanager
    async def one_request(
        self, tenant: str, key: str, digest: bytes
    ) -> AsyncIterator[Answer | None]:
        """Be the one request with that key while the block runs; what it was answered, if it was.

        An answer becomes one when it is committed, with all else that it changed. A request that
        failed, or whose process died, left none: whoever asks again with its key runs it.

        Raises:
            ConflictError: The key was used for another request.
            BusyError: The request still runs.
        """
        running = self._running.get((tenant, key))
        if running is not None:
            answers.require_same(running, digest)
            raise BusyError("Idempotency-Key: the request with this key still runs")
        self._running[tenant, key] = digest
        try:
            since = self.now() - self.bounds.answer_s
            yield await self._look(
                lambda connection: answers.find_answer(connection, tenant, key, digest, since)
            )
        finally:
            del self._running[tenant, key]

    async def put_transcript(self, tenant: str, digest: bytes, value: bytes) -> None:
        """Keep a transcript under its digest. The longest unused of too many go."""
        check_tenant(tenant)
        await self._run(
            lambda connection: answers.put_transcript(
                connection, tenant, digest, value, self.bounds
            )
        )

    async def get_transcript(
        self, tenant: str, digests: Sequence[bytes]
    ) -> tuple[int, bytes] | None:
        """The first of ``digests`` under which a transcript is kept: its index, and what is."""
        return await self._look(
            lambda connection: answers.find_transcript(connection, tenant, digests)
        )

    async def close(self) -> None:
        """Close the file."""
        await asyncio.to_thread(self._database.close)

    def _commit(self, connection: sqlite3.Connection, turn: Turn) -> None:
        context: int | None = None
        if turn.conversation is not None:
            context = conversations.replace_conversation(
                connection, turn.conversation, turn.expected_revision
            )
        if turn.response is not None:
            if context is None or turn.conversation is None or (
                turn.conversation.context != turn.response.context
            ):  # fmt: skip
                context = put_context(connection, turn.response.context)
            if turn.begun_from:
                responses.use_response(connection, turn.tenant, turn.begun_from)
            responses.put_response(connection, turn.response, context, self.bounds)
        self._put_answer(connection, turn.tenant, turn.answer)

    def _put_answer(
        self, connection: sqlite3.Connection, tenant: str, answer: Answer | None
    ) -> None:
        if answer is not None:
            answers.put_answer(connection, tenant, answer, self.now(), self.bounds)

    async def _wipe(self) -> None:
        """Let the write-ahead log hold nothing of what was deleted."""
        await self._look(
            lambda connection: connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        )

    async def _look(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        with _told():
            return await asyncio.to_thread(functools.partial(self._database.look, work))

    async def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        with _told():
            return await asyncio.to_thread(functools.partial(self._database.run, work))


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except DatabaseUnavailable as error:
        raise RecordsError(f"records: {error}") from error


def _name(given: str) -> str:
    """A client's name of something, short enough for a message."""
    return repr(given[:64])
