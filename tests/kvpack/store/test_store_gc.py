"""The collector: what it plans, what it spares, and what stops it."""

from __future__ import annotations

import pytest
from memory_kit import MemoryStore
from store_kit import (
    HEADER,
    KEY,
    KEYRING,
    LINEAGE,
    NOW,
    Session,
    save,
    token_ids,
    tools,
)

from kvpack.bundle import encode_header
from kvpack.errors import FormatError, VersionError
from kvpack.store import (
    Budget,
    CutReader,
    CutWriter,
    GcPolicy,
    Hold,
    HoldKind,
    IntentLostError,
    NotStoredError,
    StoreBusyError,
    StoreError,
    apply_gc,
    check_store,
    cuts_of,
    find_deepest,
    hold_cut,
    list_cuts,
    names,
    plan_gc,
    release_session,
)
from kvpack.store.intent import Intent, pin
from kvpack.store.interface import ObjectData
from kvpack.store.records import Record, State, decode_record
from kvpack.store.steps import drive

IDS = token_ids(6000)
NO_LIMIT = GcPolicy(Budget(1 << 40, 0))


def collect(store: MemoryStore, now: int = NOW, policy: GcPolicy = NO_LIMIT):
    return apply_gc(store, plan_gc(store, now, policy), now, b"c" * 16, lambda: None)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def kept(store: MemoryStore) -> list[int]:
    return sorted(cut.position for cut in list_cuts(store, KEYRING))


def test_a_plan_changes_nothing_and_says_what_it_would_do(store: MemoryStore) -> None:
    session = Session(IDS)
    for number, position in enumerate(range(300, 2401, 300)):
        save(store, session, position, now=NOW + number)
    before = dict(store.objects)
    plan = plan_gc(store, NOW, NO_LIMIT)
    assert store.objects == before
    lines = list(plan.lines())
    assert lines[0] == "drop 4 hold(s): superseded by a later cut of its session"
    assert lines[-1] == f"keep {plan.kept_bytes} bytes, free {plan.freed_bytes} bytes"
    assert {names.kind_of(item.name) for item in plan.garbage} == {
        "entries", "holds", "cuts", "chunks",
    }  # fmt: skip


def test_windows_of_old_turns_go_and_full_layers_stay(store: MemoryStore) -> None:
    session = Session(IDS)
    for position in range(300, 2401, 300):
        save(store, session, position)
    plan = plan_gc(store, NOW, NO_LIMIT)
    result = collect(store)
    assert (result.deleted, result.spared) == (len(plan.garbage), 0)
    assert kept(store) == [1500, 1800, 2100, 2400]
    assert list(check_store(store, KEYRING, deep=True)) == []
    assert find_deepest(store, KEYRING, KEY, HEADER, IDS[:1499]).position == 0
    assert find_deepest(store, KEYRING, KEY, HEADER, IDS[:1999]).position == 1800
    assert collect(store).deleted == 0


def test_cadence_cuts_leave_only_powers_of_two_and_the_newest(store: MemoryStore) -> None:
    session = Session(IDS)
    for number, position in enumerate((1536, 3072, 4608, 6000)):
        save(store, session, position, kind=HoldKind.CADENCE, now=NOW + number)
    collect(store)
    assert kept(store) == [1536, 3072, 6000]


def test_each_session_keeps_its_own_hold_on_a_shared_cut(store: MemoryStore) -> None:
    first = save(store, Session(IDS), 512, lineage=b"a" * 16)
    second = save(store, Session(IDS), 512, lineage=b"b" * 16)
    assert first == second
    assert release_session(store, b"a" * 16) == 1
    collect(store)
    assert kept(store) == [512]
    assert release_session(store, b"b" * 16) == 1
    collect(store)
    assert store.objects == {}


def test_using_a_cut_again_makes_it_young(store: MemoryStore) -> None:
    old = save(store, Session(IDS), 512, lineage=b"a" * 16, now=NOW)
    save(store, Session(token_ids(512, seed=2)), 512, lineage=b"b" * 16, now=NOW + 5)
    hold_cut(store, Hold(NOW + 9, 512, b"z" * 16, HoldKind.TURN, old), tools(NOW + 9))
    total = sum(map(len, store.objects.values()))
    plan = plan_gc(store, NOW + 10, GcPolicy(Budget(total - 100, 0)))
    assert [(d.hold.lineage, d.hold.stamp) for d in plan.drops] == [
        (b"a" * 16, NOW), (b"b" * 16, NOW + 5),
    ]  # fmt: skip
    apply_gc(store, plan, NOW + 10, b"c" * 16, lambda: None)
    assert [cut.cut_id for cut in list_cuts(store)] == [old]
    with pytest.raises(NotStoredError):
        hold_cut(store, Hold(NOW, 512, b"z" * 16, HoldKind.TURN, bytes(32)), tools())


def test_a_plan_that_is_old_by_now_spares_what_is_needed_by_now(store: MemoryStore) -> None:
    save(store, Session(IDS), 512, lineage=b"a" * 16)
    release_session(store, b"a" * 16)
    plan = plan_gc(store, NOW, NO_LIMIT)
    assert plan.freed_bytes > 0
    save(store, Session(IDS), 512, lineage=b"b" * 16)
    result = apply_gc(store, plan, NOW, b"c" * 16, lambda: None)
    assert result.deleted == 0 and result.spared == len(plan.garbage) > 5
    assert list(check_store(store, KEYRING)) == []


def test_a_writer_pins_what_it_relies_on_until_it_closes(store: MemoryStore) -> None:
    save(store, Session(IDS), 512)
    manifest = CutReader(store, KEYRING, next(list_cuts(store)).cut_id).cut.manifest
    with CutWriter(store, KEYRING, encode_header(HEADER), tools()) as writer:
        writer.rely(manifest.references)
        release_session(store, LINEAGE)
        collect(store)
        assert None not in store.stat([names.chunk_name(r.seal_id) for r in manifest.references])
        writer.publish(manifest, b"w" * 16, HoldKind.TURN, IDS[:512])
    assert list(check_store(store, KEYRING)) == []
    with (
        pytest.raises(NotStoredError),
        CutWriter(MemoryStore(), KEYRING, encode_header(HEADER), tools()) as writer,
    ):
        writer.rely(manifest.references)


def test_an_expired_intent_is_closed_and_its_writer_knows(store: MemoryStore) -> None:
    session = Session(IDS)
    chunks = session.grow(512)
    more, manifest = session.cut()
    writer = CutWriter(store, KEYRING, encode_header(HEADER), tools(NOW, intent_s=60))
    writer.add([*chunks, *more])
    policy = GcPolicy(Budget(1 << 40, 0), grace_s=30)
    collect(store, NOW + 90, policy)
    writer.renew()  # in its grace it is alive
    collect(store, NOW + 91, policy)
    assert store.objects == {}
    for call in (
        writer.renew,
        lambda: writer.add(chunks),
        lambda: writer.publish(manifest, LINEAGE, HoldKind.TURN),
    ):
        with pytest.raises(IntentLostError):
            call()
    writer.close()
    assert store.objects == {}


def test_a_writer_waits_for_a_collector_and_then_gives_up(store: MemoryStore) -> None:
    session = Session(IDS)
    chunks = session.grow(512)
    chunk = names.chunk_name(chunks[0].reference.seal_id)
    sweep = ObjectData(names.sweep_name(b"x" * 16), Record(State.SWEEP, pins=(chunk,)).encode())
    store.put_if_absent([sweep])
    pauses = []
    made = tools(pause=lambda: pauses.append(1), pauses_max=3)
    with CutWriter(store, KEYRING, encode_header(HEADER), made) as writer:
        with pytest.raises(StoreBusyError):
            writer.add(chunks[:1])
        assert len(pauses) == 4 and chunk not in store.objects
        # An empty sweep condemns everything: the collector had no room to say more.
        store.delete([sweep.name])
        store.put_if_absent([ObjectData(sweep.name, b"")])
        with pytest.raises(StoreBusyError):
            writer.add(chunks[1:])
        store.delete([sweep.name])
        writer.add(chunks)
        assert chunk in store.objects


def test_a_sweep_of_a_dead_collector_ends_with_the_next_one(store: MemoryStore) -> None:
    store.put_if_absent([ObjectData(names.sweep_name(b"x" * 16), b"")])
    collect(store)
    assert store.objects == {}


def test_a_second_collector_is_refused(store: MemoryStore) -> None:
    plan = plan_gc(store, NOW, NO_LIMIT)
    with store.collector(), pytest.raises(StoreBusyError):
        apply_gc(store, plan, NOW, b"c" * 16, lambda: None)


def intent_of(store: MemoryStore) -> str:
    intent = Intent(b"w" * 16)
    drive(store, pin(intent, [names.chunk_name(bytes(32))], NOW + 50, 0, 0), lambda: None)
    return names.intent_name(b"w" * 16, 0)


def test_a_damaged_intent_stops_the_collector_until_it_is_old(store: MemoryStore) -> None:
    name = intent_of(store)
    store.objects[name] = store.objects[name][:-1]
    policy = GcPolicy(Budget(1 << 40, 0), grace_s=300)
    for now in (0, 300):
        with pytest.raises(StoreError, match="damaged"):
            plan_gc(store, now, policy)
    assert {f.reason for f in check_store(store, KEYRING)} == {"damaged_intent"}
    collect(store, 301, policy)
    assert store.objects == {}


def test_what_a_newer_version_wrote_is_never_collected(store: MemoryStore) -> None:
    name = intent_of(store)
    newer = bytearray(store.objects[name])
    newer[4] = 2
    store.objects[name] = bytes(newer)
    with pytest.raises(VersionError):
        plan_gc(store, NOW + 10_000, NO_LIMIT)
    del store.objects[name]
    cut_id = save(store, Session(IDS), 512)
    cut = bytearray(store.objects[names.cut_name(cut_id)])
    cut[8] = 2
    store.objects[names.cut_name(cut_id)] = bytes(cut)
    with pytest.raises(VersionError):
        plan_gc(store, NOW + 10_000, NO_LIMIT)


def test_a_damaged_cut_is_reported_and_then_collected_with_its_chunks(store: MemoryStore) -> None:
    cut_id = save(store, Session(IDS), 512)
    name = names.cut_name(cut_id)
    store.objects[name] = store.objects[name][:-33] + store.objects[name][-32:]
    (listed,) = list_cuts(store, KEYRING)
    assert listed.problem and listed.position == 0
    assert any(finding.name == name for finding in check_store(store, KEYRING))
    plan = plan_gc(store, NOW, NO_LIMIT)
    assert any("gone or damaged" in line for line in plan.lines())
    collect(store)
    assert store.objects == {}


def test_a_collector_needs_no_key_and_keeps_what_it_cannot_judge(store: MemoryStore) -> None:
    """Cuts of other tenants, and of epochs that were retired here, are marked like any other."""
    save(store, Session(IDS), 512)
    before = dict(store.objects)
    collect(store)
    assert store.objects == before
    assert [cut.problem != "" for cut in list_cuts(store, KEYRING.__class__())] == [True]


def test_the_cuts_of_a_session_are_its_own(store: MemoryStore) -> None:
    session = Session(IDS)
    save(store, session, 300)
    save(store, session, 512)
    save(store, Session(IDS), 300, lineage=b"o" * 16)
    assert [hold.position for hold in cuts_of(store, LINEAGE)] == [512, 300]
    assert [hold.position for hold in cuts_of(store, b"o" * 16)] == [300]
    assert cuts_of(store, b"n" * 16) == []


@pytest.mark.parametrize("place", range(0, 120, 3))
def test_every_flipped_bit_of_a_record_is_refused(place: int) -> None:
    record = Record(State.OPEN, NOW, 5, (names.chunk_name(bytes(32)),))
    data = bytearray(record.encode())
    assert decode_record(bytes(data)) == record
    data[place % len(data)] ^= 1 << (place % 8)
    with pytest.raises(FormatError):
        decode_record(bytes(data))


def test_records_refuse_cuts_and_appended_bytes() -> None:
    data = Record(State.OPEN, NOW, 5, (names.chunk_name(bytes(32)),)).encode()
    for wrong in (b"", data[:-1], data + b"\0", data[:40], data * 2):
        with pytest.raises(FormatError):
            decode_record(wrong)
    with pytest.raises(FormatError):
        Record(State.OPEN, completions=("holds/x",))


def test_a_session_that_was_moved_into_the_store_is_not_evicted(store: MemoryStore) -> None:
    moved = save(store, Session(IDS), 512, lineage=b"a" * 16, kind=HoldKind.MOVED)
    other = Session(token_ids(512, seed=2))
    save(store, other, 512, lineage=b"b" * 16, now=NOW + 5)
    plan = plan_gc(store, NOW + 10, GcPolicy(Budget(100, 0)))
    assert plan.excess_bytes > 0
    apply_gc(store, plan, NOW + 10, b"c" * 16, lambda: None)
    assert [cut.cut_id for cut in list_cuts(store)] == [moved]
    assert list(check_store(store, KEYRING, deep=True)) == []
