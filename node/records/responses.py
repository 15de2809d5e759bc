"""Responses in the database: functions of one transaction. Time and bounds are passed in."""

from __future__ import annotations

import sqlite3
from typing import Final

from node.records.tables import CONTEXT_COLUMNS, drop_contexts, last_to_go, read_context
from node.records.values import Bounds, ResponseRecord, size_of

_COLUMNS: Final = f"tenant, response_id, created_at, body, input, {CONTEXT_COLUMNS}"
_FIND: Final = f"""SELECT {_COLUMNS} FROM responses AS r JOIN contexts AS c ON c.id = r.context
    WHERE tenant = ? AND response_id = ?"""  # noqa: S608 - constants


def put_response(
    connection: sqlite3.Connection, record: ResponseRecord, context: int, bounds: Bounds
) -> None:
    """Keep ``record``, whose context has the number ``context``; the oldest of too many go."""
    size = size_of(record.context, record.body, record.input_items)
    connection.execute(
        """INSERT INTO responses
           (tenant, response_id, created_at, used, bytes, body, input, context)
           VALUES (?1, ?2, ?3, (SELECT coalesce(max(used), 0) + 1 FROM responses
                                WHERE tenant = ?1), ?4, ?5, ?6, ?7)""",
        (record.tenant, record.response_id, record.created_at, size, record.body,
         record.input_items, context),
    )  # fmt: skip
    _collect(connection, record.tenant, bounds)


def find_response(
    connection: sqlite3.Connection, tenant: str, response_id: str
) -> ResponseRecord | None:
    """The response of that name; None where this tenant has none."""
    row = connection.execute(_FIND, (tenant, response_id)).fetchone()
    if row is None:
        return None
    tenant, response_id, created_at, body, input_items = row[:5]
    context = read_context(row[5:])
    return ResponseRecord(tenant, response_id, created_at, body, input_items, context)


def use_response(connection: sqlite3.Connection, tenant: str, response_id: str) -> None:
    """A later answer begins from it: it is the youngest again."""
    connection.execute(
        """UPDATE responses SET used = (SELECT max(used) + 1 FROM responses WHERE tenant = ?1)
           WHERE tenant = ?1 AND response_id = ?2""",
        (tenant, response_id),
    )


def delete_response(connection: sqlite3.Connection, tenant: str, response_id: str) -> bool:
    """Remove it. False where there was none."""
    rows = connection.execute(
        "DELETE FROM responses WHERE tenant = ? AND response_id = ? RETURNING context",
        (tenant, response_id),
    ).fetchall()
    drop_contexts(connection, [number for (number,) in rows])
    return bool(rows)


def _collect(connection: sqlite3.Connection, tenant: str, bounds: Bounds) -> None:
    """Remove the longest unused until what is left fits. The youngest always stays."""
    rows = connection.execute(
        "SELECT used, bytes FROM responses WHERE tenant = ? ORDER BY used DESC", (tenant,)
    ).fetchall()
    last = last_to_go(rows, bounds.responses, bounds.bytes)
    if last is None:
        return
    gone = connection.execute(
        "DELETE FROM responses WHERE tenant = ? AND used <= ? RETURNING context", (tenant, last)
    ).fetchall()
    drop_contexts(connection, [number for (number,) in gone])
