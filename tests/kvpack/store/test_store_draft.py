"""A draft's rows in a store: in with a bundle, read back, out again, and whole in a delta."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from memory_kit import MemoryStore
from store_kit import HEADER, KEY, KEYRING, LINEAGE, NUMERICS, snapshot, token_ids, tools

from kvpack.bundle import (
    BundleReader,
    BundleWriter,
    DraftSnapshot,
    draft_context,
    encode_header,
    read_draft_snapshot,
    write_snapshot,
)
from kvpack.chunk import Codec, SealContext, seal_draft_tile, seal_tile, seal_token_ids
from kvpack.codes import ComponentKind
from kvpack.identity import CallRun, CallSchedule
from kvpack.layout import CacheLayout, LayerKind
from kvpack.manifest import Component, DraftModel, Manifest, ParentReference, seal_manifest
from kvpack.snapshot import SessionCacheSnapshot, Tile, cut_tile_specs, tile_specs
from kvpack.store import CutReader, check_store, export_bundle, import_bundle

IDS = token_ids(700)
SHAPE = CacheLayout(HEADER.layout.layers[:2], HEADER.layout.encoding, 8192)
DRAFT = replace(HEADER.identity, weights_digest=bytes([8]) * 32, layout=SHAPE)


def _draft(position: int) -> DraftSnapshot:
    schedule = CallSchedule((CallRun(position, 1),))
    tiles = [
        Tile(spec, (repr(spec).encode() * 9999)[: spec.data_bytes(SHAPE)])
        for spec in cut_tile_specs(SHAPE, position)
    ]
    target = snapshot(IDS[:position])
    rows = SessionCacheSnapshot(SHAPE, target.producer, position, target.token_ids, tuple(tiles))
    return DraftSnapshot(DraftModel(DRAFT, NUMERICS, schedule), rows)


def _pack(position: int = 600) -> bytes:
    sink = io.BytesIO()
    schedule = CallSchedule((CallRun(position, 1),))
    write_snapshot(
        sink, KEY, HEADER, snapshot(IDS[:position]), NUMERICS, schedule, draft=_draft(position)
    )
    return sink.getvalue()


def _reader(data: bytes) -> BundleReader:
    return BundleReader(io.BytesIO(data), KEYRING)


def _rows(draft: DraftSnapshot | None) -> dict[object, bytes]:
    assert draft is not None
    return {tile.spec: bytes(tile.data) for tile in draft.snapshot.tiles}


@pytest.mark.parametrize("codec", [None, *Codec])
def test_a_draft_goes_through_a_store(codec: Codec | None) -> None:
    store = MemoryStore()
    cut_id = import_bundle(store, KEYRING, _reader(_pack()), LINEAGE, tools(), codec=codec)
    found = CutReader(store, KEYRING, cut_id)
    assert _rows(found.draft_snapshot()) == _rows(_draft(600))
    assert list(check_store(store, KEYRING, deep=True)) == []
    sink = io.BytesIO()
    export_bundle(store, KEYRING, cut_id, sink)
    assert _rows(read_draft_snapshot(_reader(sink.getvalue()))) == _rows(_draft(600))
    if codec is not Codec.ZSTD_SPLIT:
        assert sink.getvalue() == _pack()


def _delta(parent: bytes, position: int, *, drafted: bool) -> bytes:
    """The pack of ``position`` tokens that takes its first 512 from ``parent``."""
    context = SealContext(KEY, HEADER.identity_digest, HEADER.layout_digest)
    sink, value = io.BytesIO(), snapshot(IDS[:position])
    writer = BundleWriter(sink, KEY, encode_header(HEADER))
    own = set(tile_specs(HEADER.layout, LayerKind.FULL, 512, position))
    own |= set(tile_specs(HEADER.layout, LayerKind.SWA, 512, position))
    for tile in value.tiles:
        if tile.spec in own:
            writer.add(seal_tile(context, tile))
    for chunk in seal_token_ids(context, IDS[512:position], 512):
        writer.add(chunk)
    models = [Component(ComponentKind.TARGET, HEADER.identity_digest)]
    if drafted:
        draft = _draft(position)
        models.append(Component.of_draft(draft.model))
        for tile in draft.snapshot.tiles:
            writer.add(seal_draft_tile(draft_context(KEY, draft.model), tile))
    manifest = Manifest(
        value.producer, position, NUMERICS, CallSchedule((CallRun(position, 1),)),
        writer.references, tuple(models), ParentReference(parent, 1, 512, 1),
    )  # fmt: skip
    writer.finish(seal_manifest(KEY, encode_header(HEADER), manifest))
    return sink.getvalue()


@pytest.mark.parametrize("drafted", [True, False])
def test_a_delta_holds_its_draft_whole_and_takes_none_from_its_parent(drafted: bool) -> None:
    store = MemoryStore()
    parent = import_bundle(store, KEYRING, _reader(_pack()), LINEAGE, tools())
    data = _delta(parent, 700, drafted=drafted)
    cut_id = import_bundle(store, KEYRING, _reader(data), LINEAGE, tools())
    found = CutReader(store, KEYRING, cut_id)
    assert found.snapshot().token_ids == IDS
    if drafted:
        assert _rows(found.draft_snapshot()) == _rows(_draft(700))
    else:
        assert found.draft_snapshot() is None
