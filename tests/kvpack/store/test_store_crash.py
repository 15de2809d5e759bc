"""Every prefix of the writes of a save, of a collection and of a first start, with what was not
flushed lost, kept, or lost with its name kept. A visible cut always opens to the last byte."""

from __future__ import annotations

import pytest
from disk_kit import Crash, SimulatedDisk
from store_kit import HEADER, KEY, KEYRING, LINEAGE, NOW, Session, save, snapshot, state, token_ids

from kvpack.publish import is_private_name
from kvpack.store import (
    CutReader,
    GcPolicy,
    GcResult,
    Severity,
    apply_gc,
    check_store,
    cuts_of,
    find_deepest,
    list_cuts,
    names,
    plan_gc,
    tidy_store,
)
from kvpack.store.local import LocalStore
from kvpack.store.opening import checked, initialise

IDS = token_ids(700)
LATER = NOW + 100_000
MODES = ("lost", "kept", "names", "cuts_lag", "cuts_lead")


def opened(disk: SimulatedDisk) -> LocalStore:
    return LocalStore(checked(disk), "sim")


@pytest.fixture(scope="module")
def empty() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.now_s = NOW
    initialise(disk, "sim")
    return disk


@pytest.fixture(scope="module")
def with_one_cut(empty: SimulatedDisk) -> SimulatedDisk:
    disk = empty.copy()
    save(opened(disk), Session(IDS), 300)
    return disk


def save_second(disk: SimulatedDisk) -> None:
    session = Session(IDS)
    session.grow(300)
    save(opened(disk), session, 640)


def collect(store: LocalStore, now: int) -> None:
    apply_gc(store, plan_gc(store, now), now, b"c" * 16, lambda: None)


def drop_first(disk: SimulatedDisk) -> None:
    """The first cut's only hold goes, so that its window is garbage."""
    store = opened(disk)
    store.delete([hold.name for hold in cuts_of(store, LINEAGE) if hold.position == 300])
    collect(store, NOW + 5)


def require_sound(disk: SimulatedDisk, must_have: set[int]) -> None:
    """Whatever is visible is whole, a collector clears the rest away, and work goes on."""
    store = opened(disk)
    assert [f for f in check_store(store, KEYRING) if f.severity is Severity.DAMAGE] == []
    positions = set()
    for cut in list_cuts(store, KEYRING):
        reader = CutReader(store, KEYRING, cut.cut_id)
        assert state(reader.snapshot()) == state(snapshot(IDS[: cut.position]))
        positions.add(cut.position)
    assert positions >= must_have
    found = find_deepest(store, KEYRING, KEY, HEADER, IDS)
    assert found.position in {0, *positions}
    collect(store, LATER)
    assert list(check_store(store, KEYRING)) == []
    assert disk.names("intents") == [] and disk.names("sweeps") == []
    assert {cut.position for cut in list_cuts(store, KEYRING)} >= must_have
    save(store, Session(IDS), 650)
    assert find_deepest(store, KEYRING, KEY, HEADER, IDS).position == 650


def content(disk: SimulatedDisk) -> tuple[object, ...]:
    """Everything on a disk as a value; names that are drawn are left out of it."""
    found = []
    for folder in ("", *names.KINDS, *(f"{names.SHARDED}/{shard}" for shard in names.SHARDS)):
        for name in disk.names(folder):
            if not disk.status(folder, name).is_folder:
                shown = name[32:] if folder == names.INTENTS else name
                shown = "private" if is_private_name(name) else shown
                found.append((folder, shown, disk.read(folder, name, 0, 1 << 30)))
    return tuple(sorted(found))


def crash_everywhere(base: SimulatedDisk, work, must_have: set[int]) -> int:
    """Run ``work`` once for each of its calls, and let the machine stop before that call.

    Many of those disks are equal, and of equal ones one is asked.
    """
    whole = base.copy()
    work(whole)
    seen = set()
    for crash_at in range(whole.calls):
        disk = base.copy()
        disk.crash_at = crash_at
        with pytest.raises(Crash):
            work(disk)
        for mode in MODES:
            found = disk.after_crash(mode)
            if (value := content(found)) not in seen:
                seen.add(value)
                require_sound(found, must_have)
    assert len(seen) > 10
    return whole.calls


def test_a_save_may_stop_before_any_of_its_writes(empty: SimulatedDisk) -> None:
    calls = crash_everywhere(empty, lambda disk: save(opened(disk), Session(IDS), 300), set())
    assert calls > 40


def test_a_second_save_may_stop_and_the_first_cut_stays(with_one_cut: SimulatedDisk) -> None:
    crash_everywhere(with_one_cut, save_second, {300})


def test_a_collection_may_stop_before_any_of_its_writes(with_one_cut: SimulatedDisk) -> None:
    disk = with_one_cut.copy()
    save_second(disk)
    calls = crash_everywhere(disk, drop_first, {640})
    assert calls > 10


def test_a_first_start_may_stop_before_any_of_its_writes() -> None:
    whole = SimulatedDisk()
    initialise(whole, "sim")
    for crash_at in range(0, whole.calls, 7):
        for mode in MODES:
            disk = SimulatedDisk()
            disk.crash_at = crash_at
            with pytest.raises(Crash):
                initialise(disk, "sim")
            again = disk.after_crash(mode)
            initialise(again, "sim")
            opened(again)


def test_what_a_save_returned_survives_a_power_cut(empty: SimulatedDisk) -> None:
    disk = empty.copy()
    cut_id = save(opened(disk), Session(IDS), 300)
    store = opened(disk.after_crash("lost"))
    assert [cut.cut_id for cut in list_cuts(store, KEYRING)] == [cut_id]
    assert find_deepest(store, KEYRING, KEY, HEADER, IDS).position == 300
    assert list(store.list("intents/").objects) == []


def test_leftovers_are_counted_at_once_and_removed_when_they_are_old(
    empty: SimulatedDisk,
) -> None:
    disk = empty.copy()
    disk.crash_at = next(
        number for number, what in enumerate(_calls_of_a_save(empty)) if what == "link chunks"
    )  # fmt: skip
    with pytest.raises(Crash):
        save(opened(disk), Session(IDS), 300)
    disk = disk.after_crash("kept")
    store = opened(disk)
    left = [item for item in store.irregular() if item.is_leftover]
    assert left and all(item.file_bytes > 0 for item in left)
    young = plan_gc(store, NOW + 60, GcPolicy(leftover_age_s=3600))
    assert young.leftovers == ()
    old = plan_gc(store, NOW + 3601, GcPolicy(leftover_age_s=3600))
    assert len(old.leftovers) == len(left)
    assert old.freed_bytes >= sum(item.file_bytes for item in left)
    with store.collector():
        assert tidy_store(store, NOW + 3601, lambda: None) == GcResult()  # somebody is at it
    assert tidy_store(store, NOW + 60, lambda: None).leftovers == 0
    done = tidy_store(store, NOW + 3601, lambda: None)
    assert (done.leftovers, done.closed) == (len(left), 1)
    assert done.freed_bytes == sum(item.file_bytes for item in left)
    assert store.irregular() == () and disk.names("intents") == []


def _calls_of_a_save(empty: SimulatedDisk) -> list[str]:
    disk = empty.copy()
    save(opened(disk), Session(IDS), 300)
    return disk.log
