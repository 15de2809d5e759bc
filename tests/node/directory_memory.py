"""The sqlite: directory in memory and without threads, so that thousands of histories can be run.

Tables, transactions and rules are the production ones; only the file and the thread are gone.
"""

from __future__ import annotations

import sqlite3

from directory_support import FakeClock

from kvpack.errors import KvpackError
from node import directory_tables
from node.directory_sqlite import SqliteDirectory


class MemoryDirectory(SqliteDirectory):
    """As :class:`SqliteDirectory`; every call runs to its end at once."""

    def __init__(self, clock: FakeClock):
        self._clock = clock
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        for statement in directory_tables.SCHEMA:
            self._connection.execute(statement)
        directory_tables.make_identity(self._connection)

    def empty(self, clock: FakeClock):
        """As new, by another clock: making the tables costs more than a whole history."""
        self._clock = clock
        for table in ("ownership", "released", "published", "lease"):
            self._connection.execute(f"DELETE FROM {table}")  # noqa: S608 - constants
        self._connection.execute("UPDATE directory SET generation = 1, revision = 0")
        return self

    async def _look(self, work):
        return work(self._connection)

    async def _run(self, work):
        self._connection.execute("BEGIN")
        try:
            result = work(self._connection)
        except KvpackError:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")
        return result

    async def close(self):
        self._connection.close()


def now(coroutine):
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


def interleavings(*lengths):
    """All orders of the steps of several actors: tuples of actors' numbers."""
    if not any(lengths):
        yield ()
        return
    for actor, length in enumerate(lengths):
        if length:
            fewer = (*lengths[:actor], length - 1, *lengths[actor + 1 :])
            for rest in interleavings(*fewer):
                yield (actor, *rest)
