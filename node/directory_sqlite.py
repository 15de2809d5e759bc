"""The ``sqlite:`` directory: one file, for nodes of one machine."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from node.database import Database, DatabaseUnavailable, DatabaseUnsettled
from node.directory import DIRECTORY_ID_BYTES, Ownership, OwnershipToken
from node.errors import (
    DirectoryAmbiguousError,
    DirectoryError,
    SessionExistsError,
    StaleTokenError,
)

_T = TypeVar("_T")

_APPLICATION_ID: Final = 0x6B766431  # "kvd1"
_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS directory (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        id BLOB NOT NULL, generation INTEGER NOT NULL, revision INTEGER NOT NULL) STRICT""",
    """CREATE TABLE IF NOT EXISTS ownership (
        session_id TEXT PRIMARY KEY, node TEXT NOT NULL,
        revision INTEGER NOT NULL UNIQUE, nonce BLOB NOT NULL) STRICT, WITHOUT ROWID""",
)


class SqliteDirectory:
    """A :class:`node.directory.Directory` in one SQLite file.

    Raises:
        DirectoryError: The file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._database = Database(path, _APPLICATION_ID, _SCHEMA)
            self._database.run(_make_identity)
        except DatabaseUnavailable as error:
            raise DirectoryError(f"directory {path}: {error}") from error

    async def owner(self, session_id: str) -> Ownership | None:
        return await self._look(lambda connection: _read(connection, session_id))

    async def claim(self, session_id: str, node: str, nonce: bytes) -> OwnershipToken:
        def work(connection: sqlite3.Connection) -> OwnershipToken:
            if _read(connection, session_id) is not None:
                raise SessionExistsError(f"session {session_id}: somebody owns it already")
            return _write(connection, session_id, node, nonce)

        return await self._run(work)

    async def transfer(
        self, session_id: str, token: OwnershipToken, node: str, nonce: bytes
    ) -> OwnershipToken:
        def work(connection: sqlite3.Connection) -> OwnershipToken:
            _require_current(connection, session_id, token)
            return _write(connection, session_id, node, nonce)

        return await self._run(work)

    async def release(self, session_id: str, token: OwnershipToken) -> None:
        def work(connection: sqlite3.Connection) -> None:
            _require_current(connection, session_id, token)
            connection.execute("DELETE FROM ownership WHERE session_id = ?", (session_id,))

        await self._run(work)

    async def owned_by(self, node: str) -> list[Ownership]:
        def work(connection: sqlite3.Connection) -> list[Ownership]:
            rows = connection.execute(
                f"{_SELECT} WHERE node = ? ORDER BY session_id", (node,)
            ).fetchall()
            return [_entry(row) for row in rows]

        return await self._look(work)

    async def close(self) -> None:
        await asyncio.to_thread(self._database.close)

    async def _look(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return await asyncio.to_thread(self._database.look, work)
        except DatabaseUnavailable as error:
            raise DirectoryError(f"directory: {error}") from error

    async def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return await asyncio.to_thread(self._database.run, work)
        except DatabaseUnsettled as error:
            raise DirectoryAmbiguousError(f"directory: commit failed ({error})") from error
        except DatabaseUnavailable as error:
            raise DirectoryError(f"directory: {error}") from error


def _make_identity(connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT OR IGNORE INTO directory (one, id, generation, revision) VALUES (1, ?, 1, 0)",
        (secrets.token_bytes(DIRECTORY_ID_BYTES),),
    )


_SELECT: Final = """SELECT session_id, node, directory.id, generation, ownership.revision, nonce
    FROM ownership, directory"""


def _entry(row: tuple[str, str, bytes, int, int, bytes]) -> Ownership:
    session_id, node, directory_id, generation, revision, nonce = row
    return Ownership(session_id, node, OwnershipToken(directory_id, generation, revision), nonce)


def _read(connection: sqlite3.Connection, session_id: str) -> Ownership | None:
    row = connection.execute(f"{_SELECT} WHERE session_id = ?", (session_id,)).fetchone()
    return None if row is None else _entry(row)


def _require_current(
    connection: sqlite3.Connection, session_id: str, token: OwnershipToken
) -> None:
    entry = _read(connection, session_id)
    if entry is None:
        raise StaleTokenError(f"session {session_id}: nobody owns it")
    if entry.token != token:
        raise StaleTokenError(
            f"session {session_id}: revision {token.revision} is not the current one"
        )


def _write(
    connection: sqlite3.Connection, session_id: str, node: str, nonce: bytes
) -> OwnershipToken:
    """Make ``node`` the owner under the next revision of the whole directory."""
    directory_id, generation, revision = connection.execute(
        "UPDATE directory SET revision = revision + 1 RETURNING id, generation, revision"
    ).fetchone()
    connection.execute(
        """INSERT INTO ownership (session_id, node, revision, nonce) VALUES (?, ?, ?, ?)
           ON CONFLICT (session_id) DO UPDATE SET
           node = excluded.node, revision = excluded.revision, nonce = excluded.nonce""",
        (session_id, node, revision, nonce),
    )
    return OwnershipToken(directory_id, generation, revision)
