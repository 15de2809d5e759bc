"""Tables of ids that may be larger than memory should be: kept in a private database.

SQLite keeps it in a temporary file that has no name and goes with the process, and of it at most a
few MiB in memory. What is looked at is then bounded by the disk, not by the size of a store.
"""

from __future__ import annotations

import enum
import errno
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

#: Pages of the database that stay in memory, in KiB.
_CACHE_KIB: Final = 8 << 10

#: Where SQLite looks for a folder of its temporary files, in this order.
_FOLDER_NAMES: Final = ("SQLITE_TMPDIR", "TMPDIR")
_FOLDERS: Final = ("/var/tmp", "/usr/tmp", "/tmp", ".")  # noqa: S108 - its own, not ours

_SETTINGS: Final = (
    "PRAGMA journal_mode=OFF",
    "PRAGMA synchronous=OFF",
    "CREATE TABLE ids (id BLOB PRIMARY KEY, value) WITHOUT ROWID",
    "BEGIN",
)
_ADD: Final = "INSERT OR IGNORE INTO ids VALUES (?, ?)"
_SET: Final = "UPDATE ids SET value = ? WHERE id = ?"
_GET: Final = "SELECT value FROM ids WHERE id = ?"
_NEXT: Final = "SELECT id FROM ids WHERE id > ? AND id < ? ORDER BY id LIMIT 1000"


class Table(enum.IntEnum):
    """What a check has to remember; the first byte of each id in the database."""

    CUTS = 1
    NEEDED = 2
    OPENED = 3
    PARENTS = 4
    PEERS = 5
    SUSPECTS = 6


class IdTables:
    """Tables of ids, each id with a value. A context manager: nothing of it stays.

    Args:
        cache_kib: How much of it stays in memory.

    Raises:
        OSError: The volume of the temporary file is full or broken; every call may say so.
    """

    def __init__(self, cache_kib: int | None = None) -> None:
        # "": a temporary file of its own, removed by the system when it is closed.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for setting in (f"PRAGMA cache_size=-{cache_kib or _CACHE_KIB}", *_SETTINGS):
            self._run(setting)

    def __enter__(self) -> IdTables:
        return self

    def __exit__(self, *raised: object) -> None:
        self._database.close()

    def add(self, table: Table, key: bytes, value: bytes | int = 0) -> bool:
        """Add ``key``; False where it was there, which then keeps its value."""
        return self._run(_ADD, (_in(table, key), value)).rowcount > 0

    def add_all(self, table: Table, keys: Iterable[bytes]) -> None:
        """Add ``keys``, without values."""
        try:
            self._database.executemany(_ADD, ((_in(table, key), 0) for key in keys))
        except sqlite3.OperationalError as error:
            raise _explained(error) from error

    def set(self, table: Table, key: bytes, value: bytes | int) -> None:
        """Give ``key``, if it is there, another value."""
        self._run(_SET, (value, _in(table, key)))

    def has(self, table: Table, key: bytes) -> bool:
        """Whether ``key`` is there."""
        return self._run(_GET, (_in(table, key),)).fetchone() is not None

    def number(self, table: Table, key: bytes) -> int | None:
        """The number that ``key`` has; None where it is not there."""
        found = self._run(_GET, (_in(table, key),)).fetchone()
        return None if found is None else int(found[0])

    def bytes_of(self, table: Table, key: bytes) -> bytes | None:
        """The bytes that ``key`` has; None where it is not there."""
        found = self._run(_GET, (_in(table, key),)).fetchone()
        return None if found is None else bytes(found[0])

    def keys(self, table: Table) -> Iterator[bytes]:
        """All keys in order, a thousand at a time; what comes before the last is left out."""
        after, end = bytes([table]), bytes([table + 1])
        while rows := self._run(_NEXT, (after, end)).fetchall():
            for (key,) in rows:
                yield key[1:]
            after = rows[-1][0]

    def _run(self, statement: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise _explained(error) from error


def _explained(error: sqlite3.OperationalError) -> OSError:
    """What goes wrong with a private database is its volume's: which, and how to take another."""
    is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
    why = "no room left" if is_full else str(error)
    text = f"{_folder()}: {why}: temporary files lie there; TMPDIR names another folder"
    return OSError(errno.ENOSPC if is_full else errno.EIO, text)


def _folder() -> str:
    """The folder that SQLite takes: the first that it could write to."""
    named = [folder for name in _FOLDER_NAMES if (folder := os.environ.get(name))]
    usable = (path for path in (*named, *_FOLDERS) if _is_writable(path))
    return next(usable, "no folder for temporary files")


def _is_writable(path: str) -> bool:
    return Path(path).is_dir() and os.access(path, os.W_OK | os.X_OK)


def _in(table: Table, key: bytes) -> bytes:
    return bytes([table]) + key
