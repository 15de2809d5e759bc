"""The newest that this node has seen of each directory, and the refusal of anything older.

A directory that was restored from a backup gives revisions out a second time: two owners could hold
equal tokens. ``kvnode directory adopt`` raises its generation, so that every token from before is
stale. What is here makes sure that nobody forgets to: a node that has seen more of a directory than
the directory itself knows refuses to work with it, by name, until it was adopted. It remembers
across its own restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Awaitable
from pathlib import Path
from typing import Final

from node.database import Database, DatabaseUnavailable
from node.directory import (
    Directory,
    DirectoryState,
    NodeLease,
    Ownership,
    OwnershipToken,
    Published,
    Record,
)
from node.errors import DirectoryError, DirectoryWentBackError

log = logging.getLogger(__name__)

_APPLICATION_ID: Final = 0x6B767331  # "kvs1"
_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS seen (
        directory_id BLOB PRIMARY KEY, generation INTEGER NOT NULL, revision INTEGER NOT NULL)
       STRICT, WITHOUT ROWID""",
)


class Seen:
    """The highest (generation, revision) seen, by directory id; kept in one small file.

    A risen generation is durable before anything is done under it. Revisions are written down
    with every renewal of the lease: what a crash loses of them is a few seconds.

    Raises:
        DirectoryError: The file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._database = Database(path, _APPLICATION_ID, _SCHEMA)
            rows = self._database.look(_read)
        except DatabaseUnavailable as error:
            raise DirectoryError(f"{path}: {error}") from error
        self._highest = dict(rows)
        self._saved = dict(rows)

    def highest(self, directory_id: bytes) -> tuple[int, int]:
        """The newest seen of that directory: ``(generation, revision)``; zeros where none was."""
        return self._highest.get(directory_id, (0, 0))

    def all(self) -> dict[bytes, tuple[int, int]]:
        """The newest seen of every directory, as of now."""
        return dict(self._highest)

    def require_known(self, directory_id: bytes, generation: int) -> None:
        """Refuse a directory that is not the one before, unless a person adopted it.

        A fresh one has generation 1; adopting raises it. Where a file was lost or its path is
        mistyped, an empty directory is found, in which this node owns nothing.

        Raises:
            DirectoryWentBackError: Another directory was seen here, and this one never adopted.
        """
        if generation == 1 and self._highest and directory_id not in self._highest:
            raise DirectoryWentBackError(
                f"directory {directory_id.hex()[:8]}: another directory than before: this data "
                f"folder worked with {self._known()}. Start the node with the --directory of then "
                "(a sqlite: path counts from where the node is started), or with another "
                "--data-dir. If this directory is to take its place for good, adopt it once: "
                "kvnode directory adopt URL, with the URL that is --directory here"
            )

    def _known(self) -> str:
        """The directories seen, for a person: the beginnings of their ids."""
        return ", ".join(sorted(one.hex()[:8] for one in self._highest))

    async def note(self, directory_id: bytes, generation: int, revision: int) -> None:
        """Remember that this was seen.

        Raises:
            DirectoryError: The generation rose, and that cannot be written down.
        """
        before = self.highest(directory_id)
        if (generation, revision) <= before:
            return
        if self._highest and directory_id not in self._highest:
            log.warning("goes on with another directory than before: %s", directory_id.hex()[:8])
        self._highest[directory_id] = (generation, revision)
        if generation > before[0]:
            await self.save()

    async def save(self) -> None:
        """Write down what rose since.

        Raises:
            DirectoryError: The file cannot be written.
        """
        risen = {i: seen for i, seen in self._highest.items() if seen != self._saved.get(i)}
        if not risen:
            return
        try:
            await asyncio.to_thread(self._database.run, lambda c: _write(c, risen))
        except DatabaseUnavailable as error:
            raise DirectoryError(f"what was seen of the directory: {error}") from error
        self._saved.update(risen)

    async def close(self) -> None:
        """Write down the rest and close the file."""
        with contextlib.suppress(DirectoryError):
            await self.save()
        await asyncio.to_thread(self._database.close)


class SeenDirectory:
    """A directory whose every answer is compared with the newest seen of it."""

    def __init__(self, directory: Directory, seen: Seen) -> None:
        self._directory = directory
        self._seen = seen

    async def state(self) -> DirectoryState:
        return await self._whole(self._directory.state())

    async def owner(self, session_id: str) -> Record | None:
        return await self._record(await self._directory.owner(session_id))

    async def watch(self, session_id: str, seen: Record | None, timeout_s: float) -> Record | None:
        return await self._record(await self._directory.watch(session_id, seen, timeout_s))

    async def claim(self, session_id: str, node: str, nonce: bytes) -> OwnershipToken:
        return await self._token(await self._directory.claim(session_id, node, nonce))

    async def transfer(
        self, session_id: str, token: OwnershipToken, node: str, nonce: bytes
    ) -> OwnershipToken:
        return await self._token(await self._directory.transfer(session_id, token, node, nonce))

    async def takeover(
        self, session_id: str, token: OwnershipToken, node: str, nonce: bytes
    ) -> OwnershipToken:
        return await self._token(await self._directory.takeover(session_id, token, node, nonce))

    async def release(self, session_id: str, token: OwnershipToken) -> None:
        await self._directory.release(session_id, token)

    async def put(self, session_id: str, token: OwnershipToken, value: bytes) -> None:
        await self._directory.put(session_id, token, value)

    async def published(self, session_id: str) -> Published | None:
        return await self._directory.published(session_id)

    async def owned_by(self, node: str) -> list[Ownership]:
        entries = await self._directory.owned_by(node)
        for entry in entries:
            await self._token(entry.token)
        return entries

    async def register(self, node: str, incarnation: bytes, ttl_s: float) -> DirectoryState:
        return await self._whole(self._directory.register(node, incarnation, ttl_s))

    async def renew(self, node: str, incarnation: bytes, ttl_s: float) -> DirectoryState:
        state = await self._whole(self._directory.renew(node, incarnation, ttl_s))
        await self._seen.save()
        return state

    async def expire(self, node: str, incarnation: bytes) -> None:
        await self._directory.expire(node, incarnation)

    async def lease(self, node: str) -> NodeLease | None:
        return await self._directory.lease(node)

    async def close(self) -> None:
        await self._directory.close()

    async def _whole(self, asked: Awaitable[DirectoryState]) -> DirectoryState:
        """The directory's own state must not be older than what was seen before it was asked."""
        before = self._seen.all()
        state = await asked
        self._seen.require_known(state.directory_id, state.generation)
        generation, revision = before.get(state.directory_id, (0, 0))
        if (state.generation, state.revision) < (generation, revision):
            raise DirectoryWentBackError(
                f"directory: at generation {state.generation}, revision {state.revision}, but "
                f"{generation}, {revision} was seen; adopt it (kvnode directory adopt URL)"
            )
        await self._seen.note(state.directory_id, state.generation, state.revision)
        return state

    async def _record(self, record: Record | None) -> Record | None:
        # A tombstone keeps the generation that it was made in.
        if isinstance(record, Ownership):
            await self._token(record.token)
        return record

    async def _token(self, token: OwnershipToken) -> OwnershipToken:
        """Every entry carries the directory's present generation; it never falls."""
        self._seen.require_known(token.directory_id, token.generation)
        generation, _ = self._seen.highest(token.directory_id)
        if token.generation < generation:
            raise DirectoryWentBackError(
                f"directory: generation {token.generation} is below {generation}, which was seen "
                "before; adopt it (kvnode directory adopt URL)"
            )
        await self._seen.note(token.directory_id, token.generation, token.revision)
        return token


def _read(connection: sqlite3.Connection) -> list[tuple[bytes, tuple[int, int]]]:
    rows = connection.execute("SELECT directory_id, generation, revision FROM seen")
    return [(directory_id, (generation, revision)) for directory_id, generation, revision in rows]


def _write(connection: sqlite3.Connection, risen: dict[bytes, tuple[int, int]]) -> None:
    connection.executemany(
        """INSERT INTO seen (directory_id, generation, revision) VALUES (?, ?, ?)
           ON CONFLICT (directory_id) DO UPDATE SET
           generation = excluded.generation, revision = excluded.revision""",
        [(directory_id, *seen) for directory_id, seen in risen.items()],
    )
