"""The ``sqlite:`` directory: one file, for nodes of one machine."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from kvpack import limits
from node import directory_tables as tables
from node.clock import BootClock, Clock
from node.database import Database, DatabaseUnavailable, DatabaseUnsettled
from node.directory import (
    WATCH_S_MAX,
    DirectoryState,
    NodeLease,
    Ownership,
    OwnershipToken,
    Published,
    Record,
    check_value,
    lease_ms,
    require_current,
)
from node.errors import DirectoryAmbiguousError, DirectoryError, LeaseLiveError
from node.parked import identity_of

_T = TypeVar("_T")

#: Between two looks of one that watches. SQLite tells nobody of a change in another process.
POLL_S: Final = 0.1

#: Entries that are read at once.
PAGE_MAX: Final = 1000


class SqliteDirectory:
    """A :class:`node.directory.Directory` in one SQLite file.

    Args:
        path: The file; made where there is none.
        clock: What leases are measured by; one for all processes that use the file.

    Raises:
        DirectoryError: The file cannot be used.
    """

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._clock = clock or BootClock()
        try:
            self._database = Database(path, tables.APPLICATION_ID, tables.SCHEMA)
            self._database.run(tables.make_identity)
        except DatabaseUnavailable as error:
            raise DirectoryError(f"directory {path}: {error}") from error

    async def state(self) -> DirectoryState:
        return await self._look(tables.read_state)

    async def owner(self, session_id: str) -> Record | None:
        return await self._look(lambda connection: tables.read_record(connection, session_id))

    async def watch(self, session_id: str, seen: Record | None, timeout_s: float) -> Record | None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + min(timeout_s, WATCH_S_MAX)
        while True:
            found = await self.owner(session_id)
            left_s = end_s - loop.time()
            if found != seen or left_s <= 0:
                return found
            await asyncio.sleep(min(POLL_S, left_s))

    async def claim(self, session_id: str, node: str, nonce: bytes) -> OwnershipToken:
        return await self._run(lambda c: tables.claim(c, session_id, node, nonce))

    async def transfer(
        self, session_id: str, token: OwnershipToken, node: str, nonce: bytes
    ) -> OwnershipToken:
        return await self._run(lambda c: tables.transfer(c, session_id, token, node, nonce))

    async def takeover(
        self, session_id: str, token: OwnershipToken, node: str, nonce: bytes
    ) -> OwnershipToken:
        await self._run(lambda c: self._begin_to_count(c, session_id))

        def work(connection: sqlite3.Connection) -> OwnershipToken:
            record = tables.read_record(connection, session_id)
            if not (isinstance(record, Ownership) and record.node == node):
                entry = require_current(record, session_id, token)
                self._require_lease_over(connection, entry)
            return tables.transfer(connection, session_id, token, node, nonce)

        return await self._run(work)

    async def release(self, session_id: str, token: OwnershipToken) -> None:
        await self._run(lambda c: tables.release(c, session_id, token))

    async def put(self, session_id: str, token: OwnershipToken, value: bytes) -> None:
        check_value(value)
        await self._run(lambda c: tables.put(c, session_id, token, value))

    async def published(self, session_id: str) -> Published | None:
        return await self._look(lambda c: tables.read_published(c, session_id))

    async def owned_by(self, node: str) -> list[Ownership]:
        found: list[Ownership] = []
        while True:
            after = found[-1].session_id if found else ""
            page = await self.owned_page(node, after, PAGE_MAX)
            found += page
            if len(page) < PAGE_MAX:
                return found

    async def owned_page(self, node: str, after: str, size: int) -> list[Ownership]:
        """Up to ``size`` entries of ``node`` after the id ``after``, by session id."""
        return await self._look(lambda c: tables.read_page(c, node, after, min(size, PAGE_MAX)))

    async def register(self, node: str, incarnation: bytes, ttl_s: float) -> DirectoryState:
        length_ms = lease_ms(ttl_s)
        return await self._run(
            lambda c: tables.register(c, node, incarnation, length_ms, self._now_ms())
        )

    async def renew(self, node: str, incarnation: bytes, ttl_s: float) -> DirectoryState:
        length_ms = lease_ms(ttl_s)
        return await self._run(
            lambda c: tables.renew(c, node, incarnation, length_ms, self._now_ms())
        )

    async def expire(self, node: str, incarnation: bytes) -> None:
        await self._run(lambda c: tables.expire(c, node, incarnation, self._now_ms()))

    async def lease(self, node: str) -> NodeLease | None:
        return await self._look(lambda c: tables.read_lease(c, node, self._now_ms()))

    async def adopt(self, above: int = 0) -> DirectoryState:
        """Make every token that was given out so far stale: after a restore, a copy, a new host.

        Args:
            above: Raise the generation over this one, too: the highest that any node has seen.

        Raises:
            LimitError: ``above`` is outside the range of a generation.
        """
        limits.check_range("directory.generation", above, 0, (1 << 62))
        return await self._run(lambda c: tables.adopt(c, above))

    async def close(self) -> None:
        await asyncio.to_thread(self._database.close)

    def _now_ms(self) -> int:
        return int(self._clock.now_s() * 1000)

    def _begin_to_count(self, connection: sqlite3.Connection, session_id: str) -> None:
        record = tables.read_record(connection, session_id)
        if isinstance(record, Ownership) and identity_of(record.node) is not None:
            # No lease ever ends there, and whoever took it over would have nothing to serve.
            raise LeaseLiveError(
                f"session {session_id}: lies in a store; kvnode session restore brings it back"
            )
        if isinstance(record, Ownership):
            tables.begin_to_count(connection, record.node, self._now_ms())

    def _require_lease_over(self, connection: sqlite3.Connection, entry: Ownership) -> None:
        lease = tables.read_lease(connection, entry.node, self._now_ms())
        if lease is None or lease.left_s > 0:
            left = "a while" if lease is None else f"{lease.left_s:.1f} s"
            raise LeaseLiveError(
                f"session {entry.session_id}: the lease of its owner, node {entry.node}, "
                f"runs for another {left}"
            )

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
