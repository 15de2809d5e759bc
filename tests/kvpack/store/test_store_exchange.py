"""Bundles in and out: objects keep their bytes, heads are sealed short, nothing is half there."""

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
    NOW,
    NUMERICS,
    Session,
    new_store,
    save,
    snapshot,
    state,
    token_ids,
    tools,
)

from kvpack.bundle import BundleReader, Depth, encode_header, read_snapshot, write_snapshot
from kvpack.chunk import Codec
from kvpack.errors import AuthenticationError, KvpackError, UnknownKeyError
from kvpack.identity import CallRun, CallSchedule
from kvpack.keys import EpochKey, Keyring
from kvpack.store import (
    Budget,
    CutReader,
    GcPolicy,
    NotStoredError,
    StoreFullError,
    Trust,
    apply_gc,
    check_store,
    cuts_of,
    export_bundle,
    find_deepest,
    import_bundle,
    list_cuts,
    names,
    pinned_cut,
    plan_gc,
)

IDS = token_ids(1500)


def pack(position: int = 1100, codec: Codec = Codec.RAW) -> bytes:
    """A bundle of another node."""
    sink = io.BytesIO()
    schedule = CallSchedule((CallRun(position, 1),))
    write_snapshot(sink, KEY, HEADER, snapshot(IDS[:position]), NUMERICS, schedule, codec=codec)
    return sink.getvalue()


PACK = pack()


def reader(data: bytes, keyring: Keyring = KEYRING) -> BundleReader:
    return BundleReader(io.BytesIO(data), keyring)


def exported(store: MemoryStore, cut_id: bytes) -> bytes:
    sink = io.BytesIO()
    export_bundle(store, KEYRING, cut_id, sink)
    return sink.getvalue()


@pytest.mark.parametrize("trust", list(Trust))
@pytest.mark.parametrize("codec", list(Codec))
def test_a_bundle_comes_back_byte_for_byte(trust: Trust, codec: Codec) -> None:
    store, data = MemoryStore(), pack(codec=codec)
    cut_id = import_bundle(store, KEYRING, reader(data), LINEAGE, tools(), trust=trust)
    assert exported(store, cut_id) == data
    assert list(check_store(store, KEYRING, deep=True)) == []
    assert [hold.cut_id for hold in cuts_of(store, LINEAGE)] == [cut_id]
    rows = CutReader(store, KEYRING, cut_id).snapshot()
    assert state(rows) == state(snapshot(IDS[:1100]))
    assert not any(name.startswith("intents/") for name in store.objects)


def test_importing_twice_keeps_everything_once() -> None:
    store = MemoryStore()
    first = import_bundle(store, KEYRING, reader(PACK), LINEAGE, tools())
    before = dict(store.objects)
    assert import_bundle(store, KEYRING, reader(PACK), LINEAGE, tools()) == first
    assert store.objects == before


def test_an_import_shares_whole_blocks_with_a_session_of_this_node() -> None:
    store = MemoryStore()
    session = Session(IDS)
    for edge in (512, 1024, 1100):
        save(store, session, edge)
    before = {name for name in store.objects if name.startswith("chunks/")}
    import_bundle(store, KEYRING, reader(PACK), b"i" * 16, tools())
    added = {name for name in store.objects if name.startswith("chunks/")} - before
    # The window's head and the ids are cut elsewhere; every whole block and the tail are shared.
    assert len(added) == 2


def test_a_trimmed_head_is_sealed_short_and_the_rest_keeps_its_bytes() -> None:
    store = MemoryStore()
    session = Session(IDS)
    for edge in (512, 1024, 1100):
        cut_id = save(store, session, edge)
    data = exported(store, cut_id)
    found = reader(data)
    found.check(Depth.DEEP)
    assert state(read_snapshot(found)) == state(snapshot(IDS[:1100]))
    stored = CutReader(store, KEYRING, cut_id).cut.manifest.references
    out = found.manifest.references
    changed = [(a, b) for a, b in zip(stored, out, strict=True) if a != b]
    assert [a.is_trimmed for a, _ in changed] == [True]
    assert changed[0][1].tile_spec() == changed[0][0].used_spec()
    # The head that is sealed here is the one that any other node would seal.
    assert {r.seal_id for r in out if r.has_rows} == {
        r.seal_id for r in reader(PACK).manifest.references if r.has_rows
    }  # fmt: skip
    assert exported(store, cut_id) == data


def test_what_was_exported_can_be_imported_elsewhere() -> None:
    store, other = MemoryStore(), MemoryStore()
    session = Session(IDS)
    for edge in (512, 1024, 1100):
        cut_id = save(store, session, edge)
    moved = import_bundle(other, KEYRING, reader(exported(store, cut_id)), LINEAGE, tools())
    rows = CutReader(other, KEYRING, moved).snapshot()
    assert state(rows) == state(snapshot(IDS[:1100]))
    assert find_deepest(other, KEYRING, KEY, HEADER, IDS).position == 0
    import_bundle(
        other, KEYRING, reader(PACK), b"x" * 16, tools(), indexed_ids=IDS[:1100]
    )  # fmt: skip
    assert find_deepest(other, KEYRING, KEY, HEADER, IDS).position == 1100


def test_room_is_asked_for_before_the_first_chunk() -> None:
    store = MemoryStore()
    budget = Budget(len(PACK) // 2, 0)
    with pytest.raises(StoreFullError, match="larger than the whole budget"):
        import_bundle(store, KEYRING, reader(PACK), LINEAGE, tools(budget=budget))
    assert store.objects == {}


def test_a_bundle_that_is_damaged_anywhere_leaves_nothing() -> None:
    for place in range(0, len(PACK), 97):
        data = bytearray(PACK)
        data[place] ^= 0x10
        store = MemoryStore()
        with pytest.raises(KvpackError):
            import_bundle(store, KEYRING, reader(bytes(data)), LINEAGE, tools())
        assert store.objects == {}


def test_a_store_without_the_key_exports_nothing() -> None:
    store = MemoryStore()
    cut_id = import_bundle(store, KEYRING, reader(PACK), LINEAGE, tools())
    with pytest.raises(UnknownKeyError):
        export_bundle(store, Keyring(), cut_id, io.BytesIO())
    stranger = Keyring([EpochKey("acme", 1, bytes(32))])
    with pytest.raises(AuthenticationError):
        export_bundle(store, stranger, cut_id, io.BytesIO())


def test_a_missing_or_damaged_chunk_ends_an_export() -> None:
    store = MemoryStore()
    cut_id = import_bundle(store, KEYRING, reader(PACK), LINEAGE, tools())
    chunk = next(name for name in store.objects if name.startswith("chunks/"))
    good = store.objects[chunk]
    store.objects[chunk] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(AuthenticationError):
        exported(store, cut_id)
    del store.objects[chunk]
    with pytest.raises(NotStoredError):
        exported(store, cut_id)
    with pytest.raises(NotStoredError):
        exported(store, bytes(32))


def test_a_pinned_cut_can_be_exported_while_everything_else_is_collected() -> None:
    store = MemoryStore()
    cut_id = import_bundle(store, KEYRING, reader(PACK), LINEAGE, tools())
    with pinned_cut(store, cut_id, tools()):
        plan = plan_gc(store, NOW, GcPolicy(Budget(0, 0)))
        apply_gc(store, plan, NOW, b"c" * 16, lambda: None)
        assert exported(store, cut_id) == PACK
    plan = plan_gc(store, NOW, GcPolicy(Budget(0, 0)))
    apply_gc(store, plan, NOW, b"d" * 16, lambda: None)
    assert store.objects == {}
    with pytest.raises(NotStoredError), pinned_cut(store, cut_id, tools()):
        raise RuntimeError("nothing to pin")
    assert store.objects == {}


def test_a_bundle_on_disk_is_imported_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    path.write_bytes(PACK)
    store = new_store(tmp_path)
    with BundleReader.open(path, KEYRING) as bundle:
        cut_id = import_bundle(store, KEYRING, bundle, LINEAGE, tools())
    assert [cut.cut_id for cut in list_cuts(store, KEYRING)] == [cut_id]
    assert encode_header(HEADER) in store.get(names.cut_name(cut_id))
