"""Conversations in the database: functions of one transaction. Time and bounds are passed in."""

from __future__ import annotations

import sqlite3
from typing import Final

from node.records.errors import ConflictError, RecordMissingError, RecordsFullError
from node.records.tables import CONTEXT_COLUMNS, drop_contexts, put_context, read_context
from node.records.values import Bounds, ConversationRecord

_COLUMNS: Final = (
    f"tenant, conversation_id, created_at, revision, context_epoch, metadata, {CONTEXT_COLUMNS}"
)
_ALL: Final = f"""SELECT {_COLUMNS} FROM conversations AS v
    JOIN contexts AS c ON c.id = v.context"""  # noqa: S608 - constants
_FIND: Final = f"{_ALL} WHERE conversation_id = ?"


def make_conversation(
    connection: sqlite3.Connection, record: ConversationRecord, bounds: Bounds
) -> None:
    """Keep a new conversation.

    Raises:
        RecordsFullError: The tenant has as many as it may.
        ConflictError: The name is taken.
    """
    (count,) = connection.execute(
        "SELECT count(*) FROM conversations WHERE tenant = ?", (record.tenant,)
    ).fetchone()
    if count >= bounds.conversations:
        raise RecordsFullError(
            f"conversations: this tenant has {count}, as many as it may; delete one first"
        )
    if find_conversation(connection, record.conversation_id) is not None:
        raise ConflictError(f"conversation {record.conversation_id}: the name is taken")
    _insert(connection, record)


def _insert(connection: sqlite3.Connection, record: ConversationRecord) -> None:
    connection.execute(
        """INSERT INTO conversations (tenant, conversation_id, created_at, revision,
           context_epoch, metadata, context) VALUES (?, ?, ?, ?, ?, ?, ?)""",
        (record.tenant, record.conversation_id, record.created_at, record.revision,
         record.context_epoch, record.metadata, put_context(connection, record.context)),
    )  # fmt: skip


def find_conversation(
    connection: sqlite3.Connection, conversation_id: str
) -> ConversationRecord | None:
    """The conversation of that name, whoever's; None where there is none."""
    row = connection.execute(_FIND, (conversation_id,)).fetchone()
    return None if row is None else _record(row)


def all_conversations(connection: sqlite3.Connection) -> list[str]:
    """Names of all conversations, sorted."""
    rows = connection.execute("SELECT conversation_id FROM conversations ORDER BY conversation_id")
    return [name for (name,) in rows]


def replace_conversation(
    connection: sqlite3.Connection, record: ConversationRecord, expected_revision: int
) -> int:
    """Keep ``record`` in the place of the one that stands at ``expected_revision``.

    Returns:
        The number of its context, for a response that shares it.

    Raises:
        RecordMissingError: There is none of that name and tenant.
        ConflictError: It stands at another revision.
    """
    row = connection.execute(
        "SELECT revision, context FROM conversations WHERE tenant = ? AND conversation_id = ?",
        (record.tenant, record.conversation_id),
    ).fetchone()
    if row is None:
        raise RecordMissingError(f"conversation {record.conversation_id}: not found")
    revision, before = row
    if revision != expected_revision:
        raise ConflictError(
            f"conversation {record.conversation_id}: expected revision {expected_revision}, "
            f"found {revision}"
        )
    context = put_context(connection, record.context)
    connection.execute(
        """UPDATE conversations SET revision = ?, context_epoch = ?, metadata = ?, context = ?
           WHERE conversation_id = ?""",
        (record.revision, record.context_epoch, record.metadata, context,
         record.conversation_id),
    )  # fmt: skip
    drop_contexts(connection, [before])
    return context


def adopt_conversation(connection: sqlite3.Connection, record: ConversationRecord) -> None:
    """Keep a conversation that came with its session, in the place of what was known of it."""
    delete_conversation(connection, record.conversation_id)
    _insert(connection, record)


def delete_conversation(connection: sqlite3.Connection, conversation_id: str) -> bool:
    """Remove it. False where there was none."""
    rows = connection.execute(
        "DELETE FROM conversations WHERE conversation_id = ? RETURNING context",
        (conversation_id,),
    ).fetchall()
    drop_contexts(connection, [number for (number,) in rows])
    return bool(rows)


def _record(row: tuple[str, str, int, int, int, bytes, object]) -> ConversationRecord:
    tenant, name, created_at, revision, epoch, metadata = row[:6]
    return ConversationRecord(
        tenant, name, created_at, revision, epoch, metadata, read_context(row[6:])
    )
