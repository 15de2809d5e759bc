"""Two processes that begin with one new file at the same moment."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

from node.database import Database, DatabaseUnavailable

ROUNDS, PROCESSES = 60, 4
SCHEMA = ("CREATE TABLE IF NOT EXISTS t (a)",)


def begin(folder: str, together: Barrier) -> None:
    """Open a new file in each round; exit with how often that failed."""
    failed = 0
    for number in range(ROUNDS):
        together.wait(30)
        try:
            Database(Path(folder) / f"{number}.sqlite", 7, SCHEMA).close()
        except DatabaseUnavailable:
            failed += 1
    raise SystemExit(failed)


def test_a_new_file_lets_everybody_begin_who_comes_at_once(tmp_path):
    """SQLite does not wait for others while it switches to the write-ahead log."""
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(PROCESSES)
    processes = [
        context.Process(target=begin, args=(str(tmp_path), together)) for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
