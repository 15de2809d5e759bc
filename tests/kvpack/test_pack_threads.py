"""Several chunks at a time: the verdict, and of several faults the first, are those of one."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pack_kit import HEADER, KEY, KEYRING, NUMERICS, header_for, schedule, snapshot

from kvpack.bundle import BundleReader, Depth, snapshots, verify_signed, write_snapshot
from kvpack.bundle.in_order import THREADS_MAX, in_order, thread_count, verdict_of_all
from kvpack.bundle.source import PlacedSource
from kvpack.bundle.writer import require_same_references
from kvpack.chunk import Codec, seal
from kvpack.errors import AuthenticationError, FormatError, KvpackError, LimitError
from kvpack.snapshot import SessionCacheSnapshot
from kvpack.verify import verify_bundle, verify_signature

SIGNER = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)
PUBLIC = SIGNER.public_key().public_bytes_raw()
POSITION = 600


def _signed(position: int = POSITION, codec: Codec = Codec.RAW) -> bytes:
    return _written(snapshot(position), codec)


def _written(state: SessionCacheSnapshot, codec: Codec = Codec.RAW) -> bytes:
    sink = io.BytesIO()
    header = header_for(state.layout)
    write_snapshot(
        sink, KEY, header, state, NUMERICS, schedule(state.position), codec=codec, signer=SIGNER
    )
    return sink.getvalue()


def _said(check: Callable[[], object]) -> str:
    try:
        check()
    except KvpackError as error:
        return f"{error.reason}: {error}"
    return "good"


def _verdicts(path: Path, data: bytes) -> dict[str, str]:
    """What each way says of ``data``; ``path`` holds it."""
    said = {}
    for threads in (1, THREADS_MAX):
        for depth in (Depth.FULL, Depth.DEEP):
            said[f"{depth.value} {threads}"] = _said(
                lambda d=depth, t=threads: verify_bundle(path, KEYRING, d, threads=t)
            )
            said[f"{depth.value} from memory"] = _said(
                lambda d=depth: BundleReader(io.BytesIO(data), KEYRING).check(d)
            )
        said[f"signer {threads}"] = _said(
            lambda t=threads: verify_signature(path, PUBLIC, threads=t)
        )
    return said


def test_two_threads_say_of_every_changed_byte_what_one_says(tmp_path: Path) -> None:
    good, path = _signed(), tmp_path / "a"
    path.write_bytes(good)
    assert set(_verdicts(path, good).values()) == {"good"}
    step = max(1, len(good) // 80)
    for place in range(0, len(good), step):
        bad = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        path.write_bytes(bad)
        said = _verdicts(path, bad)
        for depth in ("full", "deep"):
            alike = {said[f"{depth} {way}"] for way in ("1", "2", "from memory")}
            assert len(alike) == 1 and alike != {"good"}, (place, alike)
        assert said["signer 1"] == said["signer 2"]


def test_of_two_faults_the_first_in_the_file_is_named(tmp_path: Path) -> None:
    data, path = bytearray(_signed()), tmp_path / "a"
    reader = BundleReader(io.BytesIO(bytes(data)), KEYRING)
    first = reader.index.footer.header_bytes
    lengths = [reference.object_bytes for reference in reader.manifest.references]
    data[first + lengths[0] - 1] ^= 1  # The tag of the first,
    data[first + lengths[0]] ^= 1  # and the magic of the second, which is met while it is checked.
    path.write_bytes(data)
    for threads in (1, THREADS_MAX):
        for depth in (Depth.FULL, Depth.DEEP):
            said = _said(lambda d=depth, t=threads: verify_bundle(path, KEYRING, d, threads=t))
            assert "chunks[0]: not authentic under this key (tag)" in said


def test_a_file_cut_short_under_two_threads_is_an_error_and_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fill, reads = tmp_path / "a", PlacedSource.fill, []

    def cut_then_fill(source: PlacedSource, view: memoryview) -> None:
        reads.append(len(view))
        if len(reads) == 4:
            os.truncate(path, 2000)
        fill(source, view)

    monkeypatch.setattr(PlacedSource, "fill", cut_then_fill)
    for check in (
        lambda: verify_bundle(path, KEYRING, Depth.DEEP, threads=2),
        lambda: verify_signature(path, PUBLIC, threads=2),
    ):
        path.write_bytes(_signed(4096))
        reads.clear()
        with pytest.raises(FormatError, match="more bytes"):
            check()


@pytest.mark.parametrize("threads", [1, THREADS_MAX])
def test_progress_adds_up_to_all_chunks(tmp_path: Path, threads: int) -> None:
    path, told = tmp_path / "a", []
    path.write_bytes(_signed(4096))
    verify_bundle(path, KEYRING, Depth.DEEP, progress=told.append, threads=threads)
    with BundleReader.open(path, KEYRING) as reader:
        assert sum(told) == reader.index.footer.chunks_bytes


def test_of_several_jobs_that_fail_the_first_is_raised_and_no_later_one_begins() -> None:
    begun, both = [], threading.Barrier(2)

    def job(number: int) -> int:
        begun.append(number)
        if number < 2:
            both.wait(30)
        if number == 0:
            time.sleep(0.05)  # The second has failed by then.
        raise FormatError("job", "none", number)

    with pytest.raises(FormatError, match="job: expected none, found 0"):
        verdict_of_all((partial(job, number) for number in range(9)), 2)
    assert sorted(begun) == [0, 1]


def test_an_error_of_what_makes_the_jobs_comes_after_those_of_the_jobs() -> None:
    def jobs(fails: bool) -> Iterator[Callable[[], int]]:
        yield partial(_one, fails)
        raise FormatError("maker", "none", 1)

    for threads in (1, THREADS_MAX):
        for fails, named in ((True, "job"), (False, "maker")):
            with pytest.raises(FormatError, match=f"{named}: expected none"):
                verdict_of_all(jobs(fails), threads)


def _one(fails: bool) -> int:
    if fails:
        time.sleep(0.02)  # Another thread has met the end of the jobs by then.
        raise FormatError("job", "none", 1)
    return 1


def test_a_file_replaced_between_the_two_reads_is_refused(tmp_path: Path) -> None:
    """Both are good, and of the same signer: only that they are two is wrong."""
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(_signed())
    other.write_bytes(_signed(POSITION + 1))
    verify_bundle(other, KEYRING, signer=PUBLIC)
    told = []

    def put_other(byte_count: int) -> None:
        if not told:
            os.replace(other, path)  # noqa: PTH105 - the call that a person's tool makes
        told.append(byte_count)

    with pytest.raises(FormatError, match="the same file all along"):
        verify_bundle(path, KEYRING, signer=PUBLIC, progress=put_other)
    verify_bundle(path, KEYRING, signer=PUBLIC)


def test_a_mismatch_of_references_names_what_differs() -> None:
    ours = BundleReader(io.BytesIO(_signed(9)), KEYRING).manifest.references
    theirs = BundleReader(io.BytesIO(_signed(8)), KEYRING).manifest.references
    changed = (replace(ours[0], content_id=bytes(32)), *ours[1:])
    with pytest.raises(FormatError, match=r"0\]\.content_id: expected [0-9a-f]{16}…, found 0{16}…"):
        require_same_references(ours, changed)
    with pytest.raises(FormatError, match=r"chunks\[0\]\.token_count: expected"):
        require_same_references(ours, (theirs[0], *ours[1:]))
    with pytest.raises(FormatError, match=r"manifest\.references"):
        require_same_references(ours, ours[1:])


def test_results_and_errors_come_in_the_order_of_the_jobs() -> None:
    late = threading.Event()

    def wait() -> str:
        assert late.wait(10)
        return "first"

    def refuse() -> str:
        late.set()
        raise LimitError("second", 1, 2)

    def jobs() -> Iterator[Callable[[], str]]:
        yield wait
        yield refuse
        raise LimitError("what makes the jobs", 1, 2)

    def good_jobs() -> Iterator[Callable[[], str]]:
        yield lambda: "good"
        raise LimitError("what makes the jobs", 1, 2)

    results, before = [], threading.active_count()
    with pytest.raises(LimitError, match="second"), closing(in_order(jobs(), 2)) as found:
        for result in found:
            results.append(result)
    assert results == ["first"]
    assert threading.active_count() == before
    with pytest.raises(LimitError, match="what makes"), closing(in_order(good_jobs(), 2)) as found:
        list(found)


def test_jobs_in_hand_are_bounded() -> None:
    made, gate = [], threading.Event()

    def jobs() -> Iterator[Callable[[], bool]]:
        for number in range(1000):
            made.append(number)
            yield lambda: gate.wait(10)

    with closing(in_order(jobs(), 2)) as found:
        gate.set()
        assert next(found)
        assert len(made) <= 6


def test_small_packs_take_one_thread_and_no_more_than_the_cores() -> None:
    assert thread_count(None, 1 << 20) == 1
    assert 1 <= thread_count(None, 1 << 40) <= THREADS_MAX
    assert thread_count(99, 0) == THREADS_MAX
    if hasattr(os, "sched_getaffinity"):
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(mine)})
        try:
            assert thread_count(None, 1 << 40) == 1
        finally:
            os.sched_setaffinity(0, mine)


def test_a_compressed_pack_is_checked_alike(tmp_path: Path) -> None:
    state = snapshot(POSITION)
    tiles = tuple(type(tile)(tile.spec, bytes(len(tile.data))) for tile in state.tiles)
    state = SessionCacheSnapshot(state.layout, state.producer, POSITION, state.token_ids, tiles)
    path = tmp_path / "a"
    path.write_bytes(_written(state, Codec.ZSTD_SPLIT))
    with BundleReader.open(path, KEYRING) as reader:
        assert any(r.codec is Codec.ZSTD_SPLIT for r in reader.manifest.references)
        reader.check(Depth.DEEP, threads=2)
    assert HEADER.layout == state.layout
    verify_signed(path, PUBLIC, threads=2)


def test_two_threads_seal_the_bytes_that_one_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for threads in (1, THREADS_MAX):
        monkeypatch.setattr(snapshots, "thread_count", lambda asked, size, t=threads: t)
        written.append(_signed())
    assert written[0] == written[1]


def test_a_false_content_id_is_found_by_deep_alone_at_either_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a hostile holder of the key can do: seal rows under the id of others."""
    path = tmp_path / "a"
    true_id = seal.compute_content_id
    with monkeypatch.context() as patched:
        patched.setattr(seal, "compute_content_id", lambda *found: blake3(true_id(*found)).digest())
        path.write_bytes(_signed())
    for threads in (1, THREADS_MAX):
        verify_bundle(path, KEYRING, threads=threads)
        with pytest.raises(AuthenticationError, match=r"chunks\[0\].*content id"):
            verify_bundle(path, KEYRING, Depth.DEEP, threads=threads)
