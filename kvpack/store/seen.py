"""Tables of ids that may be larger than memory should be: kept in a private database.

SQLite keeps it in a temporary file that has no name and goes with the process, and of it at most a
few MiB in memory. What is looked at is then bounded by the disk, not by the size of a store.
"""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Final

#: Pages of the database that stay in memory, in KiB.
_CACHE_KIB: Final = 8 << 10

_SETTINGS: Final = (
    "PRAGMA journal_mode=OFF",
    "PRAGMA synchronous=OFF",
    f"PRAGMA cache_size=-{_CACHE_KIB}",
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
    """Tables of ids, each id with a value. A context manager: nothing of it stays."""

    def __init__(self) -> None:
        # "": a temporary file of its own, removed by the system when it is closed.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for setting in _SETTINGS:
            self._database.execute(setting)

    def __enter__(self) -> IdTables:
        return self

    def __exit__(self, *raised: object) -> None:
        self._database.close()

    def add(self, table: Table, key: bytes, value: bytes | int = 0) -> bool:
        """Add ``key``; False where it was there, which then keeps its value."""
        return self._database.execute(_ADD, (_in(table, key), value)).rowcount > 0

    def add_all(self, table: Table, keys: Iterable[bytes]) -> None:
        """Add ``keys``, without values."""
        self._database.executemany(_ADD, ((_in(table, key), 0) for key in keys))

    def set(self, table: Table, key: bytes, value: bytes | int) -> None:
        """Give ``key``, if it is there, another value."""
        self._database.execute(_SET, (value, _in(table, key)))

    def has(self, table: Table, key: bytes) -> bool:
        """Whether ``key`` is there."""
        return self._database.execute(_GET, (_in(table, key),)).fetchone() is not None

    def number(self, table: Table, key: bytes) -> int | None:
        """The number that ``key`` has; None where it is not there."""
        found = self._database.execute(_GET, (_in(table, key),)).fetchone()
        return None if found is None else int(found[0])

    def bytes_of(self, table: Table, key: bytes) -> bytes | None:
        """The bytes that ``key`` has; None where it is not there."""
        found = self._database.execute(_GET, (_in(table, key),)).fetchone()
        return None if found is None else bytes(found[0])

    def keys(self, table: Table) -> Iterator[bytes]:
        """All keys in order, a thousand at a time; what comes before the last is left out."""
        after, end = bytes([table]), bytes([table + 1])
        while rows := self._database.execute(_NEXT, (after, end)).fetchall():
            for (key,) in rows:
                yield key[1:]
            after = rows[-1][0]


def _in(table: Table, key: bytes) -> bytes:
    return bytes([table]) + key
