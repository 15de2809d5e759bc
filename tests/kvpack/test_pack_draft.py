"""A draft model's state travels with its target's: own identity, own layout, the same gate."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from pack_kit import (
    CONTEXT,
    DRAFT_IDENTITY,
    DRAFT_LAYOUT,
    HEADER,
    KEY,
    KEYRING,
    NUMERICS,
    Pipe,
    draft_model,
    draft_snapshot,
    forward,
    opened,
    pack,
    random_access,
    schedule,
    snapshot,
)

from kvpack.bundle import (
    BundleReader,
    BundleWriter,
    Depth,
    DraftSnapshot,
    ForwardReader,
    draft_context,
    encode_header,
    read_draft_snapshot,
    read_snapshot,
    write_snapshot,
)
from kvpack.chunk import (
    ChunkClass,
    Codec,
    open_tile,
    seal_component,
    seal_draft_tile,
    seal_tile,
    seal_token_ids,
)
from kvpack.codes import ComponentKind
from kvpack.diff import FieldDifference, PayloadDifference, compare_packs
from kvpack.errors import (
    FormatError,
    IdentityMismatchError,
    KvpackError,
    LayoutMismatchError,
)
from kvpack.layout import Encoding, Producer
from kvpack.manifest import Component, Manifest, seal_manifest
from kvpack.snapshot import Tile, cut_tile_specs
from kvpack.verify import verify_bundle

EDGES = (0, 1, 4, 5, 6, 255, 256, 257, 261, 512, 600)


def _reader(data: bytes) -> BundleReader:
    return BundleReader(io.BytesIO(data), KEYRING)


@pytest.mark.parametrize("position", EDGES)
@pytest.mark.parametrize("codec", Codec)
def test_target_and_draft_come_back_at_every_edge_of_window_and_grid(
    position: int, codec: Codec
) -> None:
    draft = draft_snapshot(position)
    data = pack(position, draft=draft, codec=codec)
    spool = io.BytesIO()
    for reader in (_reader(data), ForwardReader(Pipe(data, 1000), KEYRING, spool)):
        assert read_snapshot(reader) == snapshot(position)
        found = read_draft_snapshot(reader)
        assert found is not None
        assert (found.model, found.snapshot.token_ids) == (draft.model, draft.snapshot.token_ids)
        assert _rows(found) == _rows(draft)


def _rows(draft: DraftSnapshot) -> dict[object, bytes]:
    return {tile.spec: bytes(tile.data) for tile in draft.snapshot.tiles}


def test_a_pack_without_a_draft_has_none() -> None:
    assert read_draft_snapshot(_reader(pack(9))) is None


def test_verify_bundle_checks_the_draft_to_every_depth(tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    path.write_bytes(pack(300, draft=draft_snapshot(300)))
    for depth in Depth:
        report = verify_bundle(path, KEYRING, depth)
        classes = {total.chunk_class for total in report.description.classes}
        assert ChunkClass.DRAFT in classes


def test_every_changed_byte_of_a_pack_with_a_draft_is_refused_both_ways() -> None:
    good = pack(9, draft=draft_snapshot(9))
    for offset in range(0, len(good), 7):
        bad = good[:offset] + bytes([good[offset] ^ 0x40]) + good[offset + 1 :]
        codes = {random_access(bad).exit_code, opened(bad).exit_code, forward(bad).exit_code}
        assert codes in ({10}, {11}), offset


def _forged(chunks: list[object], position: int = 9, **fields: object) -> bytes:
    """A pack with these chunks of the draft, made by somebody who holds the key."""
    sink = io.BytesIO()
    writer = BundleWriter(sink, KEY, encode_header(HEADER))
    value = snapshot(position)
    mine = [seal_tile(CONTEXT, tile) for tile in value.tiles]
    for chunk in (*mine, *seal_token_ids(CONTEXT, value.token_ids), *chunks):
        writer.add(chunk)
    target = Component(ComponentKind.TARGET, HEADER.identity_digest)
    manifest = Manifest(
        Producer.ENGINE, position, NUMERICS, schedule(position), writer.references,
        (target, Component.of_draft(draft_model(position))),
    )  # fmt: skip
    writer.finish(seal_manifest(KEY, encode_header(HEADER), replace(manifest, **fields)))
    return sink.getvalue()


def _draft_chunks(context: object = None) -> list[object]:
    mine = context or draft_context(KEY, draft_model(9))
    return [seal_draft_tile(mine, tile) for tile in draft_snapshot(9).snapshot.tiles]


def test_draft_rows_under_the_targets_name_are_refused() -> None:
    assert random_access(_forged(_draft_chunks())).accepted
    wrong = _forged(_draft_chunks(CONTEXT))
    for verdict in (random_access(wrong), opened(wrong), forward(wrong)):
        assert verdict.reason == "layout_mismatch"
    other = draft_context(KEY, draft_model(9, replace(DRAFT_IDENTITY, engine_abi="abi/2")))
    for verdict in (random_access(_forged(_draft_chunks(other))),):
        assert verdict.reason == "identity_mismatch"


@pytest.mark.parametrize("missing", [0, 1])
def test_a_pack_with_some_of_a_drafts_rows_is_never_sealed(missing: int) -> None:
    chunks = _draft_chunks()
    del chunks[missing]
    with pytest.raises(LayoutMismatchError, match=r"draft\.layers\[[01]\]\.rows"):
        _forged(chunks)


def test_rows_of_a_draft_do_not_open_as_rows_of_the_target_nor_the_other_way() -> None:
    chunk = _draft_chunks()[0]
    with pytest.raises(KvpackError, match="digest"):
        open_tile(CONTEXT, HEADER.layout, chunk.object)
    tile = snapshot(9).tiles[0]
    with pytest.raises(KvpackError, match="digest"):
        open_tile(draft_context(KEY, draft_model(9)), DRAFT_LAYOUT, seal_tile(CONTEXT, tile).object)


def test_a_drafts_state_may_stand_beside_its_rows_and_not_instead_of_them() -> None:
    context = draft_context(KEY, draft_model(9))
    state = seal_component(context, ChunkClass.DRAFT, 9, 0, b"\x01state")
    assert forward(_forged([*_draft_chunks(), state])).accepted
    with pytest.raises(LayoutMismatchError, match="draft"):
        _forged([state])


def _write(draft: DraftSnapshot) -> None:
    write_snapshot(io.BytesIO(), KEY, HEADER, snapshot(9), NUMERICS, schedule(9), draft=draft)


def test_a_draft_that_stands_elsewhere_is_refused_by_name() -> None:
    with pytest.raises(LayoutMismatchError, match=r"draft\.position: expected 9, found 8"):
        _write(draft_snapshot(8))
    good = draft_snapshot(9)
    other = replace(good.snapshot, token_ids=(1, *good.snapshot.token_ids[1:]))
    with pytest.raises(LayoutMismatchError, match=r"draft\.token_ids") as caught:
        _write(DraftSnapshot(good.model, other))
    assert "1" not in str(caught.value)
    foreign = replace(good.snapshot, producer=Producer.TRANSFORMERS)
    with pytest.raises(LayoutMismatchError, match=r"draft\.producer"):
        _write(DraftSnapshot(good.model, foreign))


def test_a_draft_with_another_tokenizer_or_shape_is_refused_by_name() -> None:
    stranger = replace(DRAFT_IDENTITY, tokenizer_digest=bytes([5]) * 32)
    with pytest.raises(IdentityMismatchError, match="tokenizer_digest"):
        _write(draft_snapshot(9, stranger))
    with pytest.raises(LayoutMismatchError, match="encoding"):
        wide = replace(DRAFT_LAYOUT, encoding=Encoding.F32LE)
        model = draft_model(9, replace(DRAFT_IDENTITY, layout=wide))
        DraftSnapshot(model, snapshot(9, DRAFT_LAYOUT))
    with pytest.raises(FormatError, match=r"draft\.identity\.tenant"):
        _write(draft_snapshot(9, replace(DRAFT_IDENTITY, tenant="rival")))


def test_a_component_says_what_its_draft_is_and_a_target_says_nothing() -> None:
    with pytest.raises(FormatError, match=r"component\.draft"):
        Component(ComponentKind.DRAFT, bytes(32))
    with pytest.raises(FormatError, match=r"component\.draft"):
        Component(ComponentKind.TARGET, bytes(32), draft_model(9))


def test_equal_draft_rows_are_one_chunk_whatever_the_target() -> None:
    context = draft_context(KEY, draft_model(9))
    spec = cut_tile_specs(DRAFT_LAYOUT, 9)[0]
    tile = Tile(spec, bytes(spec.data_bytes(DRAFT_LAYOUT)))
    assert seal_draft_tile(context, tile).object == seal_draft_tile(context, tile).object
    target = seal_tile(context, tile)
    assert target.reference.content_id != seal_draft_tile(context, tile).reference.content_id


def test_diff_names_what_differs_in_the_draft() -> None:
    one = pack(9, draft=draft_snapshot(9))
    found = list(compare_packs(_reader(one), _reader(pack(9))))
    assert [difference.field for difference in found] == ["components"]
    good = draft_snapshot(9)
    spec, data = good.snapshot.tiles[0].spec, bytearray(good.snapshot.tiles[0].data)
    data[3 * 10] ^= 1
    tiles = (Tile(spec, bytes(data)), *good.snapshot.tiles[1:])
    other = DraftSnapshot(
        replace(good.model, numerics=NUMERICS), replace(good.snapshot, tiles=tiles)
    )
    found = list(compare_packs(_reader(one), _reader(pack(9, draft=other))))
    assert FieldDifference("draft.numerics.mlx", "absent", "0.32.4") in found
    rows = [item for item in found if isinstance(item, PayloadDifference)]
    assert [(item.chunk_class, item.layer, item.role) for item in rows] == [
        (ChunkClass.DRAFT, 0, "key")
    ]
