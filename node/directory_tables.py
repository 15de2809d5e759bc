"""The tables of the ``sqlite:`` directory and what is done to them. Each function is one step of a
transaction; none of them waits, and time is passed in.

Tombstones are bounded: a release takes one revision, and a tombstone is removed once the directory
is ``TOMBSTONE_SPAN`` revisions past it. Removing one only turns "released" into "unknown", which
proves nothing to anybody: whoever waits for an owner goes on waiting, nobody begins to serve. And
whoever holds a token of the last ``TOMBSTONE_SPAN`` revisions still tells the two apart, since
what would have released it came later than the token.

A lease's end is an instant of the machine's clock, which starts again at 0 with the machine. An
end that lies in the past of this boot is past: the clock reached it although it began again. One
that is further away than the lease is long was written before the machine started: it counts from
when it is next looked at, so a node on another machine is never given up too early.
"""

from __future__ import annotations

import secrets
import sqlite3
from typing import Final

from node.config import LEASE_S
from node.directory import (
    DIRECTORY_ID_BYTES,
    DirectoryState,
    NodeLease,
    Ownership,
    OwnershipToken,
    Published,
    Record,
    Released,
    require_current,
)
from node.errors import LeaseLostError, SessionExistsError

TOMBSTONE_SPAN: Final = 1 << 17

APPLICATION_ID: Final = 0x6B766431  # "kvd1"
SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS directory (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        id BLOB NOT NULL, generation INTEGER NOT NULL, revision INTEGER NOT NULL) STRICT""",
    """CREATE TABLE IF NOT EXISTS ownership (
        session_id TEXT PRIMARY KEY, node TEXT NOT NULL,
        revision INTEGER NOT NULL UNIQUE, nonce BLOB NOT NULL) STRICT, WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS released (
        session_id TEXT PRIMARY KEY, node TEXT NOT NULL,
        generation INTEGER NOT NULL, revision INTEGER NOT NULL,
        released_revision INTEGER NOT NULL UNIQUE) STRICT, WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS published (
        session_id TEXT PRIMARY KEY, generation INTEGER NOT NULL, revision INTEGER NOT NULL,
        value BLOB NOT NULL) STRICT, WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS lease (
        node TEXT PRIMARY KEY, incarnation BLOB NOT NULL,
        end_ms INTEGER NOT NULL, length_ms INTEGER NOT NULL) STRICT, WITHOUT ROWID""",
)

_OWNED: Final = """SELECT session_id, node, d.id, d.generation, o.revision, nonce
    FROM ownership AS o, directory AS d"""

#: One statement, so entry and tombstone are looked for at one moment.
_RECORD: Final = f"""{_OWNED} WHERE session_id = ?1 UNION ALL
    SELECT session_id, node, d.id, r.generation, r.revision, released_revision
    FROM released AS r, directory AS d WHERE session_id = ?1"""  # noqa: S608 - constants


def make_identity(connection: sqlite3.Connection) -> None:
    """Draw the directory's id where it has none yet."""
    connection.execute(
        "INSERT OR IGNORE INTO directory (one, id, generation, revision) VALUES (1, ?, 1, 0)",
        (secrets.token_bytes(DIRECTORY_ID_BYTES),),
    )


def read_state(connection: sqlite3.Connection) -> DirectoryState:
    """Which directory it is, and how far it has come."""
    row = connection.execute("SELECT id, generation, revision FROM directory").fetchone()
    return DirectoryState(*row)


def read_record(connection: sqlite3.Connection, session_id: str) -> Record | None:
    """The entry or tombstone of a session."""
    row = connection.execute(_RECORD, (session_id,)).fetchone()
    if row is None:
        return None
    name, node, directory_id, generation, revision, last = row
    token = OwnershipToken(directory_id, generation, revision)
    if isinstance(last, int):
        return Released(name, node, token, last)
    return Ownership(name, node, token, last)


def read_page(connection: sqlite3.Connection, node: str, after: str, size: int) -> list[Ownership]:
    """Up to ``size`` entries of ``node`` after the id ``after``."""
    rows = connection.execute(
        f"{_OWNED} WHERE node = ? AND session_id > ? ORDER BY session_id LIMIT ?",
        (node, after, size),
    )
    return [
        Ownership(name, owner, OwnershipToken(directory_id, generation, revision), nonce)
        for name, owner, directory_id, generation, revision, nonce in rows
    ]


def claim(
    connection: sqlite3.Connection, session_id: str, node: str, nonce: bytes
) -> OwnershipToken:
    """Enter a session that nobody owns; what the same claim did before is done."""
    record = read_record(connection, session_id)
    if isinstance(record, Ownership):
        if (record.node, record.nonce) == (node, nonce):
            return record.token
        raise SessionExistsError(f"session {session_id}: somebody owns it already")
    connection.execute("DELETE FROM published WHERE session_id = ?", (session_id,))
    return _enter(connection, session_id, node, nonce)


def transfer(
    connection: sqlite3.Connection, session_id: str, token: OwnershipToken, node: str, nonce: bytes
) -> OwnershipToken:
    """Compare and swap; what the same transfer did before is done."""
    record = read_record(connection, session_id)
    if isinstance(record, Ownership) and (record.node, record.nonce) == (node, nonce):
        return record.token
    require_current(record, session_id, token)
    return _enter(connection, session_id, node, nonce)


def release(connection: sqlite3.Connection, session_id: str, token: OwnershipToken) -> None:
    """Entry to tombstone; what the same release did before is done."""
    record = read_record(connection, session_id)
    if isinstance(record, Released) and record.token == token:
        return
    entry = require_current(record, session_id, token)
    revision = _next(connection).revision
    for table in ("ownership", "published"):
        connection.execute(
            f"DELETE FROM {table} WHERE session_id = ?",  # noqa: S608 - constants
            (session_id,),
        )
    connection.execute(
        """INSERT INTO released (session_id, node, generation, revision, released_revision)
           VALUES (?, ?, ?, ?, ?)""",
        (session_id, entry.node, token.generation, token.revision, revision),
    )
    connection.execute(
        "DELETE FROM released WHERE released_revision <= ?", (revision - TOMBSTONE_SPAN,)
    )


def put(
    connection: sqlite3.Connection, session_id: str, token: OwnershipToken, value: bytes
) -> None:
    """Keep a value with the session, under its current token only."""
    require_current(read_record(connection, session_id), session_id, token)
    connection.execute(
        """INSERT INTO published (session_id, generation, revision, value) VALUES (?, ?, ?, ?)
           ON CONFLICT (session_id) DO UPDATE SET generation = excluded.generation,
           revision = excluded.revision, value = excluded.value""",
        (session_id, token.generation, token.revision, value),
    )


def read_published(connection: sqlite3.Connection, session_id: str) -> Published | None:
    """The value kept with a session."""
    row = connection.execute(
        """SELECT d.id, p.generation, p.revision, value FROM published AS p, directory AS d
           WHERE session_id = ?""",
        (session_id,),
    ).fetchone()
    return None if row is None else Published(OwnershipToken(*row[:3]), row[3])


def adopt(connection: sqlite3.Connection, above: int) -> DirectoryState:
    """Raise the generation over its present value and over ``above``; leases begin again."""
    connection.execute(
        "UPDATE directory SET generation = max(generation, ?) + 1, revision = revision + 1",
        (above,),
    )
    # Their ends are instants of the clock of the machine that the file came from.
    connection.execute("UPDATE lease SET end_ms = ?", ((1 << 63) - 1,))
    return read_state(connection)


def register(
    connection: sqlite3.Connection, node: str, incarnation: bytes, length_ms: int, now_ms: int
) -> DirectoryState:
    """Begin a lease, whoever holds it."""
    connection.execute(
        """INSERT INTO lease (node, incarnation, end_ms, length_ms) VALUES (?, ?, ?, ?)
           ON CONFLICT (node) DO UPDATE SET incarnation = excluded.incarnation,
           end_ms = excluded.end_ms, length_ms = excluded.length_ms""",
        (node, incarnation, now_ms + length_ms, length_ms),
    )
    return read_state(connection)


def renew(
    connection: sqlite3.Connection, node: str, incarnation: bytes, length_ms: int, now_ms: int
) -> DirectoryState:
    """Extend a lease that this process holds; also one that a restored directory lacks."""
    row = connection.execute("SELECT incarnation FROM lease WHERE node = ?", (node,)).fetchone()
    # An empty one is nobody's: it stands for a node that had not registered.
    if row is not None and row[0] not in (incarnation, b""):
        raise LeaseLostError(f"node {node}: another process registered under this name")
    return register(connection, node, incarnation, length_ms, now_ms)


def expire(connection: sqlite3.Connection, node: str, incarnation: bytes, now_ms: int) -> None:
    """End a lease that this process holds."""
    connection.execute(
        "UPDATE lease SET end_ms = ? WHERE node = ? AND incarnation = ?",
        (now_ms, node, incarnation),
    )


def read_lease(connection: sqlite3.Connection, node: str, now_ms: int) -> NodeLease | None:
    """A node's lease."""
    row = connection.execute(
        "SELECT incarnation, end_ms, length_ms FROM lease WHERE node = ?", (node,)
    ).fetchone()
    if row is None:
        return None
    incarnation, end_ms, length_ms = row
    return NodeLease(node, incarnation, max(0, min(end_ms - now_ms, length_ms)) / 1000)


def begin_to_count(connection: sqlite3.Connection, node: str, now_ms: int) -> None:
    """Let a lease that has no end in this boot, and a node that has none, run out from now on."""
    connection.execute(
        """INSERT INTO lease (node, incarnation, end_ms, length_ms) VALUES (?, x'', ?, ?)
           ON CONFLICT (node) DO UPDATE SET end_ms = min(end_ms, ? + length_ms)""",
        (node, now_ms + round(LEASE_S * 1000), round(LEASE_S * 1000), now_ms),
    )


def _next(connection: sqlite3.Connection) -> OwnershipToken:
    row = connection.execute(
        "UPDATE directory SET revision = revision + 1 RETURNING id, generation, revision"
    ).fetchone()
    return OwnershipToken(*row)


def _enter(
    connection: sqlite3.Connection, session_id: str, node: str, nonce: bytes
) -> OwnershipToken:
    """Make ``node`` the owner under the next revision of the whole directory."""
    token = _next(connection)
    connection.execute("DELETE FROM released WHERE session_id = ?", (session_id,))
    connection.execute(
        """INSERT INTO ownership (session_id, node, revision, nonce) VALUES (?, ?, ?, ?)
           ON CONFLICT (session_id) DO UPDATE SET
           node = excluded.node, revision = excluded.revision, nonce = excluded.nonce""",
        (session_id, node, token.revision, nonce),
    )
    return token
