"""Exhaustive: no single changed byte, no truncation and no added byte is ever accepted.

Both readers must not only refuse, they must give the same reason: a verdict that depends on how a
file was read is a way around it.
"""

from __future__ import annotations

import functools
import io

import pytest
from pack_kit import (
    KEY,
    KEYRING,
    LAYOUT,
    NUMERICS,
    Pipe,
    Verdict,
    forward,
    header_for,
    logits_chunk,
    opened,
    pack,
    random_access,
    schedule,
    session_chunk,
    snapshot,
)

from kvpack.bundle import BundleReader, Depth, ForwardReader, read_snapshot, write_snapshot
from kvpack.chunk import Codec
from kvpack.codes import ComponentKind
from kvpack.errors import (
    EXIT_MALFORMED,
    EXIT_NOT_AUTHENTIC,
    FormatError,
    KvpackError,
    LayoutMismatchError,
)
from kvpack.layout import CacheLayout, Encoding, Producer
from kvpack.manifest import Component, Manifest, seal_manifest
from kvpack.snapshot import SessionCacheSnapshot, Tile

_PLAIN = (1, 0x80, 0xFF)
#: Each bit alone, and the change that turns a chunk's magic into a manifest's and back.
_THOROUGH = (1, 2, 4, 8, 16, 32, 64, 128, 255, ord("C") ^ ord("M"))


def test_the_compressed_pack_has_a_compressed_chunk() -> None:
    references = BundleReader(io.BytesIO(_pack("compressed")), KEYRING).manifest.references
    assert {reference.codec for reference in references} == {Codec.RAW, Codec.ZSTD_SPLIT}


@functools.cache
def _pack(name: str) -> bytes:
    if name == "nothing":
        return pack(0)
    if name == "whole":
        return pack(9, components=(logits_chunk(9), session_chunk(9)))
    # Zero rows compress, so this pack has chunks of the second codec.
    layout = CacheLayout(LAYOUT.layers[1:2], Encoding.F16LE, 4096)
    return _compressed(layout)


def _compressed(layout: CacheLayout) -> bytes:
    noisy = snapshot(64, layout)
    flat = tuple(Tile(tile.spec, bytes(len(tile.data))) for tile in noisy.tiles)
    value = SessionCacheSnapshot(layout, noisy.producer, 64, noisy.token_ids, flat)
    sink = io.BytesIO()
    write_snapshot(
        sink, KEY, header_for(layout), value, NUMERICS, schedule(64), codec=Codec.ZSTD_SPLIT
    )
    return sink.getvalue()


def _refused(data: bytes, what: str) -> tuple[Verdict, Verdict]:
    from_footer, onwards = random_access(data), forward(data)
    assert not from_footer.accepted, f"{what}: accepted from the footer"
    assert not onwards.accepted, f"{what}: accepted forwards"
    for verdict in (from_footer, onwards):
        assert verdict.exit_code in (EXIT_MALFORMED, EXIT_NOT_AUTHENTIC), (what, verdict)
    return from_footer, onwards


def _refused_alike(data: bytes, what: str) -> Verdict:
    from_footer, onwards = _refused(data, what)
    alike = (from_footer.reason, from_footer.exit_code) == (onwards.reason, onwards.exit_code)
    assert alike, (what, from_footer, onwards)
    return from_footer


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("nothing", _THOROUGH),
        ("compressed", (0xFF,)),
        ("whole", (0x80,)),
        pytest.param("compressed", _PLAIN, marks=pytest.mark.slow),
        pytest.param("whole", _PLAIN, marks=pytest.mark.slow),
    ],
)
def test_every_changed_byte_is_refused_alike_by_both_readers(
    name: str, changes: tuple[int, ...]
) -> None:
    good = _pack(name)
    assert random_access(good).accepted
    assert forward(good).accepted
    for offset in range(len(good)):
        for change in changes:
            bad = bytearray(good)
            bad[offset] ^= change
            _refused_alike(bytes(bad), f"byte {offset} ^ {change}")


def test_every_changed_byte_is_refused_when_chunks_are_read_and_not_only_checked() -> None:
    good = _pack("whole")
    for offset in range(len(good)):
        bad = bytearray(good)
        bad[offset] ^= 0x10
        assert not opened(bytes(bad)).accepted, offset


@pytest.mark.parametrize("name", ["nothing", "compressed", "whole"])
def test_every_truncation_is_malformed_for_both_readers(name: str) -> None:
    good = _pack(name)
    for length in range(len(good)):
        verdict = _refused_alike(good[:length], f"{length} bytes")
        assert verdict.exit_code == EXIT_MALFORMED, (length, verdict)


@pytest.mark.parametrize("name", ["nothing", "whole"])
def test_appended_bytes_are_malformed_for_both_readers(name: str) -> None:
    good = _pack(name)
    for tail in (b"\0", b"\n", b"\xff" * 72, good[-72:], good, bytes(1 << 20)):
        assert _refused_alike(good + tail, f"{len(tail)} more").exit_code == EXIT_MALFORMED


def test_a_run_of_zeros_anywhere_is_refused() -> None:
    # A run damages several fields at once: each reader names the first that it comes to.
    good = _pack("whole")
    for start in range(0, len(good) - 64, 16):
        _refused(good[:start] + bytes(64) + good[start + 64 :], f"zeros at {start}")


def test_removed_doubled_and_swapped_objects_are_refused_alike() -> None:
    good = _pack("whole")
    index = BundleReader(io.BytesIO(good), KEYRING).index
    objects = list(BundleReader(io.BytesIO(good), KEYRING).objects())
    head, tail = good[: index.footer.header_bytes], good[index.footer.manifest_offset :]
    for number in range(len(objects)):
        without = objects[:number] + objects[number + 1 :]
        doubled = [*objects[:number], objects[number], *objects[number:]]
        swapped = [*objects]
        swapped[number - 1], swapped[number] = swapped[number], swapped[number - 1]
        for changed in (without, doubled, swapped):
            _refused_alike(head + b"".join(changed) + tail, f"objects around {number}")


def test_quick_reads_no_payload_and_still_finds_every_change_elsewhere() -> None:
    good = _pack("whole")
    index = BundleReader(io.BytesIO(good), KEYRING).index
    payload: set[int] = set()
    offset = index.footer.header_bytes
    for reference in index.manifest.references:
        end = offset + reference.object_bytes
        payload |= set(range(offset + reference.header_bytes, end))
        offset = end
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 4
        found = not random_access(bytes(bad), depth=Depth.QUICK).accepted
        assert found is (place not in payload), place
        assert found is not forward(bytes(bad), depth=Depth.QUICK).accepted, place


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_whole_byte_by_byte_and_random_order_reads_agree(piece: int) -> None:
    good = _pack("whole")
    reader = BundleReader(io.BytesIO(good), KEYRING)
    whole = [bytes(chunk.plaintext) for chunk in reader.chunks()]
    backwards = [bytes(reader.read_chunk(i).plaintext) for i in reversed(range(len(whole)))]
    assert backwards[::-1] == whole

    piped = ForwardReader(Pipe(good, piece), KEYRING, io.BytesIO())
    assert [bytes(chunk.plaintext) for chunk in piped.chunks()] == whole
    assert piped.manifest == reader.manifest


class _Spy(io.BytesIO):
    """A spool that must stay unread until the stream has ended."""

    read = False

    def readinto(self, buffer: memoryview) -> int:
        self.read = True
        return super().readinto(buffer)


def test_a_forward_reader_releases_nothing_of_a_pack_that_ends_badly() -> None:
    good = _pack("whole")
    spool = _Spy()
    with pytest.raises(FormatError, match=r"footer\.magic"):
        ForwardReader(io.BytesIO(good + b"\0"), KEYRING, spool)
    assert not spool.read

    reader = ForwardReader(io.BytesIO(good), KEYRING)
    with pytest.raises(RuntimeError, match="without a spool"):
        reader.chunks()


def test_a_refused_pack_gives_no_snapshot() -> None:
    bad = bytearray(_pack("whole"))
    bad[-200] ^= 1
    with pytest.raises(KvpackError):
        read_snapshot(BundleReader(io.BytesIO(bytes(bad)), KEYRING))


def test_a_pack_of_no_tokens_is_good_and_one_without_its_rows_is_not() -> None:
    assert random_access(_pack("nothing")).accepted
    value = read_snapshot(BundleReader(io.BytesIO(_pack("nothing")), KEYRING))
    assert (value.position, value.tiles, value.token_ids) == (0, (), ())

    index = BundleReader(io.BytesIO(_pack("nothing")), KEYRING).index
    target = Component(ComponentKind.TARGET, index.identity_digest)
    rowless = Manifest(Producer.ENGINE, 3, NUMERICS, schedule(3), (), (target,))
    with pytest.raises(LayoutMismatchError, match="token_ids"):
        seal_manifest(KEY, index.header_bytes, rowless)
