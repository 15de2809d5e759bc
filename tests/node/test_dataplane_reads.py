"""What the target's thread reads off a socket, in which pieces it comes, and in how many calls."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest
from node_support import run

from node.dataplane import blocking, socket_frames
from node.dataplane.blocking import WAKE_BYTES
from node.dataplane.frames import FRAME_BYTES, DisturbedError, Tags
from node.dataplane.socket_frames import FrameReader

KEY = b"k" * 32

#: Both sides of each border: woken late or not, one part or two.
SIZES = [
    *(WAKE_BYTES + step for step in (-FRAME_BYTES, -1, 0, 1, FRAME_BYTES)),
    1, 2 * WAKE_BYTES, 3 * WAKE_BYTES + 7, 100, 2 * WAKE_BYTES + 1,
]  # fmt: skip


class Counted(socket.socket):
    """A connection that counts what is asked of the system."""

    calls = 0

    def recv_into(self, *arguments):
        self.calls += 1
        return super().recv_into(*arguments)

    def setsockopt(self, *arguments):
        self.calls += 1
        return super().setsockopt(*arguments)


def pair():
    """Both ends of a connection over loopback: the writing one, and the counted one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        writing = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    return writing, Counted(fileno=accepted.detach())


def made(number, size):
    return bytes((number,)) * size


def stream(sizes):
    """The frames of pieces of these sizes, and their end."""
    tags = Tags(KEY)
    pieces = [made(number, size) for number, size in enumerate(sizes)] + [b""]
    return b"".join(tags.frame_header(piece) + piece for piece in pieces)


async def taken(connection, behind=None, there=None):
    """What a reader of ``connection`` takes, until the end of its stream.

    ``behind``: the first piece is taken only when that is set. ``there``: is set with each piece.
    """
    found = []
    reader = FrameReader(connection, Tags(KEY), lambda piece: piece)

    def take(piece):
        if behind is not None:
            behind.wait(10.0)
        found.append(bytes(piece))
        if there is not None:
            there.set()
        return True

    try:
        async with asyncio.timeout(20.0):
            async for burst in reader.bursts():
                await burst(take)
    finally:
        await reader.close()
    return found


@pytest.mark.parametrize("step", [None, FRAME_BYTES - 3, WAKE_BYTES + 11], ids=str)
def test_pieces_come_as_they_were_written_however_the_bytes_come(step):
    sizes = SIZES if step is None or step > 100 else [WAKE_BYTES, 5, WAKE_BYTES + 1, 90]
    data = stream(sizes)
    writing, reading = pair()

    def write():
        # Some bytes around each border alone, so that headers come in two parts, too.
        writing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if step is None:
            writing.sendall(data)
            return
        at, left = 0, list(sizes)
        while at < len(data):
            end = at + (FRAME_BYTES + left.pop(0) if left else FRAME_BYTES)
            for cut in (min(at + step, end), end):
                writing.sendall(data[at:cut])
                at = cut
                time.sleep(0.01)

    thread = threading.Thread(target=write)
    with writing, reading:
        thread.start()
        found = run(taken(reading))
        thread.join()
    assert found == [made(number, size) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    "late", [1, 200 << 10, WAKE_BYTES - 1, WAKE_BYTES, WAKE_BYTES + 1], ids=str
)
def test_a_large_piece_is_there_when_its_last_byte_is_and_waits_for_no_further_one(late):
    # Whoever has copied a part already is not woken for the rest where that is under the mark.
    data = stream([3 * WAKE_BYTES])
    whole = len(data) - FRAME_BYTES
    writing, reading = pair()
    there = threading.Event()
    in_time = []

    def write():
        writing.sendall(data[: whole - late])
        time.sleep(0.3)
        writing.sendall(data[whole - late : whole])
        in_time.append(there.wait(5.0))
        writing.sendall(data[whole:])

    thread = threading.Thread(target=write)
    with writing, reading:
        thread.start()
        found = run(taken(reading, there=there))
        thread.join()
    assert (in_time, found) == ([True], [made(0, 3 * WAKE_BYTES)])


def test_what_lies_there_already_is_read_in_two_calls_for_each_large_piece():
    sizes = [3 * WAKE_BYTES] * 8
    writing, reading = pair()
    reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    behind = threading.Event()

    def write():
        writing.sendall(stream(sizes))
        behind.set()

    thread = threading.Thread(target=write)
    with writing, reading:
        reading.calls = 0
        thread.start()
        found = run(taken(reading, behind))
        thread.join()
        assert [len(piece) for piece in found] == sizes
        # It was five: a header, twice a setting, and two parts. The first and the last ones wait.
        assert reading.calls <= 3 * len(sizes)


@pytest.mark.parametrize("ahead", [5, FRAME_BYTES, FRAME_BYTES + 9])
def test_a_frame_that_began_with_the_piece_before_is_not_waited_for_either(ahead, monkeypatch):
    monkeypatch.setattr(socket_frames, "FRAME_S", 0.3)
    monkeypatch.setattr(socket_frames, "FLOOR_BYTES_PER_S", 1 << 30)
    monkeypatch.setattr(socket_frames, "_LOOK_S", 0.02)
    first = FRAME_BYTES + WAKE_BYTES
    writing, reading = pair()
    with writing, reading:
        writing.sendall(stream([WAKE_BYTES, WAKE_BYTES])[: first + ahead])
        start = time.monotonic()
        with pytest.raises(DisturbedError, match="ended early"):
            run(taken(reading))
        assert 0.2 < time.monotonic() - start < 10.0


def test_nothing_of_a_frame_is_believed_when_the_one_before_was_not_the_sources():
    data = bytearray(stream([WAKE_BYTES, WAKE_BYTES]))
    data[FRAME_BYTES + 7] ^= 1
    # No piece is so long: read first, this would be what ends the stream.
    data[FRAME_BYTES + WAKE_BYTES] = 0xFF
    writing, reading = pair()
    with writing, reading, contextlib.suppress(ConnectionError):
        threading.Thread(target=writing.sendall, args=(bytes(data),), daemon=True).start()
        with pytest.raises(DisturbedError, match="did not write"):
            run(taken(reading))


def test_a_source_that_waits_for_room_hears_at_once_that_its_stream_ended():
    """Whoever has read all that there is closes without a reset, and then room never comes."""
    writing, reading = pair()
    heard = threading.Event()

    def write():
        with contextlib.suppress(OSError):
            writing.sendall(stream([8 * WAKE_BYTES] * 8))
        heard.set()

    with writing:
        with reading:
            threading.Thread(target=write, daemon=True).start()
            assert not heard.wait(0.3)
            blocking.end(reading)
            with pytest.raises(DisturbedError, match="ended early"):
                run(taken(reading))
        assert heard.wait(5.0)
