"""Pins: a reader says what it reads, so that no collector takes it meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvpack.store import names
from kvpack.store.errors import NotStoredError
from kvpack.store.intent import Intent, end, pin
from kvpack.store.interface import ObjectData, ObjectStore
from kvpack.store.mark import marks_of
from kvpack.store.names import Hold
from kvpack.store.steps import Steps, drive, get, put, stat
from kvpack.store.writer import WriterTools


@contextlib.contextmanager
def pinned_cut(store: ObjectStore, cut_id: bytes, tools: WriterTools) -> Iterator[None]:
    """Keep one cut and all of its chunks while the block runs, at most ``tools.intent_s``.

    Raises:
        NotStoredError: The cut, or one of its chunks, is gone already.
        StoreBusyError: A collector is at work on it.
    """
    intent = Intent(tools.writer_id)
    try:
        expires = int(tools.clock()) + tools.intent_s
        drive(store, _pin_cut(intent, cut_id, expires, tools.pauses_max), tools.pause)
        yield
    finally:
        drive(store, end(intent), tools.pause)


def hold_cut(store: ObjectStore, hold: Hold, tools: WriterTools) -> None:
    """Add a reason to keep a cut that is there: a session forks from it, or uses it again.

    Raises:
        NotStoredError: The cut, or one of its chunks, is gone already.
        StoreBusyError: A collector is at work on it.
    """
    with pinned_cut(store, hold.cut_id, tools):
        drive(store, put([ObjectData(hold.name, b"")]), tools.pause)


def _pin_cut(intent: Intent, cut_id: bytes, expires: int, pauses_max: int) -> Steps[None]:
    name = names.cut_name(cut_id)
    yield from pin(intent, [name], expires, 0, pauses_max)
    marks = marks_of((yield from get(name)), cut_id)
    pairs = tuple(marks.chunk_names())
    yield from pin(intent, [n for pair in pairs for n in pair], expires, 0, pauses_max)
    found = yield from stat([n for pair in pairs for n in pair])
    for index, (shared, _) in enumerate(pairs):
        if found[2 * index] is None and found[2 * index + 1] is None:
            raise NotStoredError(shared)
