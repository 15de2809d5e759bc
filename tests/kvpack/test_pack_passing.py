"""Chunks that are given away by several threads are those that one reads, and no others."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import pytest
from pack_kit import KEYRING, pack

from kvpack.bundle import BundleReader
from kvpack.chunk import ChunkReference, OpenedChunk
from kvpack.errors import KvpackError


@pytest.mark.parametrize("threads", [None, 1, 2])
def test_passed_chunks_are_the_same_and_take_few_buffers(
    tmp_path: Path, threads: int | None
) -> None:
    data, path = pack(513), tmp_path / "a"
    path.write_bytes(data)
    whole = [
        (o.reference, bytes(o.plaintext)) for o in BundleReader(io.BytesIO(data), KEYRING).chunks()
    ]
    passed: list[tuple[ChunkReference, bytes]] = []
    buffers = set()

    def take(opened: OpenedChunk) -> None:
        passed.append((opened.reference, bytes(opened.plaintext)))
        if opened.reference.has_rows:
            assert opened.plaintext.readonly
            buffers.add(id(opened.plaintext.obj))

    BundleReader(io.BytesIO(data), KEYRING).pass_chunks(take, threads=threads)
    assert passed == whole
    # It grows to the longest chunk and is used again: fewer buffers than chunks of rows.
    assert len(buffers) < sum(reference.has_rows for reference, _ in whole)
    passed.clear()
    told: list[int] = []
    with BundleReader.open(path, KEYRING) as reader:
        reader.pass_chunks(take, told.append, threads=threads)
        assert sum(told) == reader.index.footer.chunks_bytes
    key = [reference for reference, _ in whole].index
    assert sorted(passed, key=lambda one: key(one[0])) == whole
    others = [one for one in passed if not one[0].has_rows]
    assert passed[-len(others) :] == others == [one for one in whole if not one[0].has_rows]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_changed_byte_stops_what_passes_chunks_where_it_stops_the_others(
    tmp_path: Path, threads: int
) -> None:
    good, path = pack(513), tmp_path / "a"
    for place in range(0, len(good), len(good) // 60):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        said = []
        for read in (
            lambda reader: list(reader.chunks()),
            lambda reader: reader.pass_chunks(lambda _: None, threads=threads),
        ):
            with pytest.raises(KvpackError) as refusal, BundleReader.open(path, KEYRING) as reader:
                read(reader)
            said.append(str(refusal.value))
        assert said[0] == said[1], place


def test_what_takes_chunks_may_stop_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(pack(2000))

    def refuse(_: OpenedChunk) -> None:
        raise ZeroDivisionError

    for threads in (1, 2):
        with BundleReader.open(path, KEYRING) as reader, pytest.raises(ZeroDivisionError):
            reader.pass_chunks(refuse, threads=threads)


def test_what_one_thread_cannot_take_stops_the_other(tmp_path: Path) -> None:
    """Whatever it is: a worker's error of no kind that chunks have ends the caller's share, too."""
    path, failed, taken = tmp_path / "a", threading.Event(), []
    path.write_bytes(pack(4000))

    def take(opened: OpenedChunk) -> None:
        if threading.current_thread() is not threading.main_thread():
            failed.set()
            raise MemoryError
        assert failed.wait(30)
        time.sleep(0.02)  # The other is at its end by then.
        taken.append(opened.reference)

    with BundleReader.open(path, KEYRING) as reader:
        rows = sum(reference.has_rows for reference in reader.manifest.references)
        with pytest.raises(MemoryError):
            reader.pass_chunks(take, threads=2)
    assert rows >= 8 and len(taken) <= rows // 2
