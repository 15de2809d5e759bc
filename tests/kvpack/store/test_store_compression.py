"""Rows sealed with another codec on their way into a store and out of it; off unless asked for."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from memory_kit import MemoryStore
from store_kit import (
    HEADER,
    KEY,
    KEYRING,
    LINEAGE,
    NUMERICS,
    Session,
    save,
    snapshot,
    state,
    token_ids,
    tools,
)

from kvpack import medium
from kvpack.bundle import BundleReader, Depth, read_snapshot, write_snapshot
from kvpack.chunk import Codec, RowSealer, SealContext, open_tile
from kvpack.chunk import codec as split_codec
from kvpack.compression import Compression, choose_codec
from kvpack.errors import LimitError
from kvpack.identity import CallRun, CallSchedule
from kvpack.snapshot import SessionCacheSnapshot, Tile, cut_tile_specs
from kvpack.store import (
    Budget,
    CutReader,
    CutWriter,
    StoreFullError,
    Trust,
    check_store,
    export_bundle,
    import_bundle,
)

IDS = token_ids(1100)
CONTEXT = SealContext(KEY, HEADER.identity_digest, HEADER.layout_digest)


def _zeros() -> SessionCacheSnapshot:
    """Rows that shrink: three of four are zero; those of the last tile are noise."""
    noise = snapshot(IDS)
    last = noise.tiles[-1]
    tiles = [Tile(tile.spec, bytes(len(tile.data))) for tile in noise.tiles if tile is not last]
    return SessionCacheSnapshot(noise.layout, noise.producer, 1100, IDS, (*tiles, last))


def _pack(value: SessionCacheSnapshot, codec: Codec = Codec.RAW) -> bytes:
    sink = io.BytesIO()
    schedule = CallSchedule((CallRun(value.position, 1),))
    write_snapshot(sink, KEY, HEADER, value, NUMERICS, schedule, codec=codec)
    return sink.getvalue()


def _reader(data: bytes) -> BundleReader:
    return BundleReader(io.BytesIO(data), KEYRING)


def _exported(store: MemoryStore, cut_id: bytes, codec: Codec | None = None) -> bytes:
    sink = io.BytesIO()
    export_bundle(store, KEYRING, cut_id, sink, codec=codec)
    return sink.getvalue()


def _rows(data: bytes) -> dict[object, Codec]:
    manifest = _reader(data).manifest
    return {reference.slot: reference.codec for reference in manifest.references}


@pytest.mark.parametrize("before", Codec)
@pytest.mark.parametrize("after", Codec)
def test_an_import_with_a_codec_holds_the_same_rows(before: Codec, after: Codec) -> None:
    value, store = _zeros(), MemoryStore()
    data = _pack(value, before)
    cut_id = import_bundle(store, KEYRING, _reader(data), LINEAGE, tools(), codec=after)
    found = CutReader(store, KEYRING, cut_id)
    assert state(found.snapshot()) == state(value)
    assert list(check_store(store, KEYRING, deep=True)) == []
    # The same rows sealed with this codec in the first place are the very same file.
    assert _exported(store, cut_id) == _pack(value, after)
    ids = [r.content_id for r in found.cut.manifest.references]
    assert ids == [r.content_id for r in _reader(data).manifest.references]


def test_noise_stays_raw_and_so_does_everything_that_is_no_row() -> None:
    value, store = _zeros(), MemoryStore()
    cut_id = import_bundle(
        store, KEYRING, _reader(_pack(value)), LINEAGE, tools(), codec=Codec.ZSTD_SPLIT
    )
    references = CutReader(store, KEYRING, cut_id).cut.manifest.references
    noisy = value.tiles[-1].spec
    for reference in references:
        is_noise = reference.has_rows and reference.tile_spec() == noisy
        raw = is_noise or not reference.has_rows
        assert (reference.codec is Codec.RAW) == raw, reference.slot
    stored = sum(reference.object_bytes for reference in references)
    assert stored < 0.5 * sum(reference.plain_bytes for reference in references)


def test_a_pack_of_noise_keeps_its_bytes_and_its_name() -> None:
    data, store = _pack(snapshot(IDS)), MemoryStore()
    ids = {
        import_bundle(store, KEYRING, _reader(data), LINEAGE, tools(), codec=codec)
        for codec in (None, Codec.RAW, Codec.ZSTD_SPLIT)
    }
    assert len(ids) == 1
    assert _exported(store, ids.pop()) == data


@pytest.mark.parametrize("codec", [None, *Codec])
def test_an_export_takes_a_codec_and_trims_all_the_same(codec: Codec | None) -> None:
    store, session = MemoryStore(), Session(IDS)
    for edge in (512, 1024, 1100):
        cut_id = save(store, session, edge)
    data = _exported(store, cut_id, codec)
    reader = _reader(data)
    reader.check(Depth.DEEP)
    assert state(read_snapshot(reader)) == state(snapshot(IDS))


def test_an_export_compressed_and_one_made_raw_again_are_the_two_packs() -> None:
    store, value = MemoryStore(), _zeros()
    cut_id = import_bundle(store, KEYRING, _reader(_pack(value)), LINEAGE, tools())
    small = _exported(store, cut_id, Codec.ZSTD_SPLIT)
    assert small == _pack(value, Codec.ZSTD_SPLIT)
    assert Codec.ZSTD_SPLIT in _rows(small).values()
    other = MemoryStore()
    again = import_bundle(other, KEYRING, _reader(small), LINEAGE, tools())
    assert _exported(other, again, Codec.RAW) == _pack(value)


def test_what_a_peer_sent_is_not_sealed_anew() -> None:
    with pytest.raises(RuntimeError, match="peer"):
        import_bundle(
            MemoryStore(), KEYRING, _reader(_pack(_zeros())), LINEAGE, tools(),
            trust=Trust.PEER, codec=Codec.ZSTD_SPLIT,
        )  # fmt: skip


@pytest.mark.parametrize("codec", Codec)
def test_room_is_asked_for_what_expanding_takes(
    monkeypatch: pytest.MonkeyPatch, codec: Codec
) -> None:
    asked: list[int] = []
    reserve = CutWriter.reserve

    def recorded(self: CutWriter, needed_bytes: int) -> None:
        asked.append(needed_bytes)
        reserve(self, needed_bytes)

    monkeypatch.setattr(CutWriter, "reserve", recorded)
    small, store = _pack(_zeros(), Codec.ZSTD_SPLIT), MemoryStore()
    cut_id = import_bundle(store, KEYRING, _reader(small), LINEAGE, tools(), codec=codec)
    references = CutReader(store, KEYRING, cut_id).cut.manifest.references
    assert asked[0] >= sum(reference.object_bytes for reference in references)
    tight = tools(budget=Budget(2 * len(small), 0))
    with pytest.raises(StoreFullError):
        import_bundle(MemoryStore(), KEYRING, _reader(small), LINEAGE, tight, codec=codec)
    import_bundle(MemoryStore(), KEYRING, _reader(small), LINEAGE, tight)


def test_what_is_compressed_already_keeps_its_level(monkeypatch: pytest.MonkeyPatch) -> None:
    value = _zeros()
    words = b"".join(bytes([i % 7, i % 11, i % 250, i % 3]) for i in range(1 << 16))
    tiles = tuple(Tile(tile.spec, words[: len(tile.data)]) for tile in value.tiles)
    value = SessionCacheSnapshot(value.layout, value.producer, 1100, IDS, tiles)
    compress = split_codec.compress
    with monkeypatch.context() as patch:
        patch.setattr(split_codec, "compress", lambda data, count, _: compress(data, count, 19))
        data = _pack(value, Codec.ZSTD_SPLIT)
    assert data != _pack(value, Codec.ZSTD_SPLIT)
    store = MemoryStore()
    cut_id = import_bundle(store, KEYRING, _reader(data), LINEAGE, tools(), codec=Codec.ZSTD_SPLIT)
    assert _exported(store, cut_id) == data


def test_a_row_sealer_is_what_a_save_path_holds() -> None:
    spec = cut_tile_specs(HEADER.layout, 9)[0]
    tile = Tile(spec, bytes(spec.data_bytes(HEADER.layout)))
    off = RowSealer(CONTEXT, HEADER.layout)
    on = RowSealer(CONTEXT, HEADER.layout, choose_codec(Compression.AUTO, 10**9))
    raw, small = off.seal(tile), on.seal(tile)
    assert (raw.reference.codec, small.reference.codec) == (Codec.RAW, Codec.ZSTD_SPLIT)
    assert raw.reference.content_id == small.reference.content_id
    assert bytes(open_tile(CONTEXT, HEADER.layout, small.object).data) == tile.data
    fast = RowSealer(CONTEXT, HEADER.layout, choose_codec(Compression.AUTO, 10**11))
    assert fast.seal(tile).object == raw.object


def test_a_medium_is_measured_and_nothing_stays_behind(tmp_path: Path) -> None:
    ticks = iter((10.0, 10.25))
    rate = medium.measure_write_bits_per_s(tmp_path, lambda: next(ticks))
    assert rate == medium.PROBE_BYTES * 8 * 4
    assert list(tmp_path.iterdir()) == []
    still = medium.measure_write_bits_per_s(tmp_path, lambda: 5.0)
    assert choose_codec(Compression.AUTO, still) is Codec.RAW
    with pytest.raises(FileNotFoundError):
        medium.measure_write_bits_per_s(tmp_path / "gone", lambda: 0.0)
    with pytest.raises(LimitError):
        choose_codec(Compression.AUTO, 0)
