"""A delta and its parent's cut become one whole cut, or the delta is refused as incomplete."""

from __future__ import annotations

import dataclasses
import io

import pytest
from memory_kit import MemoryStore
from store_kit import (
    HEADER,
    IDENTITY,
    KEY,
    KEYRING,
    LAYOUT,
    LINEAGE,
    NUMERICS,
    Session,
    rows,
    save,
    snapshot,
    state,
    token_ids,
    tools,
)

from kvpack.bundle import BundleReader, BundleWriter, encode_header, write_snapshot
from kvpack.chunk import seal_tile, seal_token_ids
from kvpack.errors import IdentityMismatchError, IncompleteError
from kvpack.header import Header
from kvpack.identity import CallRun, CallSchedule
from kvpack.keys import EpochKey, Keyring
from kvpack.layout import LayerKind
from kvpack.manifest import ParentReference, seal_manifest
from kvpack.snapshot import tile_specs
from kvpack.store import CutReader, Trust, adopt_chunks, check_store, import_bundle

IDS = token_ids(1600)


def delta(parent_id: bytes, at: int, position: int, header: Header = HEADER, key: EpochKey = KEY):
    """A delta bundle from ``at`` to ``position``."""
    session = Session(IDS, header=header, key=key)
    session.position = position
    sink = io.BytesIO()
    writer = BundleWriter(sink, key, encode_header(header))
    first_row = max(at, position - 300)
    for kind, first in ((LayerKind.FULL, at), (LayerKind.SWA, first_row)):
        for spec in tile_specs(LAYOUT, kind, first, position):
            writer.add(seal_tile(session.context, rows(spec, IDS)))
    for chunk in seal_token_ids(session.context, IDS[at:position], at):
        writer.add(chunk)
    manifest = dataclasses.replace(
        session.manifest(writer.references), parent=ParentReference(parent_id, 1, at, 1)
    )
    writer.finish(seal_manifest(key, encode_header(header), manifest))
    return BundleReader(sink, Keyring([KEY, key]))


def with_session(position: int) -> tuple[MemoryStore, bytes]:
    """The parent as a session of this node left it: windows are trimmed references."""
    store, session = MemoryStore(), Session(IDS)
    edges = [*range(256, position, 256), position]
    chunks = [chunk for edge in edges[:-1] for chunk in session.grow(edge)]
    store.objects = {f"chunks/{c.reference.seal_id.hex()}": c.object for c in chunks}
    return store, save(store, session, position)


def with_import(position: int) -> tuple[MemoryStore, bytes]:
    """The parent as an imported bundle: the window's head is short."""
    store, sink = MemoryStore(), io.BytesIO()
    schedule = CallSchedule((CallRun(position, 1),))
    write_snapshot(sink, KEY, HEADER, snapshot(IDS[:position]), NUMERICS, schedule)
    bundle = BundleReader(sink, KEYRING)
    return store, import_bundle(store, KEYRING, bundle, LINEAGE, tools())


@pytest.mark.parametrize("make", [with_session, with_import])
@pytest.mark.parametrize(
    ("parent", "at", "position"),
    [(1100, 1024, 1150), (1100, 1024, 1300), (1100, 1024, 1600), (1024, 1024, 1025),
     (512, 512, 1200), (300, 256, 500)],
)  # fmt: skip
def test_a_delta_and_its_parent_are_the_whole_state(make, parent, at, position) -> None:
    store, parent_id = make(parent)
    bundle = delta(parent_id, at, position)
    cut_id = import_bundle(store, KEYRING, bundle, b"d" * 16, tools())
    reader = CutReader(store, KEYRING, cut_id)
    assert reader.cut.manifest.parent is None
    assert state(reader.snapshot()) == state(snapshot(IDS[:position]))
    assert {f.reason for f in check_store(store, KEYRING, deep=True)} <= {"garbage"}
    # The parent's whole blocks are not stored again.
    parents = {ref.seal_id for ref in CutReader(store, KEYRING, parent_id).cut.manifest.references}
    shared = [ref for ref in reader.cut.manifest.references if ref.seal_id in parents]
    assert (
        len([ref for ref in shared if ref.token_count == 256 and not ref.is_trimmed]) >= at // 256
    )


def test_without_its_parent_it_is_incomplete_and_leaves_nothing() -> None:
    store = MemoryStore()
    with pytest.raises(IncompleteError, match="import it first"):
        import_bundle(store, KEYRING, delta(bytes(32), 256, 500), LINEAGE, tools())
    assert store.objects == {}


def test_a_parent_that_is_too_short_or_whose_window_begins_too_late_is_not_enough() -> None:
    store, parent_id = with_session(512)
    with pytest.raises(IncompleteError, match="512 of 768"):
        import_bundle(store, KEYRING, delta(parent_id, 768, 1000), LINEAGE, tools())
    # The parent's window is [800, 1100); the delta at 800 needs rows from 500 on.
    store, parent_id = with_session(1100)
    with pytest.raises(IncompleteError, match="does not hold what the delta needs"):
        import_bundle(store, KEYRING, delta(parent_id, 768, 800), LINEAGE, tools())


def test_a_parent_of_another_model_is_refused() -> None:
    store, parent_id = with_session(512)
    other = Header.of(dataclasses.replace(IDENTITY, engine_abi="abi/2"), 1)
    with pytest.raises(IdentityMismatchError, match="parent"):
        import_bundle(store, KEYRING, delta(parent_id, 512, 700, other), LINEAGE, tools())


def test_a_delta_of_a_newer_epoch_goes_with_a_parent_of_an_older_one() -> None:
    store, parent_id = with_session(512)
    newer = EpochKey("acme", 2, bytes(32))
    bundle = delta(parent_id, 512, 700, Header.of(IDENTITY, 2), newer)
    keyring = Keyring([KEY, newer])
    cut_id = import_bundle(store, keyring, bundle, LINEAGE, tools())
    rows_of = CutReader(store, keyring, cut_id).snapshot()
    assert state(rows_of) == state(snapshot(IDS[:700]))


def test_a_peers_delta_serves_its_own_cut_until_it_is_recomputed() -> None:
    store, parent_id = with_session(1100)
    bundle = delta(parent_id, 1024, 1300)
    cut_id = import_bundle(store, KEYRING, bundle, b"d" * 16, tools(), trust=Trust.PEER)
    assert any(name.startswith(f"peer/{cut_id.hex()}") for name in store.objects)
    assert state(CutReader(store, KEYRING, cut_id).snapshot()) == state(snapshot(IDS[:1300]))
    assert all(one.adopted for one in adopt_chunks(store, KEYRING, cut_id))
    assert not any(name.startswith("peer/") for name in store.objects)
    assert state(CutReader(store, KEYRING, cut_id).snapshot()) == state(snapshot(IDS[:1300]))
