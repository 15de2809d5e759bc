"""One SQLite file with durable transactions: what the directory and the journal stand on.

Write-ahead log, ``synchronous=FULL``: a transaction that was acknowledged survives a power cut. A
failure before the commit changed nothing; a failure of the commit itself leaves it open whether
the transaction happened, and the two are different errors.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

_T = TypeVar("_T")

#: A writer holds the file for about a millisecond; one that waits longer has met a dead disk.
BUSY_TIMEOUT_S: Final = 5.0

_BUSY_PAUSE_S: Final = 0.01


class DatabaseUnavailable(Exception):
    """Nothing was changed."""


class DatabaseUnsettled(DatabaseUnavailable):
    """The commit failed: the transaction may have happened or not."""


class Database:
    """One connection, used by one thread at a time.

    Args:
        path: The file. Made with mode 0600; never a link.
        application_id: Written into a new file and demanded of an existing one.
        schema: Statements that make the tables where they are missing.

    Raises:
        DatabaseUnavailable: The file cannot be used.
    """

    def __init__(self, path: Path, application_id: int, schema: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._make_private(path)
        try:
            self._connection = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._log_ahead()
            self._connection.execute("PRAGMA synchronous=FULL")
        except sqlite3.Error as error:
            raise DatabaseUnavailable(f"{path}: {error}") from error
        self.run(lambda connection: self._prepare(connection, path, application_id, schema))

    def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run ``work`` in one write transaction and make it durable.

        Raises:
            DatabaseUnavailable: Nothing was changed.
            DatabaseUnsettled: The commit failed.
            Exception: What ``work`` raised, whatever it is; nothing was changed.
        """
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                result = work(self._connection)
            except sqlite3.Error as error:
                self._roll_back()
                raise DatabaseUnavailable(str(error)) from error
            except BaseException:
                # Whatever it was: a transaction that stays open refuses every later one.
                self._roll_back()
                raise
            try:
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                raise DatabaseUnsettled(str(error)) from error
            return result

    def look(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run ``work``, which only reads, by one statement: it waits for no writer.

        Raises:
            DatabaseUnavailable: It could not be read.
        """
        with self._lock:
            try:
                return work(self._connection)
            except sqlite3.Error as error:
                raise DatabaseUnavailable(str(error)) from error

    def _log_ahead(self) -> None:
        """Switch to the write-ahead log.

        SQLite does not wait for others here, whatever the timeout: two nodes that begin with a new
        file at once would have one of them fail.
        """
        end = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
                time.sleep(_BUSY_PAUSE_S)
            else:
                return

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    @staticmethod
    def _make_private(path: Path) -> None:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise DatabaseUnavailable(f"{path}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DatabaseUnavailable(f"{path}: expected a regular file")
        finally:
            os.close(descriptor)

    @staticmethod
    def _prepare(
        connection: sqlite3.Connection, path: Path, application_id: int, schema: Sequence[str]
    ) -> None:
        (found,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if found != application_id and (found != 0 or tables != 0):
            raise DatabaseUnavailable(f"{path}: made by another program or version")
        connection.execute(f"PRAGMA application_id={application_id:d}")
        for statement in schema:
            connection.execute(statement)
