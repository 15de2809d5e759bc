"""A peer with the tenant's key can lie about what a chunk is: whom that can hurt, and whom not."""

from __future__ import annotations

import dataclasses
import io
from unittest import mock

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
    save,
    snapshot,
    state,
    token_ids,
    tools,
)

from kvpack.bundle import BundleReader, encode_header, write_snapshot
from kvpack.chunk import seal
from kvpack.errors import AuthenticationError
from kvpack.identity import CallRun, CallSchedule
from kvpack.snapshot import SessionCacheSnapshot
from kvpack.store import (
    ConflictError,
    CutReader,
    CutWriter,
    HoldKind,
    Trust,
    adopt_chunks,
    apply_gc,
    check_store,
    find_deepest,
    held,
    import_bundle,
    names,
    plan_gc,
)

IDS = token_ids(700)


def pack(found: SessionCacheSnapshot) -> BundleReader:
    sink = io.BytesIO()
    schedule = CallSchedule((CallRun(found.position, 1),))
    write_snapshot(sink, KEY, HEADER, found, NUMERICS, schedule)
    return BundleReader(sink, KEYRING)


def lying_pack() -> BundleReader:
    """Its first chunk claims the content id of the true rows and holds others.

    Raw chunks of equal content ids and lengths have equal seal ids, so the lie has the very name
    that this node would give to the true chunk.
    """
    true = snapshot(IDS[:600])
    first = true.tiles[0]
    false = dataclasses.replace(first, data=bytes(len(first.data)))
    lied = dataclasses.replace(true, tiles=(false, *true.tiles[1:]))
    honest = seal.compute_content_id

    def compute(context, reference, plaintext):
        lying = bytes(plaintext) == bytes(len(first.data))
        return honest(context, reference, first.data if lying else plaintext)

    with mock.patch.object(seal, "compute_content_id", compute):
        return pack(lied)


TRUE, LYING = pack(snapshot(IDS[:600])), lying_pack()


def kinds(store: MemoryStore) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in store.objects:
        counts[names.kind_of(name)] = counts.get(names.kind_of(name), 0) + 1
    return counts


def receive(store: MemoryStore, bundle: BundleReader) -> bytes:
    return import_bundle(
        store, KEYRING, bundle, LINEAGE, tools(), trust=Trust.PEER, kind=HoldKind.TURN
    )  # fmt: skip


def test_the_lie_has_the_name_of_the_truth() -> None:
    theirs, ours = LYING.manifest.references[0], TRUE.manifest.references[0]
    assert (theirs.content_id, theirs.seal_id) == (ours.content_id, ours.seal_id)
    assert next(iter(LYING.objects())) != next(iter(TRUE.objects()))


def test_a_peers_chunks_serve_its_cut_and_nobody_else() -> None:
    store = MemoryStore()
    cut_id = receive(store, TRUE)
    assert "chunks" not in kinds(store) and kinds(store)["peer"] == len(TRUE.manifest.references)
    assert state(CutReader(store, KEYRING, cut_id).snapshot()) == state(snapshot(IDS[:600]))
    assert not any(held(store, TRUE.manifest.references))
    assert find_deepest(store, KEYRING, KEY, HEADER, IDS).cut is None
    # A second session of the same rows writes them itself.
    save(store, Session(IDS), 600, lineage=b"o" * 16)
    assert find_deepest(store, KEYRING, KEY, HEADER, IDS).position == 600


def test_after_recomputation_they_are_ours() -> None:
    store = MemoryStore()
    cut_id = receive(store, TRUE)
    adopted = list(adopt_chunks(store, KEYRING, cut_id))
    assert all(one.adopted for one in adopted)
    assert {one.seal_id for one in adopted} == {r.seal_id for r in TRUE.manifest.references}
    assert "peer" not in kinds(store)
    assert all(held(store, TRUE.manifest.references))
    assert state(CutReader(store, KEYRING, cut_id).snapshot()) == state(snapshot(IDS[:600]))
    # Rows that are what they claim need not be right for their tokens: never in the index.
    assert find_deepest(store, KEYRING, KEY, HEADER, IDS).cut is None
    assert list(check_store(store, KEYRING, deep=True)) == []


def test_a_lie_is_never_adopted_and_the_true_chunk_can_still_be_stored() -> None:
    store = MemoryStore()
    cut_id = receive(store, LYING)
    refused = [one for one in adopt_chunks(store, KEYRING, cut_id) if not one.adopted]
    assert [(one.seal_id, one.reason) for one in refused] == [
        (LYING.manifest.references[0].seal_id, "not_authentic")
    ]
    assert not held(store, LYING.manifest.references)[0]
    save(store, Session(IDS), 600, lineage=b"o" * 16)
    found = find_deepest(store, KEYRING, KEY, HEADER, IDS)
    assert state(CutReader(store, KEYRING, found.cut.cut_id).snapshot()) == state(
        snapshot(IDS[:600])
    )
    # And once the truth is there, the liar's own cut reads the truth.
    assert state(CutReader(store, KEYRING, cut_id).snapshot()) == state(snapshot(IDS[:600]))


def test_recomputing_on_import_refuses_the_lie_and_leaves_nothing() -> None:
    store = MemoryStore()
    with pytest.raises(AuthenticationError, match="content id"):
        import_bundle(store, KEYRING, LYING, LINEAGE, tools(), trust=Trust.RECOMPUTE)
    assert store.objects == {}


def test_a_peer_cannot_shut_out_our_chunks_nor_ours_a_peers() -> None:
    store = MemoryStore()
    save(store, Session(IDS), 600)
    before = dict(store.objects)
    cut_id = receive(store, LYING)
    assert {name: store.objects[name] for name in before} == before
    # What is byte for byte ours is not stored again; only the lie and the cut's own pieces are.
    peers = {names.peer_ids(name)[1] for name in store.objects if name.startswith("peer/")}
    assert LYING.manifest.references[0].seal_id in peers
    shared = {ref.seal_id for ref in TRUE.manifest.references} - peers
    assert all(names.chunk_name(seal_id) in before for seal_id in shared)
    assert len(shared) > 2
    CutReader(store, KEYRING, cut_id).check()


def test_rows_of_a_peer_cannot_be_indexed_through_the_writer() -> None:
    store = MemoryStore()
    header = encode_header(HEADER)
    blob = TRUE.index.manifest_blob
    with CutWriter(store, KEYRING, header, tools(), peer_cut=blob[-32:]) as writer:
        writer.add(TRUE.objects())
        with pytest.raises(RuntimeError, match="its own session"):
            writer.publish_sealed(blob, LINEAGE, HoldKind.TURN, IDS[:600])


def test_a_shared_name_that_holds_an_authentic_lie_is_a_conflict_not_a_replacement() -> None:
    """Only somebody who writes in our folder can bring it there."""
    store = MemoryStore()
    lie = next(iter(LYING.objects()))
    name = names.chunk_name(LYING.manifest.references[0].seal_id)
    store.objects[name] = lie
    with pytest.raises(ConflictError):
        save(store, Session(IDS), 600)
    assert store.objects == {name: lie}


def test_a_damaged_chunk_is_healed_by_the_next_writer_that_brings_it() -> None:
    store = MemoryStore()
    cut_id = save(store, Session(IDS), 600)
    name = next(name for name in store.objects if name.startswith("chunks/"))
    good = store.objects[name]
    for bad in (good[:-1], b"", bytes(len(good)), good[:-1] + bytes([good[-1] ^ 1])):
        store.objects[name] = bad
        save(store, Session(IDS), 600, lineage=b"o" * 16, now=NOW + 1)
        assert store.objects[name] == good
        CutReader(store, KEYRING, cut_id).check(deep=True)


def test_a_collector_takes_a_peers_chunks_with_its_cut() -> None:
    store = MemoryStore()
    receive(store, TRUE)
    save(store, Session(IDS), 300, lineage=b"o" * 16)
    store.delete([name for name in store.objects if name.startswith(f"holds/{LINEAGE.hex()}")])
    apply_gc(store, plan_gc(store, NOW), NOW, b"c" * 16, lambda: None)
    assert "peer" not in kinds(store) and kinds(store)["cuts"] == 1
    assert list(check_store(store, KEYRING)) == []
