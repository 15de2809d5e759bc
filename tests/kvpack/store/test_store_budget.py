"""Budgets bite, before a byte is written; full disks fail loudly and leave nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from disk_kit import SimulatedDisk
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
from kvpack.errors import LimitError
from kvpack.store import (
    Budget,
    CutWriter,
    GcPolicy,
    HoldKind,
    Severity,
    StoreFullError,
    apply_gc,
    check_store,
    find_deepest,
    list_cuts,
    names,
    plan_gc,
)
from kvpack.store.budget import BUDGET_BYTES, FREE_BYTES_MIN, measure
from kvpack.store.interface import list_all
from kvpack.store.local import LocalStore
from kvpack.store.opening import initialise

IDS = token_ids(4000)


@pytest.fixture
def disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.now_s = NOW
    initialise(disk, "sim")
    return disk


@pytest.fixture
def store(disk: SimulatedDisk) -> LocalStore:
    return LocalStore(disk, "sim")


def used(store: LocalStore) -> int:
    return measure(store, [], NOW).used_bytes


def objects(store: LocalStore) -> list[str]:
    return [item.name for kind in names.KINDS for item in list_all(store, f"{kind}/")]


def test_the_default_is_stated_and_leaves_room_for_others() -> None:
    assert Budget() == Budget(BUDGET_BYTES, FREE_BYTES_MIN)
    assert (BUDGET_BYTES, FREE_BYTES_MIN) == (64 << 30, 2 << 30)
    for wrong in (-1, 1 << 61):
        with pytest.raises(LimitError):
            Budget(bytes_max=wrong)


def test_a_pack_larger_than_the_budget_is_refused_before_writing(store: LocalStore) -> None:
    with CutWriter(store, KEYRING, encode_header(HEADER), tools(budget=Budget(9999, 0))) as writer:
        with pytest.raises(StoreFullError, match="larger than the whole budget") as caught:
            writer.reserve(10_000)
        assert (caught.value.needed_bytes, caught.value.free_bytes) == (10_000, 9999)
        assert caught.value.path == "sim"
        assert objects(store) == []
        writer.reserve(9999)


def test_a_budget_one_byte_too_small_bites(store: LocalStore, disk: SimulatedDisk) -> None:
    save(store, Session(IDS), 300)
    whole = used(store)
    for budget in (whole - 1, whole // 2, 1, 0):
        empty = SimulatedDisk()
        initialise(empty, "sim")
        other = LocalStore(empty, "sim")
        with pytest.raises(StoreFullError):
            save(other, Session(IDS), 300, budget=Budget(budget, 0))
        assert objects(other) == [] and other.irregular() == ()
    save(LocalStore(disk, "sim"), Session(IDS), 300, budget=Budget(2 * whole, 0))


def test_no_save_ever_takes_the_store_above_its_budget(store: LocalStore) -> None:
    budget = Budget(40_000, 0)
    refused = 0
    for number in range(12):
        ids = token_ids(400, seed=number + 1)
        try:
            save(store, Session(ids), 400, lineage=bytes([number]) * 16, budget=budget)
        except StoreFullError:
            refused += 1
        assert used(store) <= budget.bytes_max
    assert 0 < refused < 12
    assert list(check_store(store, KEYRING)) == []


def test_the_real_disk_counts_too(store: LocalStore, disk: SimulatedDisk) -> None:
    disk.room_bytes = 50_000
    with pytest.raises(StoreFullError) as caught:
        save(store, Session(IDS), 300, budget=Budget(1 << 40, 45_000))
    assert caught.value.free_bytes is not None and caught.value.free_bytes <= 5_000
    assert objects(store) == []
    save(store, Session(IDS), 300, budget=Budget(1 << 40, 1_000))


def test_what_other_writers_have_announced_is_taken(store: LocalStore) -> None:
    budget = Budget(10_000, 0)
    header = encode_header(HEADER)
    with (
        CutWriter(store, KEYRING, header, tools(budget=budget)) as first,
        CutWriter(store, KEYRING, header, tools(budget=budget)) as second,
    ):
        first.reserve(6_000)
        with pytest.raises(StoreFullError):
            second.reserve(6_000)
        second.reserve(3_000)


def test_leftovers_of_crashes_count(store: LocalStore, disk: SimulatedDisk) -> None:
    before = used(store)
    handle = disk.create("chunks", ".kvpack-" + "0" * 32 + ".tmp")
    disk.write(handle, bytes(5000))
    assert used(store) == before + 5000
    with pytest.raises(StoreFullError):
        save(store, Session(IDS), 300, budget=Budget(before + 5500, 0))


@pytest.mark.parametrize("claimed", [None, 1 << 40], ids=["seen_before", "fills_meanwhile"])
@pytest.mark.parametrize("room", [0, 1, 300, 1_000, 5_000, 9_000, 12_000, 16_000, 22_000])
def test_a_full_disk_fails_loudly_and_leaves_nothing(
    store: LocalStore, disk: SimulatedDisk, room: int, claimed: int | None
) -> None:
    save(store, Session(IDS), 300)
    before = sorted(objects(store))
    disk.room_bytes, disk.claimed_bytes = room, claimed
    ids = token_ids(900, seed=4)
    with pytest.raises(StoreFullError) as caught:
        save(store, Session(ids), 900, lineage=b"n" * 16)
    message = str(caught.value)
    assert (
        message.startswith("sim" if claimed is None else "sim/")
        and "bytes are needed" in message
        and "bytes are free" in message
    )
    assert caught.value.needed_bytes > 0 and caught.value.free_bytes is not None
    assert sorted(objects(store)) == before and store.irregular() == ()
    assert disk.room_bytes == room
    # The old cut still serves, and the store works again as soon as there is room.
    assert find_deepest(store, KEYRING, KEY, HEADER, IDS).position == 300
    disk.room_bytes, disk.claimed_bytes = 1 << 20, None
    save(store, Session(ids), 900, lineage=b"n" * 16)


def test_a_full_disk_can_still_be_cleared(store: LocalStore, disk: SimulatedDisk) -> None:
    for number in range(4):
        ids = token_ids(400, seed=number + 1)
        save(store, Session(ids), 400, lineage=bytes([number]) * 16, now=NOW + number)
    disk.room_bytes = 0
    policy = GcPolicy(Budget(1 << 40, 15_000))
    plan = plan_gc(store, NOW + 10, policy)
    assert plan.freed_bytes >= 15_000 and plan.excess_bytes == 0
    apply_gc(store, plan, NOW + 10, b"c" * 16, lambda: None)
    assert disk.room_bytes >= 15_000
    assert list(check_store(store, KEYRING)) == []


def test_eviction_takes_what_was_used_longest_ago_until_there_is_room(store: LocalStore) -> None:
    for number in range(6):
        ids = token_ids(400, seed=number + 1)
        save(store, Session(ids), 400, lineage=bytes([number]) * 16, now=NOW + number)
    one = used(store) // 6
    policy = GcPolicy(Budget(4 * one + 100, 0), needed_bytes=one)
    plan = plan_gc(store, NOW + 10, policy)
    assert [drop.hold.stamp for drop in plan.drops] == [NOW, NOW + 1, NOW + 2]
    assert any("evicted" in line for line in plan.lines())
    apply_gc(store, plan, NOW + 10, b"c" * 16, lambda: None)
    assert used(store) == plan.kept_bytes <= 3 * one + 100
    kept = {cut.holds[0].stamp for cut in list_cuts(store)}
    assert kept == {NOW + 3, NOW + 4, NOW + 5}


def test_a_shared_prefix_frees_only_what_nobody_else_needs(store: LocalStore) -> None:
    first, second = Session(IDS), Session(IDS)
    save(store, first, 1024, lineage=b"a" * 16, now=NOW)
    second.grow(1024)
    save(store, second, 1100, lineage=b"b" * 16, now=NOW + 1)
    total = used(store)
    plan = plan_gc(store, NOW + 10, GcPolicy(Budget(total - 1, 0)))
    assert [drop.hold.lineage for drop in plan.drops] == [b"a" * 16]
    apply_gc(store, plan, NOW + 10, b"c" * 16, lambda: None)
    assert used(store) == plan.kept_bytes
    assert find_deepest(store, KEYRING, KEY, HEADER, IDS).position == 1100
    assert list(check_store(store, KEYRING, deep=True)) == []


def test_what_is_in_use_is_not_evicted_and_the_plan_says_so(store: LocalStore) -> None:
    save(store, Session(IDS), 300)
    with CutWriter(store, KEYRING, encode_header(HEADER), tools()) as writer:
        session = Session(IDS)
        chunks = session.grow(300)
        more, manifest = session.cut()
        writer.add([*chunks, *more])
        plan = plan_gc(store, NOW + 1, GcPolicy(Budget(0, 0)))
        assert plan.excess_bytes > 0
        assert any("in use" in line for line in plan.lines())
        apply_gc(store, plan, NOW + 1, b"c" * 16, lambda: None)
        writer.publish(manifest, LINEAGE, HoldKind.TURN)
    assert list(check_store(store, KEYRING)) == []


class Stops(Exception):
    """What ends a save in the middle."""


def begin(store: LocalStore, ids: tuple[int, ...], meanwhile: Callable[[], object]) -> None:
    """A save that fails when its chunks are there, and what somebody does just before."""
    session = Session(ids)
    with (
        pytest.raises(Stops),
        CutWriter(store, KEYRING, encode_header(HEADER), tools()) as writer,
    ):
        grown = session.grow(len(ids))
        chunks, _ = session.cut()
        writer.add([*grown, *chunks])
        meanwhile()
        raise Stops


@pytest.mark.parametrize("saved_again", [False, True])
def test_a_chunk_that_a_save_brought_back_stays_though_the_save_fails(
    store: LocalStore, saved_again: bool
) -> None:
    save(store, Session(IDS), 900)
    lost = next(name for name in objects(store) if names.kind_of(name) == names.CHUNKS)
    store.delete([lost])
    assert [found.severity for found in check_store(store, KEYRING)] == [Severity.DAMAGE]

    def meanwhile() -> None:
        assert list(check_store(store, KEYRING)) == []
        if saved_again:
            # Its cut is there already, so nothing comes into the folder of cuts.
            save(store, Session(IDS), 900, now=NOW + 1)

    begin(store, IDS[:900], meanwhile)
    assert list(check_store(store, KEYRING)) == []


@pytest.mark.parametrize("by_another", [False, True])
def test_what_a_failed_save_made_stays_where_a_cut_came_to_need_it(
    store: LocalStore, disk: SimulatedDisk, by_another: bool
) -> None:
    theirs = LocalStore(disk, "sim") if by_another else store
    begin(store, IDS[:900], lambda: save(theirs, Session(IDS), 900, lineage=b"o" * 16))
    assert list(check_store(store, KEYRING)) == []
    assert find_deepest(store, KEYRING, KEY, HEADER, IDS).position == 900
