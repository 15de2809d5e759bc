"""Trimmed references: only for whole blocks of a window, and only in stores."""

from __future__ import annotations

import dataclasses

import pytest
from store_kit import HEADER, IDENTITY, KEY, Session, layout, rows, token_ids

from kvpack.bundle import encode_header
from kvpack.chunk import ChunkReference, seal_tile
from kvpack.codes import ChunkClass
from kvpack.errors import FormatError, KvpackError, LayoutMismatchError, LimitError
from kvpack.header import Header
from kvpack.layout import LayerKind
from kvpack.manifest import Manifest, open_manifest, read_unverified, seal_manifest
from kvpack.snapshot import TileSpec
from kvpack.store.grid import trimmed
from kvpack.store.reader import trim_tile

IDS = token_ids(1500)
HEADER_BYTES = encode_header(HEADER)


def cut_at(position: int) -> Manifest:
    """A cut whose window begins inside a block that was sealed whole."""
    session = Session(IDS)
    for edge in (256, 512, 768, 1024, position):
        session.grow(edge)
    return session.cut()[1]


MANIFEST = cut_at(1100)
TRIMMED = next(ref for ref in MANIFEST.references if ref.is_trimmed)


def with_reference(manifest: Manifest, old: ChunkReference, new: ChunkReference) -> Manifest:
    references = tuple(new if ref == old else ref for ref in manifest.references)
    return dataclasses.replace(manifest, references=references)


def test_the_window_of_a_cut_begins_inside_a_whole_block() -> None:
    assert (TRIMMED.first_position, TRIMMED.token_count) == (768, 256)
    assert (TRIMMED.first_used, TRIMMED.count_used) == (32, 224)
    assert TRIMMED.used_spec().first_position == 1100 - 300
    assert not TRIMMED.untrimmed().is_trimmed


def test_a_trimmed_manifest_comes_back_from_its_bytes() -> None:
    blob = seal_manifest(KEY, HEADER_BYTES, MANIFEST, in_store=True)
    assert open_manifest(KEY, HEADER_BYTES, blob, in_store=True) == MANIFEST
    assert read_unverified(blob) == MANIFEST


def test_outside_of_stores_it_is_refused_by_name() -> None:
    blob = seal_manifest(KEY, HEADER_BYTES, MANIFEST, in_store=True)
    with pytest.raises(FormatError, match=r"references\[\d+\]\.count_used"):
        open_manifest(KEY, HEADER_BYTES, blob)
    with pytest.raises(FormatError, match="count_used"):
        seal_manifest(KEY, HEADER_BYTES, MANIFEST)


@pytest.mark.parametrize(("first", "count"), [(31, 225), (33, 223), (32, 223), (0, 255), (0, 0)])
def test_a_trim_that_does_not_fit_the_window_is_refused(first: int, count: int) -> None:
    wrong = dataclasses.replace(TRIMMED, first_used=first, count_used=count)
    with pytest.raises(LayoutMismatchError):
        seal_manifest(KEY, HEADER_BYTES, with_reference(MANIFEST, TRIMMED, wrong), in_store=True)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 256), (1, 256), (255, 2), (256, 1), (1, 0), (-1, 1), (0, -1)]
)
def test_a_trim_beyond_the_block_cannot_exist(first: int, count: int) -> None:
    with pytest.raises((FormatError, LimitError)):
        dataclasses.replace(TRIMMED, first_used=first, count_used=count)


def test_only_whole_blocks_of_a_window_can_be_trimmed() -> None:
    full = next(ref for ref in MANIFEST.references if ref.chunk_class is ChunkClass.FULL)
    short = next(ref for ref in MANIFEST.references if ref.has_rows and ref.token_count < 256)
    ids = next(ref for ref in MANIFEST.references if ref.chunk_class is ChunkClass.TOKEN_IDS)
    for reference in (full, short, ids):
        with pytest.raises(FormatError):
            dataclasses.replace(reference, first_used=1, count_used=1)


def test_trimming_takes_exactly_the_used_rows() -> None:
    whole = rows(TileSpec(LayerKind.SWA, (0, 2), 768, 256), IDS)
    for first, count in ((768, 256), (800, 224), (1023, 1), (770, 3)):
        used = TileSpec(LayerKind.SWA, (0, 2), first, count)
        assert trim_tile(HEADER.layout, whole, used) == rows(used, IDS)


def test_a_trim_must_lie_in_its_block() -> None:
    session = Session(IDS)
    spec = TileSpec(LayerKind.SWA, (0, 2), 256, 256)
    reference = seal_tile(session.context, rows(spec, IDS)).reference
    assert trimmed(reference, spec) == reference
    for used in (
        TileSpec(LayerKind.SWA, (0, 2), 512, 10),
        TileSpec(LayerKind.SWA, (0, 2), 0, 256),
        TileSpec(LayerKind.SWA, (0,), 300, 10),
    ):
        with pytest.raises(KvpackError):
            trimmed(reference, used)


def test_cuts_of_small_windows_fall_back_to_short_heads() -> None:
    small = Header.of(dataclasses.replace(IDENTITY, layout=layout(40)), 1)
    session = Session(IDS, header=small)
    session.grow(1100)
    chunks, manifest = session.cut()
    assert not any(ref.is_trimmed for ref in manifest.references)
    assert any(chunk.reference.chunk_class is ChunkClass.SWA for chunk in chunks)
    seal_manifest(KEY, encode_header(small), manifest)
