"""The book of what was measured: one small SQLite file, bounded, opened when it is first needed.

It holds ids of cuts, numbers and nothing of a text. A measurement that cannot be written down is
lost and said in the log: it never costs an answer.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvpack.errors import KvpackError
from node.database import Database, DatabaseUnavailable
from node.economics.values import CutCost, Prefill, Restored, Tier
from node.records.errors import RecordsError

log = logging.getLogger(__name__)

#: Cuts that are remembered; the ones that were measured last.
CUTS_MAX: Final = 256

#: Restores of one cut out of one tier: enough for a median.
RESTORES_MAX: Final = 15

_APPLICATION_ID: Final = 0x6B766365  # "kvce"
_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS cuts (
        cut_id BLOB PRIMARY KEY, number INTEGER NOT NULL, tokens INTEGER NOT NULL,
        state_bytes INTEGER NOT NULL, first INTEGER, computed_tokens INTEGER, wall_s REAL,
        engine_s REAL) STRICT, WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS restores (
        number INTEGER PRIMARY KEY, cut_id BLOB NOT NULL, tier TEXT NOT NULL,
        seconds REAL NOT NULL) STRICT""",
    "CREATE INDEX IF NOT EXISTS restores_of ON restores (cut_id, tier)",
)

_SEEN: Final = """INSERT INTO cuts (cut_id, number, tokens, state_bytes)
    VALUES (?, (SELECT COALESCE(MAX(number), 0) + 1 FROM cuts), ?, ?)
    ON CONFLICT (cut_id) DO UPDATE SET number = (SELECT MAX(number) + 1 FROM cuts)"""
_COMPUTED: Final = """UPDATE cuts SET first = ?, computed_tokens = ?, wall_s = ?, engine_s = ?
    WHERE cut_id = ?"""
_MORE: Final = """DELETE FROM cuts WHERE cut_id IN
    (SELECT cut_id FROM cuts ORDER BY number DESC LIMIT -1 OFFSET ?)"""
_OF_NO_CUT: Final = "DELETE FROM restores WHERE cut_id NOT IN (SELECT cut_id FROM cuts)"
_OLDER: Final = """DELETE FROM restores WHERE number IN (SELECT number FROM restores
    WHERE cut_id = ? AND tier = ? ORDER BY number DESC LIMIT -1 OFFSET ?)"""


class Book:
    """Measurements of one node. Every call blocks for one transaction; any thread may make it.

    Args:
        path: The file, made with mode 0600 where it is missing.

    Attributes:
        written: Measurements that this process wrote down; who read sees if there are more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._opened: Database | None = None
        self._is_closed = False
        self.written = 0

    def computed(self, cut_id: bytes, tokens: int, state_bytes: int, prefill: Prefill) -> None:
        """Note how a cut was computed here; a later measurement takes the place of an earlier."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(_SEEN, (cut_id, tokens, state_bytes))
            numbers = (prefill.first, prefill.computed_tokens, prefill.wall_s, prefill.engine_s)
            connection.execute(_COMPUTED, (*numbers, cut_id))
            _bound(connection)

        self._note(write)

    def restored(
        self, cut_id: bytes, tokens: int, state_bytes: int, tier: Tier, seconds: float
    ) -> None:
        """Note how long a cut took to bring back."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(_SEEN, (cut_id, tokens, state_bytes))
            connection.execute(
                "INSERT INTO restores (cut_id, tier, seconds) VALUES (?, ?, ?)",
                (cut_id, tier.value, seconds),
            )
            connection.execute(_OLDER, (cut_id, tier.value, RESTORES_MAX))
            _bound(connection)

        self._note(write)

    def read(self) -> tuple[CutCost, ...]:
        """All that is remembered, the deepest cut first.

        Raises:
            RecordsError: It cannot be read.
        """
        try:
            return self._database().run(_read)
        except (DatabaseUnavailable, KvpackError, ValueError) as error:
            raise RecordsError(f"{self._path.name}: {error}") from error

    def close(self) -> None:
        """Close the file; what is measured after that is lost."""
        with self._lock:
            self._is_closed = True
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _note(self, write: Callable[[sqlite3.Connection], None]) -> None:
        try:
            self._database().run(write)
        except DatabaseUnavailable as error:
            log.warning("a measurement is not kept: %s", error)
            return
        with self._lock:
            self.written += 1

    def _database(self) -> Database:
        with self._lock:
            if self._is_closed:
                raise DatabaseUnavailable("the node stops")
            if self._opened is None:
                self._opened = Database(self._path, _APPLICATION_ID, _SCHEMA)
            return self._opened


def _bound(connection: sqlite3.Connection) -> None:
    connection.execute(_MORE, (CUTS_MAX,))
    connection.execute(_OF_NO_CUT)


def _read(connection: sqlite3.Connection) -> tuple[CutCost, ...]:
    found: dict[bytes, dict[Tier, list[float]]] = {}
    for cut_id, tier, seconds in connection.execute(
        "SELECT cut_id, tier, seconds FROM restores ORDER BY number"
    ):
        found.setdefault(cut_id, {}).setdefault(Tier(tier), []).append(seconds)
    costs = []
    for cut_id, tokens, state_bytes, *prefill in connection.execute(
        "SELECT cut_id, tokens, state_bytes, first, computed_tokens, wall_s, engine_s FROM cuts "
        "ORDER BY tokens DESC, cut_id"
    ):
        restores = tuple(
            Restored(tier, tuple(times)) for tier, times in sorted(
                found.get(cut_id, {}).items(), key=lambda item: item[0].value
            )
        )  # fmt: skip
        measured = None if prefill[0] is None else Prefill(*prefill)
        costs.append(CutCost(cut_id, tokens, state_bytes, measured, restores))
    return tuple(costs)
