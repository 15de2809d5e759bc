"""Bundles: round trips, writers, receivers, spools, and what chunk framing costs."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_kit import (
    CONTEXT,
    HEADER,
    IDENTITY,
    KEY,
    KEYRING,
    LAYOUT,
    NUMERICS,
    Pipe,
    forward,
    logits_chunk,
    pack,
    random_access,
    rows,
    schedule,
    session_chunk,
    snapshot,
)

from kvpack.bundle import (
    BundleReader,
    BundleWriter,
    Depth,
    ForwardReader,
    Header,
    decode_header,
    encode_header,
    publish_new,
    read_snapshot,
    write_snapshot,
)
from kvpack.bundle.footer import encode_footer
from kvpack.chunk import ChunkClass, SealContext, open_chunk, seal_component, seal_tile
from kvpack.errors import (
    AuthenticationError,
    FormatError,
    IdentityMismatchError,
    KvpackError,
    LayoutMismatchError,
    LimitError,
    UnknownKeyError,
)
from kvpack.identity import Identity
from kvpack.keys import Keyring, generate_key
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout
from kvpack.manifest import manifest_id, seal_manifest
from kvpack.verify import Expectation, verify_bundle, verify_stream

_AROUND = (0, 1, 2, 4, 5, 6, 7, 9, 11, 255, 256, 257, 260, 261, 511, 512, 513, 1027)


@pytest.mark.parametrize("position", _AROUND)
def test_a_state_comes_back_at_every_edge_of_window_and_grid(position: int) -> None:
    data, value = pack(position), snapshot(position)
    for reader in (
        BundleReader(io.BytesIO(data), KEYRING),
        ForwardReader(Pipe(data, 4096), KEYRING, io.BytesIO()),
    ):
        back = read_snapshot(reader)
        assert (back.position, back.token_ids) == (position, value.token_ids)
        assert back.layout == value.layout
        assert [(t.spec, bytes(t.data)) for t in back.tiles] == [
            (t.spec, bytes(t.data)) for t in value.tiles
        ]
    held = sum(len(tile.data) for tile in value.tiles)
    full = LAYOUT.state_bytes(LayerKind.FULL, position)
    assert held == full + LAYOUT.state_bytes(LayerKind.SWA, position)


def test_writing_twice_gives_equal_files() -> None:
    assert pack(300) == pack(300)


def test_a_receiver_writes_the_very_file_its_source_would_write() -> None:
    components = (logits_chunk(300), session_chunk(300))
    good = pack(300, components=components)
    reader = BundleReader(io.BytesIO(good), KEYRING)
    sink = io.BytesIO()
    writer = BundleWriter(sink, KEY, reader.index.header_bytes)
    for data in reader.objects():
        opened = open_chunk(CONTEXT, data)
        assert writer.add(memoryview(data)) == opened.reference
    footer = writer.finish(reader.index.manifest_blob)
    assert sink.getvalue() == good
    assert footer == reader.index.footer
    assert footer.file_bytes == len(good)


class _Trickle(io.RawIOBase):
    """A sink that takes three bytes at a time, like a full pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = bytearray()

    def write(self, data: bytes) -> int:
        self.taken += bytes(data[:3])
        return len(data[:3])


def test_a_sink_that_takes_parts_gets_everything() -> None:
    sink = _Trickle()
    write_snapshot(sink, KEY, HEADER, snapshot(9), NUMERICS, schedule(9))
    assert bytes(sink.taken) == pack(9)


class _Broken(io.BytesIO):
    def write(self, data: bytes) -> int:
        if self.tell() > 300:
            raise OSError("the disk has gone")
        return super().write(data)


def test_a_writer_is_dead_after_a_failed_write_and_after_its_end() -> None:
    reader = BundleReader(io.BytesIO(pack(9)), KEYRING)
    objects = list(reader.objects())
    writer = BundleWriter(_Broken(), KEY, reader.index.header_bytes)
    with pytest.raises(OSError, match="gone"):
        for data in objects:
            writer.add(data)
    with pytest.raises(RuntimeError):
        writer.add(objects[0])

    writer = BundleWriter(io.BytesIO(), KEY, reader.index.header_bytes)
    for data in objects:
        writer.add(data)
    writer.finish(reader.index.manifest_blob)
    with pytest.raises(RuntimeError):
        writer.add(objects[0])
    with pytest.raises(RuntimeError):
        writer.finish(reader.index.manifest_blob)


def test_a_writer_never_ends_a_pack_whose_manifest_names_other_chunks() -> None:
    reader = BundleReader(io.BytesIO(pack(9)), KEYRING)
    objects = list(reader.objects())
    for wrong, why in [
        (objects[:-1], "3 chunks, found 2"),
        ([*objects, session_chunk(9).object], "3 chunks, found 4"),
        (objects[::-1], r"chunks\[0\]"),
    ]:
        sink = io.BytesIO()
        writer = BundleWriter(sink, KEY, reader.index.header_bytes)
        for data in wrong:
            writer.add(data)
        with pytest.raises(FormatError, match=why):
            writer.finish(reader.index.manifest_blob)
        assert not random_access(sink.getvalue()).accepted
    writer = BundleWriter(io.BytesIO(), KEY, reader.index.header_bytes)
    with pytest.raises(FormatError, match=r"chunk\.object"):
        writer.add(objects[0][:-1])
    with pytest.raises(AuthenticationError):
        writer.finish(reader.index.manifest_blob[:-1] + b"\0")


@settings(max_examples=200)
@given(st.binary(max_size=600), st.sampled_from(["raw", "magic", "prefix", "whole"]))
def test_any_bytes_are_refused_by_both_readers_with_an_error_of_ours(
    data: bytes, start: str
) -> None:
    good = pack(9)
    lead = {"raw": b"", "magic": good[:12], "prefix": good[:28], "whole": good}[start]
    if start == "whole" and not data:
        return
    from_footer, onwards = random_access(lead + data), forward(lead + data)
    assert not from_footer.accepted
    assert not onwards.accepted


@settings(max_examples=200)
@given(st.data())
def test_spliced_packs_are_refused_by_both_readers(data: st.DataObject) -> None:
    one, two = pack(9), pack(11)
    cut, other = data.draw(st.integers(1, len(one) - 1)), data.draw(st.integers(1, len(two) - 1))
    spliced = one[:cut] + two[other:]
    if spliced in (one, two):
        return
    assert not random_access(spliced).accepted
    assert not forward(spliced).accepted


def test_sizes_near_powers_of_two_in_every_length_field_are_refused_in_bounded_memory() -> None:
    good = pack(9)
    footer = len(good) - 72
    chunk = BundleReader(io.BytesIO(good), KEYRING).index.footer.header_bytes
    fields = [(12, 4), (20, 2), (footer + 8, 8), (footer + 16, 8)]
    fields += [(footer + place, 4) for place in (24, 28, 32, 36)]
    fields += [(chunk + place, 4) for place in (12, 16, 20, 24)] + [(chunk + 30, 2)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for place, size in fields:
        for value in (0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1):
            lie = (value % (1 << (8 * size))).to_bytes(size, "little")
            bad = good[:place] + lie + good[place + size :]
            if bad == good:
                continue
            from_footer, onwards = random_access(bad), forward(bad)
            assert not from_footer.accepted, (place, value)
            assert from_footer.reason == onwards.reason, (place, value, from_footer, onwards)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 32 << 10, f"{grown} KiB more were taken"


def test_objects_of_several_epochs_need_all_their_keys() -> None:
    old, new = KEY, generate_key("acme", 2)
    header = Header.of(IDENTITY, 2)
    context = SealContext(new, header.identity_digest, header.layout_digest)
    good = BundleReader(io.BytesIO(pack(9)), KEYRING)
    sink = io.BytesIO()
    writer = BundleWriter(sink, new, encode_header(header))
    for data in good.objects():
        writer.add(data)
    writer.add(seal_component(context, ChunkClass.SESSION, 9, 0, b"\x01new"))
    manifest = replace(good.manifest, references=writer.references)
    writer.finish(seal_manifest(new, encode_header(header), manifest))

    both = Keyring([old, new])
    assert random_access(sink.getvalue(), both).accepted
    assert forward(sink.getvalue(), both).accepted
    for ring in (Keyring([new]), Keyring([old]), Keyring()):
        assert random_access(sink.getvalue(), ring).reason == UnknownKeyError.reason
        assert forward(sink.getvalue(), ring).reason == UnknownKeyError.reason


def _other_models_chunk_inside(good: bytes) -> bytes:
    """A key holder puts an authentic chunk of another model into a pack, and seals everything."""
    reader = BundleReader(io.BytesIO(good), KEYRING)
    foreign = replace(CONTEXT, identity_digest=bytes(32))
    sink = io.BytesIO()
    writer = BundleWriter(sink, KEY, reader.index.header_bytes)
    for data in list(reader.objects())[1:]:
        writer.add(data)
    spec = reader.manifest.references[0].tile_spec()
    writer.add(seal_tile(foreign, rows(spec)))
    manifest = replace(reader.manifest, references=writer.references)
    writer.finish(seal_manifest(KEY, reader.index.header_bytes, manifest))
    return sink.getvalue()


def test_an_authentic_chunk_of_another_model_is_refused_by_both_readers() -> None:
    bad = _other_models_chunk_inside(pack(9))
    for depth in (Depth.FULL, Depth.DEEP):
        verdicts = random_access(bad, depth=depth), forward(bad, depth=depth)
        assert {verdict.reason for verdict in verdicts} == {IdentityMismatchError.reason}
    with pytest.raises(IdentityMismatchError):
        read_snapshot(BundleReader(io.BytesIO(bad), KEYRING))


def test_deep_finds_a_content_id_that_its_sealer_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpack.chunk.seal.compute_content_id", lambda *_: bytes([5]) * 32)
    false = session_chunk(9)
    monkeypatch.undo()
    good = BundleReader(io.BytesIO(pack(9)), KEYRING)
    sink = io.BytesIO()
    writer = BundleWriter(sink, KEY, good.index.header_bytes)
    for data in (*good.objects(), false.object):
        writer.add(data)
    manifest = replace(good.manifest, references=writer.references)
    writer.finish(seal_manifest(KEY, good.index.header_bytes, manifest))
    assert random_access(sink.getvalue()).accepted
    for read in (random_access, forward):
        verdict = read(sink.getvalue(), depth=Depth.DEEP)
        assert (verdict.reason, "content id" in verdict.message) == ("not_authentic", True)


def test_verify_reports_what_it_did_and_holds_expectations(tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    with publish_new(path) as file:
        write_snapshot(file, KEY, HEADER, snapshot(9), NUMERICS, schedule(9))
    report = verify_bundle(path, KEYRING, Depth.DEEP, Expectation(IDENTITY, LAYOUT))
    assert report.description.verified
    assert (report.depth, report.signed) == (Depth.DEEP, False)
    assert [total.plain_bytes for total in report.description.classes] == [90, 100, 36]
    with path.open("rb", buffering=0) as stream:
        assert verify_stream(stream, KEYRING).description == report.description

    other = replace(IDENTITY, weights_digest=bytes(32))
    with pytest.raises(IdentityMismatchError, match="weights_digest"):
        verify_bundle(path, KEYRING, expectation=Expectation(identity=other))
    with pytest.raises(LayoutMismatchError, match="max_context_tokens"):
        layout = replace(LAYOUT, max_context_tokens=64)
        verify_bundle(path, KEYRING, expectation=Expectation(layout=layout))


def test_headers_come_back_and_check_themselves() -> None:
    data = encode_header(HEADER)
    assert decode_header(data) == HEADER
    for wrong in (data + b"\0", data[:-1], b"", data[:24]):
        with pytest.raises(FormatError):
            decode_header(wrong)
    with pytest.raises(IdentityMismatchError, match="tenant"):
        Header("other", 1, IDENTITY, LAYOUT)
    with pytest.raises(LayoutMismatchError, match="max_context"):
        Header("acme", 1, IDENTITY, replace(LAYOUT, max_context_tokens=1))
    with pytest.raises(LimitError, match="epoch"):
        Header.of(IDENTITY, 0)
    swapped = data.replace(b"\x0a\x04acme", b"\x0a\x04acmf")
    with pytest.raises(FormatError, match=r"identity\.tenant"):
        decode_header(swapped)


def test_files_that_are_no_files_and_files_that_shrink_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in (tmp_path, tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(FormatError, match="regular file"):
            BundleReader.open(name, KEYRING)
    path = tmp_path / "a"
    path.write_bytes(pack(600))
    with BundleReader.open(path, KEYRING) as reader:
        chunks = reader.chunks()
        first = bytes(next(chunks).plaintext)
        os.truncate(path, 4000)
        with pytest.raises(KvpackError):
            list(chunks)
        path.write_bytes(bytes(len(pack(600))))
        with pytest.raises(KvpackError):
            reader.check()
    assert first == bytes(snapshot(600).tiles[0].data)


def _uniform(heads: int, layers: int) -> tuple[CacheLayout, Identity]:
    layer = LayerLayout(LayerKind.FULL, None, heads, 32, 32)
    layout = CacheLayout((layer,) * layers, Encoding.F16LE, 1 << 16)
    return layout, replace(IDENTITY, layout=layout)


@pytest.mark.parametrize(
    ("heads", "layers", "position", "chunk_bytes", "share"),
    [(2, 2, 2047, 128 << 10, 0.05), (4, 16, 2048, 2 << 20, 0.002)],
)
def test_framing_costs_less_than_its_bound(
    heads: int, layers: int, position: int, chunk_bytes: int, share: float
) -> None:
    layout, identity = _uniform(heads, layers)
    sink = io.BytesIO()
    value = snapshot(position, layout)
    write_snapshot(sink, KEY, Header.of(identity, 1), value, NUMERICS, schedule(position))
    sizes = {len(tile.data) for tile in value.tiles}
    assert max(sizes) == chunk_bytes
    payload = sum(len(tile.data) for tile in value.tiles) + 4 * position
    assert len(sink.getvalue()) <= payload * (1 + share)


_MEASURE = """
import os, resource, sys, tempfile
from kvpack.bundle import BundleReader, BundleWriter, Header, encode_header, publish_new
from kvpack.chunk import SealContext, seal_tile, seal_token_ids
from kvpack.codes import ComponentKind
from kvpack.identity import CallRun, CallSchedule, Identity, NumericsFingerprint
from kvpack.keys import Keyring, generate_key
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, Producer
from kvpack.manifest import Component, Manifest, seal_manifest
from kvpack.snapshot import Tile, tile_specs
from kvpack.verify import Depth, verify_bundle, verify_stream
key, path, T = generate_key("acme"), sys.argv[1], 16_384
layout = CacheLayout((LayerLayout(LayerKind.FULL, None, 4, 64, 64),) * 8, Encoding.F16LE, T)
none = bytes(32)
identity = Identity("acme", none, "none", none, none, none, "abi/1", layout)
header = Header.of(identity, 1)
context = SealContext(key, header.identity_digest, header.layout_digest)
data = bytes(2 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with publish_new(path) as file:
    writer = BundleWriter(file, key, encode_header(header))
    for spec in tile_specs(layout, LayerKind.FULL, 0, T):
        writer.add(seal_tile(context, Tile(spec, data[: spec.data_bytes(layout)])))
    for chunk in seal_token_ids(context, range(T)):
        writer.add(chunk)
    manifest = Manifest(Producer.ENGINE, T, NumericsFingerprint(()),
        CallSchedule((CallRun(T, 1),)), writer.references,
        (Component(ComponentKind.TARGET, context.identity_digest),))
    writer.finish(seal_manifest(key, encode_header(header), manifest))
verify_bundle(path, Keyring([key]), Depth.DEEP)
verify_stream(open(path, "rb", buffering=0), Keyring([key]))
for chunk in BundleReader.open(path, Keyring([key])).chunks():
    pass
print(os.path.getsize(path), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_writing_reading_and_verifying_take_memory_for_chunks_and_not_for_the_pack(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, tmp_path / "big"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    size, grown = map(int, done.stdout.split())
    assert size > 128 << 20
    assert grown << 10 < 40 << 20, f"{grown} KiB for a pack of {size} bytes"


def test_a_key_holders_lies_in_the_footer_are_refused_by_both_readers() -> None:
    good = pack(9)
    index = BundleReader(io.BytesIO(good), KEYRING).index
    honest = index.footer
    chunks, blob = good[: honest.manifest_offset], index.manifest_blob
    junk = bytes(64)
    lies = {
        "a count": (good[:-72], replace(honest, chunk_count=4)),
        "a gap": (chunks + junk + blob, replace(honest, chunks_bytes=honest.chunks_bytes + 64)),
        "an object more": (
            chunks + session_chunk(9).object + blob,
            replace(honest, chunks_bytes=honest.chunks_bytes + len(session_chunk(9).object)),
        ),
    }
    for name, (body, footer) in lies.items():
        bad = body + encode_footer(KEY, footer, manifest_id(blob), b"")
        from_footer, onwards = random_access(bad), forward(bad)
        assert from_footer.exit_code == onwards.exit_code == 10, (name, from_footer, onwards)
        with pytest.raises(FormatError):
            list(BundleReader(io.BytesIO(bad), KEYRING).chunks())
