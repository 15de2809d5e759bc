"""Real processes on a real folder: killed at every call of a save, and many at once."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_kit import (
    HEADER,
    KEY,
    KEYRING,
    NOW,
    Session,
    memory_folder,
    new_store,
    save,
    snapshot,
    state,
    token_ids,
)

from kvpack.errors import KvpackError
from kvpack.store import (
    Budget,
    CutReader,
    GcPolicy,
    LocalStore,
    Severity,
    StoreBusyError,
    apply_gc,
    check_store,
    find_deepest,
    list_cuts,
    open_store,
    plan_gc,
)
from kvpack.store.disk import PosixDisk

IDS = token_ids(700)
_CALLS = ("create", "write", "flush", "link", "unlink", "flush_folder")
LATER = int(time.time()) + 1_000_000


@pytest.fixture
def folder() -> Iterator[Path]:
    """Gone after the test, whatever a child left in it."""
    made = memory_folder()
    yield made
    shutil.rmtree(made)


class Dying(PosixDisk):
    """The process ends at call number ``last``, as kill -9 would end it."""

    def __init__(self, root: Path, last: int) -> None:
        super().__init__(root)
        self.calls = 0
        for name in _CALLS:
            setattr(self, name, self._counted(getattr(self, name), last))

    def _counted(self, call, last: int):
        def counted(*arguments):
            if self.calls == last:
                os._exit(9)
            self.calls += 1
            return call(*arguments)

        return counted


def in_child(work) -> int:
    """Run ``work`` in a process of its own; returns how it ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def collect(store: LocalStore, now: int) -> None:
    policy = GcPolicy(Budget(1 << 40, 0))
    apply_gc(store, plan_gc(store, now, policy), now, os.urandom(16), lambda: None)


def test_a_process_may_be_killed_at_every_call_of_a_save(folder: Path) -> None:
    store = new_store(folder)
    save(store, Session(IDS), 300)
    last, ended = 0, 9
    while ended == 9:
        session = Session(IDS)
        session.grow(300)

        def second(session=session, last=last) -> None:
            dying = LocalStore(Dying(folder / "store", last), "dying")
            save(dying, session, 640, now=NOW + 1)

        ended = in_child(second)
        findings = list(check_store(store, KEYRING))
        assert [f for f in findings if f.severity is Severity.DAMAGE] == []
        found = find_deepest(store, KEYRING, KEY, HEADER, IDS)
        assert found.position in (300, 640)
        rows = CutReader(store, KEYRING, found.cut.cut_id).snapshot()
        assert state(rows) == state(snapshot(IDS[: found.position]))
        collect(store, LATER)
        assert list(check_store(store, KEYRING)) == []
        last += 1
    assert ended == 0 and last > 30
    assert {cut.position for cut in list_cuts(store, KEYRING)} == {300, 640}


def patient(work) -> None:
    """A collector at work on what is needed says "later": whoever saves comes again."""
    end = time.monotonic() + 60
    while True:
        try:
            return work()
        except StoreBusyError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def saver(folder: Path, number: int, rounds: int) -> None:
    store = open_store(folder)
    for turn in range(rounds):
        # Everybody saves one common session, and one of his own.
        common = {"lineage": b"common".ljust(16), "now": NOW}
        patient(lambda common=common: save(store, Session(IDS), 600, **common))
        own = token_ids(400, seed=1 + number)
        mine = {"lineage": bytes([number]) * 16, "now": NOW + turn}
        patient(lambda own=own, mine=mine, at=300 + turn: save(store, Session(own), at, **mine))


def reader(folder: Path, until: float) -> None:
    store = open_store(folder)
    while time.monotonic() < until:
        found = find_deepest(store, KEYRING, KEY, HEADER, IDS)
        if found.cut is not None:
            rows = CutReader(store, KEYRING, found.cut.cut_id).snapshot()
            if state(rows) != state(snapshot(IDS[:600])):
                os._exit(3)


def collector(folder: Path, until: float) -> None:
    store = open_store(folder)
    while time.monotonic() < until:
        try:
            collect(store, NOW)
        except StoreBusyError:
            time.sleep(0.01)


@pytest.mark.timeout(120)
def test_many_savers_readers_and_collectors_on_one_folder(folder: Path) -> None:
    store = new_store(folder)
    until = time.monotonic() + 4
    works = [
        *((lambda n=n: saver(folder / "store", n, 4)) for n in range(6)),
        *((lambda: reader(folder / "store", until)) for _ in range(2)),
        *((lambda: collector(folder / "store", until)) for _ in range(2)),
    ]
    children = []
    for work in works:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work()
                code = 0
            except KvpackError as error:
                print(type(error).__name__, error, flush=True)
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * len(works)
    assert [f for f in check_store(store, KEYRING) if f.reason != "garbage"] == []
    assert store.irregular() == ()
    for number in range(6):
        own = token_ids(400, seed=1 + number)
        assert find_deepest(store, KEYRING, KEY, HEADER, own).position == 303
    assert find_deepest(store, KEYRING, KEY, HEADER, IDS).position == 600


def test_the_collectors_lock_dies_with_its_process(folder: Path) -> None:
    store = new_store(folder)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        with open_store(folder / "store").collector():
            os.write(send, b"x")
            time.sleep(60)
        os._exit(0)
    try:
        os.read(receive, 1)
        with pytest.raises(StoreBusyError), store.collector():
            raise RuntimeError("two collectors")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with store.collector():
        pass
