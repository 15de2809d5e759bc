"""What a source over a socket waits for, and what it counts as sent: pieces, not room for them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from node_support import run

from kvpack.chunk import ChunkClass
from node.config import Address
from node.dataplane import blocking, socket_call
from node.dataplane.frames import FRAME_BYTES, HELLO_BYTES, Tags, read_frame_header
from node.dataplane.offered import Offered
from node.dataplane.options import Plane
from node.dataplane.socket_call import SocketCall
from node.errors import PeerUnavailableError
from node.migration import feed as feed_module
from node.migration.feed import Feed
from node.migration.sealing import Sealed
from node.migration.timeline import Timeline
from node.migration.wire import Meter
from node.pb.v1 import migration_pb2 as pb

KEY = b"k" * 32
PIECE_BYTES = 2 << 20
STEP_BYTES = PIECE_BYTES // 4


class Target(threading.Thread):
    """Reads a stream at the pace of ``before_step``, then answers if ``answers``."""

    def __init__(self, before_step, *, answers=True):
        super().__init__(daemon=True)
        self.listener = socket.socket()
        # Before it listens: so little is under way that pieces lie with the source.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(1)
        self.before_step, self.answers, self.pieces = before_step, answers, 0
        self.over = threading.Event()

    def offered(self):
        address = Address("127.0.0.1", self.listener.getsockname()[1])
        return Offered(Plane.SOCKET, "target", address, 1, bytes(32), KEY)

    def run(self):
        connection, _ = self.listener.accept()
        with self.listener, connection, contextlib.suppress(OSError):
            blocking.fill(connection, memoryview(bytearray(HELLO_BYTES)))
            tags, header = Tags(KEY), memoryview(bytearray(FRAME_BYTES))
            while True:
                blocking.fill(connection, header)
                length, tag = read_frame_header(header)
                piece = memoryview(bytearray(length))
                for start in range(0, length, STEP_BYTES):
                    self.before_step()
                    blocking.fill(connection, piece[start : start + STEP_BYTES])
                tags.require(tag, piece)
                if not length:
                    break
                self.pieces += 1
            if self.answers:
                connection.sendall(tags.taken())
            self.over.wait(20.0)


class Tape:
    layout, cut = None, 1

    def needs_cut(self, index):
        return index == 2


async def push(target, count, on_written=None, *, ends=True):
    """Write ``count`` chunks as a move does; gives the timeline, also where it failed.

    If not ``ends``, no more come and no end, as from a producer that waits until they have left.
    """
    timeline = Timeline(time.monotonic())
    producer = SimpleNamespace(tape=Tape(), watch=lambda _: None, manifest=lambda _: b"m")
    written = [0]

    def report():
        written[0] += 1
        if on_written is not None:
            on_written(written[0], timeline)

    feed = Feed(producer, timeline, report)
    feed._references = []
    left = iter(range(count))

    async def take():
        await asyncio.sleep(0)
        index = next(left, None)
        if index is None:
            return None if ends else await asyncio.Event().wait()
        reference = SimpleNamespace(
            seal_id=b"", chunk_class=ChunkClass.FULL, plain_bytes=PIECE_BYTES
        )
        return Sealed(index, bytes(PIECE_BYTES), reference)

    async def taken():
        await asyncio.sleep(0)
        return count

    stub = SimpleNamespace(push=lambda timeout: SocketCall(target.offered(), taken, Meter()))
    target.start()
    failure = None
    try:
        await feed._push(stub, pb.TransferRef(), take, "target")
    except PeerUnavailableError as error:
        failure = error
    target.over.set()
    return timeline, failure


@pytest.fixture
def bounds(monkeypatch):
    """A second for a piece, and half of one for 2 MiB besides."""
    monkeypatch.setattr(feed_module, "STALL_S", 1.0)
    monkeypatch.setattr(blocking, "STALL_S", 1.0)
    monkeypatch.setattr(blocking, "FLOOR_BYTES_PER_S", 4 << 20, raising=False)
    monkeypatch.setattr(socket_call, "_LOOK_S", 0.05, raising=False)


def test_a_link_that_takes_each_piece_in_time_is_kept_however_many_wait(bounds, monkeypatch):
    """Six pieces are ahead, and with what the kernel holds they take longer than one may."""
    monkeypatch.setattr(feed_module, "LOOK_S", 0.05, raising=False)
    target, told_s = Target(lambda: time.sleep(0.1)), []
    timeline, failure = run(push(target, 11, lambda *_: told_s.append(time.monotonic())))
    told_s.append(time.monotonic())
    assert failure is None and target.pieces == 12
    # Whoever watches hears of pieces that leave while a write or the answer is waited for.
    assert max(after - before for before, after in itertools.pairwise(told_s)) < 1.5
    assert timeline.payload_bytes == 11 * PIECE_BYTES


@pytest.mark.parametrize(
    ("stops_at", "count"),
    [(3, 10), (3, 4), (999, 10)],
    ids=["in a piece", "in one of the last that there are", "before its answer"],
)
def test_a_target_that_stops_is_left_within_the_bound_of_one_piece(bounds, stops_at, count):
    steps = iter(range(1000))
    gate = threading.Event()

    def before_step():
        if next(steps) == stops_at:
            gate.wait(20.0)

    target = Target(before_step, answers=False)
    start = time.monotonic()
    timeline, failure = run(push(target, count, ends=count == 10))
    gate.set()
    assert "does not read any more" in str(failure)
    assert 1.0 < time.monotonic() - start < 8.0
    if stops_at == 3:
        assert timeline.payload_bytes < 5 * PIECE_BYTES


def test_what_lies_with_the_source_is_not_sent_and_has_the_moment_of_its_sending():
    reads = threading.Event()
    target = Target(lambda: reads.wait(20.0))
    found = {}

    def on_written(number, timeline):
        if number == 6 and not found:
            # Six writes have returned. The kernel may have taken a few MiB of them.
            found["sent"] = timeline.payload_bytes
            timeline.zero_s = time.monotonic()
            reads.set()

    timeline, failure = run(push(target, 6, on_written))
    assert failure is None
    assert found["sent"] <= 4 * PIECE_BYTES
    assert timeline.payload_bytes == 6 * PIECE_BYTES
    assert timeline.payload_bytes_after_zero >= 2 * PIECE_BYTES
    moments = [one.at_s for one in timeline.sent]
    assert moments == sorted(moments)
