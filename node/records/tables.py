"""The tables of the records, and how lists become bytes in them."""

from __future__ import annotations

import sqlite3
import sys
from array import array
from collections.abc import Sequence
from typing import Final

from node.database import DatabaseUnavailable
from node.records.values import Context

APPLICATION_ID: Final = 0x6B767232  # "kvr2"

#: Rows that hold text are overwritten when they go: deleted means gone.
SECURE_DELETE: Final = "PRAGMA secure_delete=ON"

SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS contexts (
        id INTEGER PRIMARY KEY, messages BLOB NOT NULL, lead INTEGER NOT NULL,
        kept_from INTEGER NOT NULL, token_ids BLOB NOT NULL) STRICT""",
    """CREATE TABLE IF NOT EXISTS responses (
        id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, response_id TEXT NOT NULL,
        created_at INTEGER NOT NULL, used INTEGER NOT NULL, bytes INTEGER NOT NULL,
        body BLOB NOT NULL, input BLOB NOT NULL,
        context INTEGER NOT NULL REFERENCES contexts (id),
        UNIQUE (tenant, response_id)) STRICT""",
    "CREATE INDEX IF NOT EXISTS responses_used ON responses (tenant, used, bytes)",
    "CREATE INDEX IF NOT EXISTS responses_context ON responses (context)",
    """CREATE TABLE IF NOT EXISTS conversations (
        id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, conversation_id TEXT NOT NULL UNIQUE,
        created_at INTEGER NOT NULL, revision INTEGER NOT NULL, context_epoch INTEGER NOT NULL,
        metadata BLOB NOT NULL, context INTEGER NOT NULL REFERENCES contexts (id)) STRICT""",
    "CREATE INDEX IF NOT EXISTS conversations_context ON conversations (context)",
    "CREATE INDEX IF NOT EXISTS conversations_tenant ON conversations (tenant)",
    """CREATE TABLE IF NOT EXISTS answers (
        id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, key TEXT NOT NULL, digest BLOB NOT NULL,
        status INTEGER NOT NULL, body BLOB NOT NULL, created_at INTEGER NOT NULL,
        UNIQUE (tenant, key)) STRICT""",
    "CREATE INDEX IF NOT EXISTS answers_age ON answers (created_at)",
    """CREATE TABLE IF NOT EXISTS transcripts (
        id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, digest BLOB NOT NULL, value BLOB NOT NULL,
        used INTEGER NOT NULL, bytes INTEGER NOT NULL, UNIQUE (tenant, digest)) STRICT""",
    "CREATE INDEX IF NOT EXISTS transcripts_used ON transcripts (tenant, used, bytes)",
)

_LENGTH_BYTES: Final = 4

CONTEXT_COLUMNS: Final = "messages, lead, kept_from, token_ids"


def put_context(connection: sqlite3.Connection, context: Context) -> int:
    """Insert ``context`` and return its number."""
    values = (
        pack_list(context.messages), context.lead, context.kept_from,
        pack_ids(context.token_ids),
    )  # fmt: skip
    cursor = connection.execute(
        f"INSERT INTO contexts ({CONTEXT_COLUMNS}) VALUES (?, ?, ?, ?)",  # noqa: S608
        values,
    )
    return int(cursor.lastrowid or 0)


def drop_contexts(connection: sqlite3.Connection, numbers: Sequence[int]) -> None:
    """Remove those of these contexts that nothing stands for any more.

    A turn of a conversation and the response of that turn share one.
    """
    connection.executemany(
        """DELETE FROM contexts WHERE id = ?1
           AND NOT EXISTS (SELECT 1 FROM responses WHERE context = ?1)
           AND NOT EXISTS (SELECT 1 FROM conversations WHERE context = ?1)""",
        [(number,) for number in numbers],
    )


def read_context(row: Sequence[object]) -> Context:
    """A context from its columns.

    Raises:
        DatabaseUnavailable: They hold something else than was written.
    """
    messages, lead, kept_from, token_ids = row
    if not (
        isinstance(messages, bytes) and isinstance(lead, int) and isinstance(kept_from, int)
        and isinstance(token_ids, bytes)
    ):  # fmt: skip
        raise DatabaseUnavailable("contexts: a column of another type")
    return Context(unpack_list(messages), lead, kept_from, unpack_ids(token_ids))


def last_to_go(rows: Sequence[tuple[int, int]], count_max: int, bytes_max: int) -> int | None:
    """Which of ``rows``, ``(mark, bytes)`` from the youngest to the oldest, goes with all older.

    Returns:
        The mark of the first one that is too many or too much; None: all may stay, and so may the
        youngest in any case.
    """
    total = 0
    for count, (mark, size) in enumerate(rows):
        total += size
        if count and (count >= count_max or total > bytes_max):
            return mark
    return None


def pack_list(items: Sequence[bytes]) -> bytes:
    """Each item after its length in four bytes, big end first."""
    return b"".join(len(item).to_bytes(_LENGTH_BYTES, "big") + item for item in items)


def unpack_list(packed: bytes) -> tuple[bytes, ...]:
    """What :func:`pack_list` packed.

    Raises:
        DatabaseUnavailable: Something else.
    """
    items: list[bytes] = []
    offset = 0
    while offset < len(packed):
        start = offset + _LENGTH_BYTES
        end = start + int.from_bytes(packed[offset:start], "big")
        if start > len(packed) or end > len(packed):
            raise DatabaseUnavailable("contexts: a list that ends too early")
        items.append(packed[start:end])
        offset = end
    return tuple(items)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Four bytes for each token id, little end first."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """What :func:`pack_ids` packed.

    Raises:
        DatabaseUnavailable: Not whole ids.
    """
    ids = array("I")
    if len(packed) % ids.itemsize:
        raise DatabaseUnavailable("contexts: token ids that end too early")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)
