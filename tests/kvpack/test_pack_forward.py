"""Forwards and from the footer: one reason and one exit code for every input, good or bad."""

from __future__ import annotations

import io
import itertools
import random

import pytest
from pack_kit import KEYRING, Pipe, draft_snapshot, forward, opened, pack, random_access

from kvpack import limits
from kvpack.bundle import BundleReader, Depth, ForwardReader
from kvpack.errors import AuthenticationError, FormatError, LimitError

_SEED, _CHANGES = 1_618, 600


def _same(data: bytes, depth: Depth = Depth.FULL) -> int:
    one, other = random_access(data, depth=depth), forward(data, depth=depth)
    words = {verdict.reason.replace("over_limit", "malformed") for verdict in (one, other)}
    assert len(words) == 1, (one, other)
    assert one.exit_code == other.exit_code, (one, other)
    return one.exit_code


def _pieces(data: bytes) -> tuple[int, list[int]]:
    """Where the manifest begins, and where each object does."""
    index = BundleReader(io.BytesIO(data), KEYRING).index
    starts, at = [], index.footer.header_bytes
    for reference in index.manifest.references:
        starts.append(at)
        at += reference.object_bytes
    return at, starts


def test_bytes_cut_out_of_any_place_are_one_verdict() -> None:
    good = pack(9, draft=draft_snapshot(9))
    draw = random.Random(_SEED)
    print(f"seed {_SEED}")
    for _ in range(_CHANGES):
        at, size = draw.randrange(len(good)), draw.choice((1, 2, 16, 200, 1000))
        assert _same(good[:at] + good[at + size :]) in (10, 11)
        other = draw.randrange(len(good))
        assert _same(good[:at] + good[other : other + size] + good[at:]) in (10, 11)


def test_two_faults_are_named_in_one_order() -> None:
    good = pack(9)
    end, starts = _pieces(good)
    for first in (*(start + 170 for start in starts), *(start + 130 for start in starts), *starts):
        for second in (end + 40, end + 2, len(good) - 2, len(good) - 60, first + 1):
            bad = bytearray(good)
            bad[first] ^= 1
            bad[second] ^= 1
            for depth in (Depth.FULL, Depth.DEEP):
                assert _same(bytes(bad), depth) in (10, 11), (first, second)


def test_objects_moved_doubled_or_left_out_are_one_verdict() -> None:
    good = pack(300)
    end, starts = _pieces(good)
    bounds = [*starts, end]
    parts = [good[a:b] for a, b in itertools.pairwise(bounds)]
    head, tail = good[: starts[0]], good[end:]
    swapped = [parts[1], parts[0], *parts[2:]]
    for changed in (swapped, parts[1:], parts[:-1], [*parts, parts[-1]], parts[::-1], []):
        bad = head + b"".join(changed) + tail
        assert _same(bad) in (10, 11)
        assert _same(bad, Depth.QUICK) in (10, 11)
    assert _same(head + tail[:4] + b"".join(parts) + tail) == 10
    assert _same(head + b"".join(parts) + tail + tail) == 10


def test_after_a_fault_nothing_more_is_kept_and_the_whole_input_is_read() -> None:
    good = pack(600)
    _, starts = _pieces(good)
    bad = bytearray(good)
    bad[starts[1] + 200] ^= 1
    spool, pipe = io.BytesIO(), Pipe(bytes(bad), 4096)
    with pytest.raises(AuthenticationError, match=r"chunks\[1\]"):
        ForwardReader(pipe, KEYRING, spool)
    assert len(spool.getvalue()) <= starts[2]
    assert pipe.read(1) == b""


class _Endless(io.RawIOBase):
    """A pack whose second object never ends well, and then zeros for ever."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = io.BytesIO(data)
        self.given = 0

    def readinto(self, buffer: memoryview) -> int:
        count = self._data.readinto(buffer) or len(buffer)
        self.given += count
        return count


def test_an_input_without_end_is_given_up_at_the_largest_bundle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = pack(600)
    _, starts = _pieces(good)
    monkeypatch.setattr(limits, "BUNDLE_BYTES_MAX", 64 << 20)
    endless = _Endless(good[: starts[1] + 100])
    with pytest.raises(LimitError, match="stream"):
        ForwardReader(endless, KEYRING)
    assert endless.given <= (64 << 20) + (2 << 20)


def test_a_short_object_is_malformed_both_ways() -> None:
    good = pack(300)
    end, starts = _pieces(good)
    for place in (*(start + 300 for start in starts), end - 1, end - 17):
        bad = good[:place] + good[place + 1 :]
        for verdict in (random_access(bad), opened(bad), forward(bad)):
            assert verdict.reason == "malformed", place


def test_a_header_alone_is_malformed_both_ways() -> None:
    good = pack(9)
    with pytest.raises(FormatError):
        ForwardReader(io.BytesIO(good[:400]), KEYRING)
    assert {_same(good[:size]) for size in range(len(good))} == {10}
