"""The right to delete in a bucket: one at a time, taken over when old, and never used late."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_kit import HEADER, KEYRING, NOW, Session, import_path, save, token_ids, tools

from kvpack.bundle import encode_header
from kvpack.store import (
    Budget,
    CutReader,
    CutWriter,
    GcPolicy,
    HoldKind,
    ObjectData,
    StoreBusyError,
    apply_gc,
    check_store,
    list_cuts,
    names,
    plan_gc,
    release_session,
)
from node.s3.lease import CollectorLease, LeaseTimes
from tests.s3_server import new_store, new_url, store_at

NO_LIMIT = GcPolicy(Budget(1 << 40, 0))
#: The service's clock has whole seconds.
TIMES = LeaseTimes(lease_s=0.5, takeover_s=2.5)
#: Where nobody is to take over, however busy the machine is.
LONG = LeaseTimes(lease_s=0.5, takeover_s=60.0)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def url(s3_server):
    made = new_url()
    with contextlib.closing(new_store(s3_server.endpoint, made)):
        yield made


@pytest.fixture
def two(s3_server, url):
    """The same store as two nodes see it."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                contextlib.closing(store_at(s3_server.endpoint, url, times=TIMES))
            )
            for _ in range(2)
        ]  # fmt: skip


@pytest.fixture
def two_that_wait(s3_server, url):
    """As ``two``; neither takes over from the other while a test lasts."""
    with contextlib.ExitStack() as stack:
        made = [store_at(s3_server.endpoint, url, times=LONG) for _ in range(2)]
        yield [stack.enter_context(contextlib.closing(one)) for one in made]


def lease(store, clock=None, times=TIMES) -> CollectorLease:
    return CollectorLease(store._client, clock or Clock(), times)


def numbers(store) -> list[str]:
    return [item.key for item in store._client.listing("collector", "", 100)]


def test_two_nodes_do_not_collect_at_once_and_a_right_given_back_is_free(two_that_wait) -> None:
    one, other = two_that_wait
    with one.collector(), pytest.raises(StoreBusyError, match="free in"), other.collector():
        raise RuntimeError("two collectors")
    with other.collector():
        pass
    with one.collector():
        pass
    assert len(numbers(one)) == 1


def test_of_many_that_ask_at_once_one_gets_it(two) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(number: int) -> bool:
        try:
            lease(two[number % 2], times=LONG).acquire()
        except StoreBusyError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(8))) == 1


def test_a_holder_renews_half_way_and_stops_when_it_slept_too_long(two) -> None:
    clock = Clock()
    held = lease(two[0], clock)
    held.acquire()
    before = numbers(two[0])
    held.require()
    assert numbers(two[0]) == before
    clock.now_s += 0.3
    held.require()
    assert numbers(two[0]) > before
    # It slept, nobody came: the right is still its own, and it says so first.
    clock.now_s += 1000
    held.require()


def test_whoever_lost_the_right_deletes_nothing_and_cannot_get_between(two) -> None:
    clock = Clock()
    old = lease(two[0], clock)
    old.acquire()
    time.sleep(TIMES.takeover_s + 1.5)
    new = lease(two[1])
    new.acquire()
    for _ in range(3):
        new.release()
        new = lease(two[1])
        new.acquire()
    # The old one's next number is free again, for what it built on was cleared away.
    clock.now_s += 1000
    chunk = names.chunk_name(bytes(32))
    two[0].put_if_absent([ObjectData(chunk, b"x")])
    two[0]._lease = old
    with pytest.raises(StoreBusyError, match="took over"):
        two[0].delete([chunk])
    with pytest.raises(StoreBusyError):
        two[0].delete([chunk])
    two[0]._lease = None
    assert two[1].get(chunk) == b"x" and len(numbers(two[1])) == 1
    new.require()


def test_a_clock_that_the_services_contradicts_takes_nothing_over(two) -> None:
    """The age of a record is the service's own matter: no clock of ours is asked."""
    lease(two[0]).acquire()
    clock = Clock()
    clock.now_s = 1e9
    with pytest.raises(StoreBusyError, match="free in"):
        lease(two[1], clock, LONG).acquire()


def collect(store, now=NOW, policy=NO_LIMIT):
    return apply_gc(store, plan_gc(store, now, policy), now, os.urandom(16), lambda: None)


def test_a_writer_on_another_node_keeps_what_a_collector_was_about_to_take(two) -> None:
    """The collector plans, the writer then relies on the same chunks, the collector goes on."""
    collecting, writing = two
    session = Session(token_ids(700))
    save(collecting, session, 512)
    release_session(collecting, bytes([7]) * 16)
    plan = plan_gc(collecting, NOW, NO_LIMIT)
    assert plan.garbage
    again = Session(token_ids(700))
    with CutWriter(writing, KEYRING, encode_header(HEADER), tools()) as writer:
        grown = again.grow(512)
        chunks, manifest = again.cut()
        writer.add([*grown, *chunks])
        result = apply_gc(collecting, plan, NOW, b"c" * 16, lambda: None)
        cut_id = writer.publish(manifest, b"w" * 16, HoldKind.TURN)
    assert result.spared >= len(manifest.references)
    assert CutReader(writing, KEYRING, cut_id).snapshot().position == 512
    assert list(check_store(collecting, KEYRING, deep=True)) == []


def _frozen_collector(s3_server, url) -> subprocess.Popen[bytes]:
    """A process that collects; it has stopped itself right before its first deletion is sent."""
    here = Path(__file__).parent
    child = subprocess.Popen(
        [
            sys.executable, str(here / "s3_collector_child.py"), s3_server.endpoint, url,
            str(TIMES.lease_s), str(TIMES.takeover_s),
        ],
        env={**os.environ, "PYTHONPATH": import_path(here.parents[2], here)},
    )  # fmt: skip
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return child


def test_a_collector_that_froze_and_was_replaced_takes_nothing_when_it_wakes(
    s3_server, two, url
) -> None:
    session = Session(token_ids(700))
    save(two[0], session, 512)
    release_session(two[0], bytes([7]) * 16)
    child = _frozen_collector(s3_server, url)
    try:
        # What it condemned is needed again: a writer waits for it, and another takes its place.
        with pytest.raises(StoreBusyError):
            save(two[0], Session(token_ids(700)), 512, lineage=b"w" * 16)
        deadline = time.monotonic() + 20
        while True:
            try:
                collect(two[1])
                break
            except StoreBusyError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        cut_id = save(two[0], Session(token_ids(700)), 512, lineage=b"w" * 16)
    finally:
        child.send_signal(signal.SIGCONT)
        code = child.wait(30)
    assert code == 7
    assert CutReader(two[0], KEYRING, cut_id).snapshot().position == 512
    assert list(check_store(two[0], KEYRING, deep=True)) == []
    assert [cut.cut_id for cut in list_cuts(two[1])] == [cut_id]
