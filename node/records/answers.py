"""Answers for retries, and transcripts: functions of one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from node.records.errors import ConflictError
from node.records.tables import last_to_go
from node.records.values import Answer, Bounds


def put_answer(
    connection: sqlite3.Connection, tenant: str, answer: Answer, now: int, bounds: Bounds
) -> None:
    """Keep ``answer``; those that are too old or too many go."""
    connection.execute(
        """INSERT OR REPLACE INTO answers (tenant, key, digest, status, body, created_at)
           VALUES (?, ?, ?, ?, ?, ?)""",
        (tenant, answer.key, answer.digest, answer.status, answer.body, now),
    )
    connection.execute("DELETE FROM answers WHERE created_at < ?", (now - bounds.answer_s,))
    # The length of a value stands before it: no body is read for this.
    rows = connection.execute(
        "SELECT id, length(body) FROM answers WHERE tenant = ? ORDER BY id DESC", (tenant,)
    ).fetchall()
    last = last_to_go(rows, bounds.answers, bounds.answer_bytes)
    if last is not None:
        connection.execute("DELETE FROM answers WHERE tenant = ? AND id <= ?", (tenant, last))


def find_answer(
    connection: sqlite3.Connection, tenant: str, key: str, digest: bytes, since: int
) -> Answer | None:
    """What the request with that key was answered; None where it was not, or before ``since``.

    Raises:
        ConflictError: The key was used for another request.
    """
    row = connection.execute(
        """SELECT digest, status, body FROM answers
           WHERE tenant = ? AND key = ? AND created_at >= ?""",
        (tenant, key, since),
    ).fetchone()
    if row is None:
        return None
    require_same(row[0], digest)
    return Answer(key, *row)


def require_same(known: bytes, digest: bytes) -> None:
    """Refuse a key that was used for another request.

    Raises:
        ConflictError: It was.
    """
    if known != digest:
        raise ConflictError("Idempotency-Key: it was used for another request")


def delete_answers(connection: sqlite3.Connection, tenant: str, mark: str) -> None:
    """Remove the answers that name ``mark``, an id: what is deleted is not told again either."""
    connection.execute(
        "DELETE FROM answers WHERE tenant = ? AND instr(body, CAST(? AS BLOB)) > 0", (tenant, mark)
    )


def put_transcript(
    connection: sqlite3.Connection, tenant: str, digest: bytes, value: bytes, bounds: Bounds
) -> None:
    """Keep a transcript; the longest unused of too many go."""
    connection.execute(
        """INSERT OR REPLACE INTO transcripts (tenant, digest, value, used, bytes)
           VALUES (?1, ?2, ?3, (SELECT coalesce(max(used), 0) + 1 FROM transcripts
                                WHERE tenant = ?1), ?4)""",
        (tenant, digest, value, len(value) + 128),
    )
    rows = connection.execute(
        "SELECT used, bytes FROM transcripts WHERE tenant = ? ORDER BY used DESC", (tenant,)
    ).fetchall()
    last = last_to_go(rows, bounds.transcripts, bounds.transcript_bytes)
    if last is not None:
        connection.execute("DELETE FROM transcripts WHERE tenant = ? AND used <= ?", (tenant, last))


def find_transcript(
    connection: sqlite3.Connection, tenant: str, digests: Sequence[bytes]
) -> tuple[int, bytes] | None:
    """The first of ``digests`` that is there: its index, and its value."""
    for index, digest in enumerate(digests):
        row = connection.execute(
            "SELECT value FROM transcripts WHERE tenant = ? AND digest = ?", (tenant, digest)
        ).fetchone()
        if row is not None:
            return index, bytes(row[0])
    return None
