"""What a node remembers of its transfers across restarts: numbers it gave out and numbers it saw.

The replay rule is a function of what is remembered (:func:`judge`). For each (epoch, source) there
is a floor and a bounded set of numbers above it: a number at or below the floor that is not open
was used or is too old, so it is refused without having been kept. There is no single maximum:
numbers may arrive in another order than they were given out.
"""

from __future__ import annotations

import asyncio
import enum
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from kvpack import limits
from node.database import Database, DatabaseUnavailable
from node.errors import JournalError, NodeBusyError, ReplayError
from node.migration.table import TARGET_ENDED, TargetState

_T = TypeVar("_T")

#: How far a number may be ahead of the floor before the floor follows it.
REPLAY_SPAN: Final = 1024

#: Transfers of one source that may be open here at once.
OPEN_PER_SOURCE_MAX: Final = 16

DIGEST_BYTES: Final = 32
NUMBER_MAX: Final = (1 << 62) - 1

_APPLICATION_ID: Final = 0x6B766A32  # "kvj2"
_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS given (
        target TEXT NOT NULL, epoch INTEGER NOT NULL, next INTEGER NOT NULL,
        PRIMARY KEY (target, epoch)) STRICT, WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS floor (
        epoch INTEGER NOT NULL, source TEXT NOT NULL, number INTEGER NOT NULL,
        PRIMARY KEY (epoch, source)) STRICT, WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS seen (
        epoch INTEGER NOT NULL, source TEXT NOT NULL, number INTEGER NOT NULL,
        digest BLOB NOT NULL, session_id TEXT NOT NULL, state TEXT NOT NULL,
        request BLOB NOT NULL, minor INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (epoch, source, number)) STRICT, WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS held (
        session_id TEXT PRIMARY KEY, pack TEXT NOT NULL) STRICT, WITHOUT ROWID""",
)


@dataclass(frozen=True, slots=True, order=True)
class TransferKey:
    """Names a transfer on its target: key epoch, source node, and the source's number.

    Raises:
        LimitError: A field is outside its range.
    """

    epoch: int
    source: str
    number: int

    def __post_init__(self) -> None:
        limits.check_range("transfer.epoch", self.epoch, 1, limits.EPOCH_MAX)
        limits.check_name("transfer.source", self.source)
        limits.check_range("transfer.number", self.number, 1, NUMBER_MAX)

    def __str__(self) -> str:
        return f"transfer {self.number} from {self.source} (epoch {self.epoch})"


@dataclass(frozen=True, slots=True)
class Entry:
    """One remembered transfer: what Prepare said, for which session, and its state.

    Attributes:
        key: Names the transfer.
        digest: SHA-256 of the Prepare message.
        session_id: Which session.
        state: How it stands, as far as that is durable.
        request: The Prepare message; empty once the transfer has ended.
        minor: The version of the protocol that was chosen for it.
    """

    key: TransferKey
    digest: bytes
    session_id: str
    state: TargetState
    request: bytes = field(default=b"", repr=False)
    minor: int = 0

    def __post_init__(self) -> None:
        limits.check_range("entry.digest", len(self.digest), DIGEST_BYTES, DIGEST_BYTES, "bytes")


class Verdict(enum.Enum):
    """What the ledger says to a Prepare."""

    NEW = "new"
    AGAIN = "again"


def judge(floor: int, entry: Entry | None, open_count: int, number: int, digest: bytes) -> Verdict:
    """The replay rule. A function of what is remembered and what is asked.

    Args:
        floor: Numbers up to here are spent, but for those still open.
        entry: What is remembered of this number, or None.
        open_count: Transfers of this source and epoch that are open.
        number: The number asked for.
        digest: SHA-256 of the Prepare message.

    Raises:
        ReplayError: The number is spent, or was used for another Prepare.
        NodeBusyError: Too many are open.
    """
    if entry is not None:
        if entry.state in TARGET_ENDED:
            raise ReplayError(f"transfer number {number}: ended as {entry.state.value}")
        if entry.digest != digest:
            raise ReplayError(f"transfer number {number}: open for another Prepare")
        return Verdict.AGAIN
    if number <= floor:
        raise ReplayError(f"transfer number {number}: spent (floor {floor})")
    if open_count >= OPEN_PER_SOURCE_MAX:
        raise NodeBusyError(f"{open_count} transfers of this source are open")
    return Verdict.NEW


class Journal:
    """The journal of one node, in one SQLite file.

    Raises:
        JournalError: The file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._database = Database(path, _APPLICATION_ID, _SCHEMA)
            self._database.run(_add_minor)
        except DatabaseUnavailable as error:
            raise JournalError(f"journal {path}: {error}") from error

    async def next_number(self, target: str, epoch: int) -> int:
        """A transfer number for ``target`` that was never given out before. Durable on return."""

        def work(connection: sqlite3.Connection) -> int:
            (number,) = connection.execute(
                """INSERT INTO given (target, epoch, next) VALUES (?, ?, 2)
                   ON CONFLICT (target, epoch) DO UPDATE SET next = next + 1
                   RETURNING next - 1""",
                (target, epoch),
            ).fetchone()
            return int(number)

        return await self._run(work)

    async def reserve(
        self,
        key: TransferKey,
        digest: bytes,
        session_id: str,
        request: bytes = b"",
        minor: int = 0,
    ) -> Verdict:
        """Enter a Prepare. The one durable write of a transfer that its start has to wait for.

        Raises:
            ReplayError: The number is spent, or was used for another Prepare.
            NodeBusyError: Too many are open.
        """
        entry = Entry(key, digest, session_id, TargetState.OPEN, request, minor)
        return await self._run(lambda connection: _reserve(connection, entry))

    async def record(self, key: TransferKey, state: TargetState, pack: str = "") -> None:
        """Remember how the transfer stands now, and in which pack its session is durable."""

        def work(connection: sqlite3.Connection) -> None:
            name = (key.epoch, key.source, key.number)
            connection.execute(
                """UPDATE seen SET state = ?, request = CASE WHEN ? THEN x'' ELSE request END
                   WHERE epoch = ? AND source = ? AND number = ?""",
                (state.value, state in TARGET_ENDED, *name),
            )
            if pack:
                connection.execute(
                    """INSERT INTO held (session_id, pack)
                       SELECT session_id, ? FROM seen
                       WHERE epoch = ? AND source = ? AND number = ?
                       ON CONFLICT (session_id) DO UPDATE SET pack = excluded.pack""",
                    (pack, *name),
                )

        await self._run(work)

    async def held_packs(self) -> dict[str, str]:
        """Session id -> name of the pack in which it is durable here."""
        return await self._look(
            lambda connection: dict(connection.execute("SELECT session_id, pack FROM held"))
        )

    async def let_go(self, session_id: str, pack: str) -> None:
        """Forget that a session is durable in ``pack``: this node does not own it any more.

        Another pack of the same session stays: it may have come back meanwhile.
        """

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM held WHERE session_id = ? AND pack = ?", (session_id, pack)
            )

        await self._run(work)

    async def find(self, key: TransferKey) -> Entry | None:
        """What is remembered of the transfer; None where nothing is, or not any more."""
        return await self._look(lambda connection: _find(connection, key))

    async def open_entries(self) -> list[Entry]:
        """All transfers that had not ended: after a restart, those whose memory was lost."""

        def work(connection: sqlite3.Connection) -> list[Entry]:
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM seen WHERE state NOT IN (?, ?)",  # noqa: S608 - constant
                _ENDED,
            ).fetchall()
            return [_entry(row) for row in rows]

        return await self._look(work)

    async def close(self) -> None:
        """Close the file."""
        await asyncio.to_thread(self._database.close)

    async def _look(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return await asyncio.to_thread(self._database.look, work)
        except DatabaseUnavailable as error:
            raise JournalError(f"journal: {error}") from error

    async def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return await asyncio.to_thread(self._database.run, work)
        except DatabaseUnavailable as error:
            raise JournalError(f"journal: {error}") from error


_ENDED: Final = (TargetState.COMMITTED.value, TargetState.ABORTED.value)
_COLUMNS: Final = "epoch, source, number, digest, session_id, state, request, minor"


def _add_minor(connection: sqlite3.Connection) -> None:
    """Widen a file that a version before 1.1 made. Such a version goes on with the wider one."""
    columns = connection.execute("PRAGMA table_info(seen)").fetchall()
    if "minor" not in [name for _, name, *_ in columns]:
        connection.execute("ALTER TABLE seen ADD COLUMN minor INTEGER NOT NULL DEFAULT 0")


def _entry(row: tuple[int, str, int, bytes, str, str, bytes, int]) -> Entry:
    epoch, source, number, digest, session_id, state, request, minor = row
    key = TransferKey(epoch, source, number)
    return Entry(key, digest, session_id, TargetState(state), request, minor)


def _find(connection: sqlite3.Connection, key: TransferKey) -> Entry | None:
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM seen"  # noqa: S608 - constant
        " WHERE epoch = ? AND source = ? AND number = ?",
        (key.epoch, key.source, key.number),
    ).fetchone()
    return None if row is None else _entry(row)


def _reserve(connection: sqlite3.Connection, entry: Entry) -> Verdict:
    key = entry.key
    pair = (key.epoch, key.source)
    row = connection.execute(
        "SELECT number FROM floor WHERE epoch = ? AND source = ?", pair
    ).fetchone()
    floor = 0 if row is None else int(row[0])
    (open_count,) = connection.execute(
        "SELECT count(*) FROM seen WHERE epoch = ? AND source = ? AND state NOT IN (?, ?)",
        (*pair, *_ENDED),
    ).fetchone()
    verdict = judge(floor, _find(connection, key), int(open_count), key.number, entry.digest)
    if verdict is Verdict.NEW:
        connection.execute(
            f"INSERT INTO seen ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608 - constant
            (
                *pair,
                key.number,
                entry.digest,
                entry.session_id,
                entry.state.value,
                entry.request,
                entry.minor,
            ),
        )
        _raise_floor(connection, pair, max(floor, key.number - REPLAY_SPAN))
    return verdict


def _raise_floor(connection: sqlite3.Connection, pair: tuple[int, str], floor: int) -> None:
    """Set the floor and forget what ended below it: the floor alone refuses those from now on."""
    connection.execute(
        """INSERT INTO floor (epoch, source, number) VALUES (?, ?, ?)
           ON CONFLICT (epoch, source) DO UPDATE SET number = excluded.number""",
        (*pair, floor),
    )
    connection.execute(
        "DELETE FROM seen WHERE epoch = ? AND source = ? AND number <= ? AND state IN (?, ?)",
        (*pair, floor, *_ENDED),
    )
