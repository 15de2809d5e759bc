"""The shape gate: a mutated but re-authenticated pack is refused by the field that was changed.

Every case here holds the key: the MACs are right, only the state described is wrong.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from pack_kit import (
    CONTEXT,
    DRAFT_MODEL,
    FULL,
    HEADER,
    IDENTITY,
    KEY,
    KEYRING,
    LAYOUT,
    NUMERICS,
    SWA,
    logits_chunk,
    rows,
    schedule,
    session_chunk,
    snapshot,
)

from kvpack.bundle import BundleReader, BundleWriter, Header, encode_header, read_snapshot
from kvpack.chunk import ChunkClass, ChunkReference, SealedChunk, seal_component, seal_tile
from kvpack.chunk import seal_token_ids as seal_ids
from kvpack.codes import ComponentKind
from kvpack.errors import (
    AuthenticationError,
    FormatError,
    IdentityMismatchError,
    IncompleteError,
    KvpackError,
    LayoutMismatchError,
    LimitError,
    UnknownKeyError,
    VersionError,
)
from kvpack.identity import CallRun, CallSchedule, require_same_identity, require_same_layout
from kvpack.keys import EpochKey
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, Producer
from kvpack.manifest import (
    Component,
    ForeignRingHead,
    KnownReferences,
    Manifest,
    ParentReference,
    check_manifest,
    open_manifest,
    read_unverified,
    seal_manifest,
)
from kvpack.manifest.message import encode_message
from kvpack.snapshot import TileSpec

HEADER_BYTES = encode_header(HEADER)
TARGET = Component(ComponentKind.TARGET, HEADER.identity_digest)
DRAFT = Component.of_draft(DRAFT_MODEL)


def _chunks(position: int = 9) -> list[SealedChunk]:
    value = snapshot(position)
    return [
        *(seal_tile(CONTEXT, tile) for tile in value.tiles),
        *seal_ids(CONTEXT, value.token_ids),
        logits_chunk(position),
        session_chunk(position),
    ]


def _references(position: int = 9) -> tuple[ChunkReference, ...]:
    return tuple(chunk.reference for chunk in _chunks(position))


def _manifest(position: int = 9) -> Manifest:
    return Manifest(
        Producer.ENGINE, position, NUMERICS, schedule(position), _references(position), (TARGET,)
    )


def _force(manifest: Manifest, header: bytes = HEADER_BYTES) -> bytes:
    """Seal a manifest that the gate would not let through, as a hostile key holder can."""
    message = encode_message(manifest)
    stored = b"KVPM\x01\0\0\0" + len(message).to_bytes(4, "little") + message
    return stored + KEY.mac("manifest", header, stored)


def test_a_good_manifest_passes_and_comes_back() -> None:
    blob = seal_manifest(KEY, HEADER_BYTES, _manifest())
    assert blob == _force(_manifest())
    assert open_manifest(KEY, HEADER_BYTES, blob) == _manifest()
    assert read_unverified(blob) == _manifest()


def _without(manifest: Manifest, number: int) -> Manifest:
    kept = manifest.references[:number] + manifest.references[number + 1 :]
    return replace(manifest, references=kept)


def _change(manifest: Manifest, number: int, **fields: object) -> Manifest:
    changed = replace(manifest.references[number], **fields)
    return replace(
        manifest,
        references=(*manifest.references[:number], changed, *manifest.references[number + 1 :]),
    )


def _add(manifest: Manifest, chunk: SealedChunk) -> Manifest:
    return replace(manifest, references=(*manifest.references, chunk.reference))


_FULL_AT, _SWA_AT, _IDS_AT, _LOGITS_AT, _SESSION_AT = range(5)

CASES: dict[str, tuple[Callable[[Manifest], Manifest], type[KvpackError], str]] = {
    "no full rows": (
        lambda m: _without(m, _FULL_AT), LayoutMismatchError, r"\[1\]\.rows: expected 9, found 0"),
    "no swa rows": (
        lambda m: _without(m, _SWA_AT), LayoutMismatchError, r"\[0\]\.rows: expected 5, found 0"),
    "no token ids": (
        lambda m: _without(m, _IDS_AT), LayoutMismatchError, "token_ids: expected 9, found 0"),
    "one token id too few": (
        lambda m: _change(m, _IDS_AT, token_count=8, plain_bytes=32, encoded_bytes=32),
        LayoutMismatchError, "token_ids: expected 9, found 8"),
    "window from one position earlier": (
        lambda m: _change(m, _SWA_AT, first_position=3), LayoutMismatchError,
        r"layers\[0\]\.first_position: expected 4, found 3"),
    "one full row too few, bytes too": (
        lambda m: _change(m, _FULL_AT, token_count=8, plain_bytes=80, encoded_bytes=80),
        LayoutMismatchError, r"layers\[1\]\.rows: expected 9, found 8"),
    "bytes that are not those of the shape": (
        lambda m: _change(m, _FULL_AT, plain_bytes=88, encoded_bytes=88), LayoutMismatchError,
        r"references\[0\]\.plain_bytes: expected 90, found 88"),
    "full layer called swa": (
        lambda m: _change(m, _FULL_AT, chunk_class=ChunkClass.SWA), LayoutMismatchError,
        r"layers\[1\]\.kind: expected full, found swa"),
    "a layer that is not there": (
        lambda m: _change(m, _FULL_AT, layers=(3,)), LayoutMismatchError, "tile.layers"),
    "only one of two layers": (
        lambda m: _change(m, _SWA_AT, layers=(0,), plain_bytes=50, encoded_bytes=50),
        LayoutMismatchError, r"layers\[2\]\.rows"),
    "rows twice": (
        lambda m: _add(m, seal_tile(CONTEXT, rows(TileSpec(LayerKind.FULL, (1,), 0, 3)))),
        LayoutMismatchError, r"layers\[1\]\.rows: expected 9, found 12"),
    "state of another cut": (
        lambda m: _change(m, _SESSION_AT, first_position=8), FormatError,
        r"references\[4\]\.first_position: expected 9, found 8"),
    "logits of another cut": (
        lambda m: _change(m, _LOGITS_AT, first_position=7), FormatError,
        r"references\[3\]\.first_position: expected 8, found 7"),
    "part without its first": (
        lambda m: _change(m, _SESSION_AT, part=1), FormatError,
        r"references\[4\]\.part: expected 0, found 1"),
    "a newer epoch inside an older pack": (
        lambda m: _change(m, _FULL_AT, epoch=2), FormatError, r"references\[0\]\.epoch"),
    "schedule of another length": (
        lambda m: replace(m, schedule=CallSchedule((CallRun(8, 1),))), FormatError, "schedule"),
    "engine rows without a schedule": (
        lambda m: replace(m, schedule=CallSchedule()), FormatError, "schedule"),
    "another model's target": (
        lambda m: replace(m, components=(Component(ComponentKind.TARGET, bytes(32)),)),
        IdentityMismatchError, r"components\[0\]\.identity_digest"),
    "a draft without its state": (
        lambda m: replace(m, components=(TARGET, DRAFT)), LayoutMismatchError,
        r"draft\.layers\[0\]\.rows: expected 9, found 0"),
    "a draft's state without the draft": (
        lambda m: _add(m, seal_component(CONTEXT, ChunkClass.DRAFT, 9, 0, b"\x01d")),
        FormatError, "components"),
    "half-precision oracle": (
        lambda m: replace(m, producer=Producer.ORACLE), LayoutMismatchError, "encoding"),
    "ring heads of our own engine": (
        lambda m: replace(m, foreign_ring_heads=(ForeignRingHead(0, 1),)), FormatError, "heads"),
    "ring head of a full layer": (
        lambda m: replace(
            m, producer=Producer.MLX_LM, foreign_ring_heads=(ForeignRingHead(1, 1),)),
        LayoutMismatchError, "layer 1"),
    "ring head beyond the ring": (
        lambda m: replace(
            m, producer=Producer.MLX_LM, foreign_ring_heads=(ForeignRingHead(0, 5),)),
        LayoutMismatchError, "below 5"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_reauthenticated_lie_is_refused_by_name_on_both_sides(case: str) -> None:
    change, error, why = CASES[case]
    lie = change(_manifest())
    with pytest.raises(error, match=why):
        seal_manifest(KEY, HEADER_BYTES, lie)
    with pytest.raises(error, match=why):
        open_manifest(KEY, HEADER_BYTES, _force(lie))
    # The same where each reference was looked at as it came.
    known = KnownReferences(lie.references, LAYOUT)
    with pytest.raises(error, match=why):
        seal_manifest(KEY, HEADER_BYTES, lie, known=known)
    with pytest.raises(error, match=why):
        open_manifest(KEY, HEADER_BYTES, _force(lie), known=known)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"components": ()}, "components"),
        ({"components": (DRAFT,)}, "components"),
        ({"components": (TARGET, TARGET)}, "components"),
        ({"components": (TARGET, DRAFT, DRAFT)}, "components"),
        ({"references": _references() + _references()[:1]}, r"references\[5\].*second time"),
        ({"foreign_ring_heads": (ForeignRingHead(2, 0), ForeignRingHead(0, 0))}, "ascending"),
        ({"position": -1}, "position"),
    ],
)
def test_a_manifest_that_cannot_exist_is_refused_when_it_is_made(
    fields: dict[str, object], why: str
) -> None:
    with pytest.raises(FormatError, match=why):
        replace(_manifest(), **fields)


def test_one_object_may_not_stand_for_two_things() -> None:
    first, second = _references()[3:]
    with pytest.raises(FormatError, match="second time"):
        replace(_manifest(), references=(first, replace(second, seal_id=first.seal_id)))


def test_a_position_beyond_the_context_is_refused() -> None:
    short = replace(LAYOUT, max_context_tokens=8)
    header = Header.of(replace(IDENTITY, layout=short), 1)
    manifest = replace(
        _manifest(), components=(Component(ComponentKind.TARGET, header.identity_digest),)
    )
    with pytest.raises(LimitError, match="position: expected 0 to 8, found 9"):
        check_manifest(header, manifest)


def test_foreign_ring_heads_of_an_import_pass() -> None:
    imported = replace(
        _manifest(),
        producer=Producer.MLX_LM,
        schedule=CallSchedule(),
        foreign_ring_heads=(ForeignRingHead(0, 4), ForeignRingHead(2, 0)),
    )
    assert open_manifest(KEY, HEADER_BYTES, _force(imported)) == imported


def _header_with(layout: CacheLayout) -> bytes:
    return encode_header(Header.of(replace(IDENTITY, layout=layout), 1))


UNBOUNDED = replace(SWA, kind=LayerKind.FULL, window_tokens=None)
WIDE = LayerLayout(LayerKind.FULL, None, 2, 4, 8)

HEADERS: dict[str, tuple[CacheLayout, CacheLayout, str]] = {
    "dtype of equal width": (
        LAYOUT, replace(LAYOUT, encoding=Encoding.BF16LE),
        "encoding: expected f16le, found bf16le"),
    "key and value swapped": (
        LAYOUT, replace(LAYOUT, layers=(SWA, replace(FULL, key_dim=3, value_dim=2), SWA)),
        r"layers\[1\]\.key_dim: expected 2, found 3"),
    "heads and head size exchanged": (
        CacheLayout((WIDE,), Encoding.F16LE, 64),
        CacheLayout((replace(WIDE, kv_heads=4, key_dim=2, value_dim=4),), Encoding.F16LE, 64),
        r"layers\[0\]\.kv_heads: expected 2, found 4"),
    "layer order": (
        LAYOUT, replace(LAYOUT, layers=(FULL, SWA, SWA)),
        r"layers\[0\]\.kind: expected swa, found full"),
    "kind flipped": (
        LAYOUT, replace(LAYOUT, layers=(UNBOUNDED, FULL, SWA)),
        r"layers\[0\]\.kind: expected swa, found full"),
    "window one wider": (
        LAYOUT, replace(LAYOUT, layers=(replace(SWA, window_tokens=6), FULL, SWA)),
        r"layers\[0\]\.window_tokens: expected 5, found 6"),
    "no rotation": (
        LAYOUT, replace(LAYOUT, layers=(replace(SWA, rope=None), FULL, SWA)), r"layers\[0\]\.rope"),
    "a layer fewer": (LAYOUT, replace(LAYOUT, layers=(SWA, FULL)), "layers: expected 3, found 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_another_layout_is_named_by_its_first_field(case: str) -> None:
    ours, theirs, why = HEADERS[case]
    with pytest.raises(LayoutMismatchError, match=why):
        require_same_layout(ours, theirs)
    expected, found = (replace(IDENTITY, layout=layout) for layout in (ours, theirs))
    with pytest.raises(LayoutMismatchError, match=why):
        require_same_identity(expected, found)


@pytest.mark.parametrize("case", HEADERS)
def test_the_same_chunks_under_a_changed_layout_are_refused(case: str) -> None:
    """Somebody with the key swaps the header and re-authenticates header, manifest and footer."""
    layout = HEADERS[case][1]
    header = _header_with(layout)
    digest = Header.of(replace(IDENTITY, layout=layout), 1).identity_digest
    lie = replace(_manifest(), components=(Component(ComponentKind.TARGET, digest),))
    sink = io.BytesIO()
    with pytest.raises((LayoutMismatchError, AuthenticationError, IdentityMismatchError)):
        writer = BundleWriter(sink, KEY, header)
        for chunk in _chunks():
            writer.add(chunk)
        writer.finish(_force(lie, header))
        BundleReader(io.BytesIO(sink.getvalue()), KEYRING).check()


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [(8, 2, "header.version: expected 1, found 2"), (10, 1, "header.flags"), (22, 1, "reserved")],
)
def test_the_headers_version_and_empty_fields_are_named(place: int, value: int, field: str) -> None:
    changed = HEADER_BYTES[:place] + bytes([value]) + HEADER_BYTES[place + 1 :]
    blob = _force(_manifest(), changed)
    with pytest.raises(FormatError, match=field) as caught:
        open_manifest(KEY, changed, blob)
    assert isinstance(caught.value, VersionError) is (place == 8)


def test_the_manifests_prefix_is_checked_before_anything_else() -> None:
    good = _force(_manifest())
    for place, value, field in [
        (0, 0, "manifest.magic"),
        (4, 2, "manifest.version: expected 1, found 2"),
        (6, 1, "manifest.reserved"),
        (8, good[8] ^ 1, "manifest: expected"),
        (11, 0x7F, "manifest.message_bytes"),
    ]:
        with pytest.raises(FormatError, match=field):
            open_manifest(KEY, HEADER_BYTES, good[:place] + bytes([value]) + good[place + 1 :])


def test_the_mac_is_checked_before_the_message_is_looked_at() -> None:
    stored = b"KVPM\x01\0\0\0" + (3).to_bytes(4, "little") + b"\xff\xff\xff"
    with pytest.raises(AuthenticationError, match="manifest"):
        open_manifest(KEY, HEADER_BYTES, stored + bytes(32))
    authentic = stored + KEY.mac("manifest", HEADER_BYTES, stored)
    with pytest.raises(FormatError, match="varint"):
        open_manifest(KEY, HEADER_BYTES, authentic)


def test_another_key_is_named_before_its_mac_fails() -> None:
    blob = _force(_manifest())
    for other in (EpochKey("acme", 2, bytes(32)), EpochKey("x", 1, bytes(32))):
        with pytest.raises(UnknownKeyError, match="'acme', epoch 1"):
            open_manifest(other, HEADER_BYTES, blob)
    with pytest.raises(AuthenticationError):
        open_manifest(EpochKey("acme", 1, bytes(32)), HEADER_BYTES, blob)


def test_a_manifest_under_another_header_is_not_authentic() -> None:
    other = _header_with(replace(LAYOUT, max_context_tokens=64))
    with pytest.raises(AuthenticationError):
        open_manifest(KEY, other, _force(_manifest()))


def _delta(cut: int, position: int) -> tuple[Manifest, list[SealedChunk]]:
    value = snapshot(position)
    chunks = []
    for tile in value.tiles:
        spec = tile.spec
        first = max(spec.first_position, cut)
        if spec.end_position > first:
            part = TileSpec(spec.kind, spec.layers, first, spec.end_position - first)
            chunks.append(seal_tile(CONTEXT, rows(part)))
    chunks += seal_ids(CONTEXT, value.token_ids[cut:], cut)
    manifest = Manifest(
        Producer.ENGINE, position, NUMERICS, schedule(position),
        tuple(chunk.reference for chunk in chunks), (TARGET,),
        ParentReference(bytes(32), 1, cut, 1),
    )  # fmt: skip
    return manifest, chunks


@pytest.mark.parametrize(("cut", "position"), [(256, 257), (256, 600), (512, 514)])
def test_a_delta_is_good_and_alone_incomplete(cut: int, position: int) -> None:
    manifest, chunks = _delta(cut, position)
    sink = io.BytesIO()
    writer = BundleWriter(sink, KEY, HEADER_BYTES)
    for chunk in chunks:
        writer.add(chunk)
    writer.finish(seal_manifest(KEY, HEADER_BYTES, manifest))
    reader = BundleReader(io.BytesIO(sink.getvalue()), KEYRING)
    reader.check()
    assert reader.manifest.cut == cut
    with pytest.raises(IncompleteError, match=f"parent 0000.*first {cut} of {position}"):
        read_snapshot(reader)


def test_a_delta_must_continue_its_cut() -> None:
    manifest, _ = _delta(256, 600)
    for parent, why in [
        (ParentReference(bytes(32), 1, 512, 1), "first_position"),
        (ParentReference(bytes(32), 1, 768, 1), "below 600"),
    ]:
        with pytest.raises(KvpackError, match=why):
            seal_manifest(KEY, HEADER_BYTES, replace(manifest, parent=parent))
    good = {"epoch": 1, "position": 256, "depth": 1}
    for fields in ({"position": 255}, {"position": 0}, {"depth": 0}, {"depth": 8}, {"epoch": 0}):
        with pytest.raises(FormatError):
            ParentReference(**{"manifest_id": bytes(32), **good, **fields})
    assert ParentReference(bytes(32), 1, 256, 7).depth == 7
