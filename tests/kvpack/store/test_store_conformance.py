"""What every place that keeps objects must do, whichever it is. Another backend adds one line."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_kit import SimulatedDisk
from memory_kit import MemoryStore
from store_kit import (
    HEADER,
    KEY,
    KEYRING,
    NOW,
    Session,
    new_store,
    save,
    snapshot,
    state,
    token_ids,
)

from kvpack.errors import FormatError
from kvpack.store import (
    ConflictError,
    CutReader,
    NotStoredError,
    ObjectData,
    StoreBusyError,
    apply_gc,
    check_store,
    cuts_of,
    find_deepest,
    list_cuts,
    names,
    plan_gc,
    release_session,
)
from kvpack.store.interface import ObjectStore, list_all
from kvpack.store.local import LocalStore
from kvpack.store.opening import initialise


def _simulated(*, fold_case: bool) -> LocalStore:
    disk = SimulatedDisk(fold_case=fold_case)
    disk.now_s = NOW
    initialise(disk, "sim")
    return LocalStore(disk, "sim")


BACKENDS: dict[str, Callable[[Path], ObjectStore]] = {
    "memory": lambda _: MemoryStore(),
    "folder": new_store,
    "simulated": lambda _: _simulated(fold_case=False),
    "case_folding": lambda _: _simulated(fold_case=True),
}


@pytest.fixture(params=[*BACKENDS, "s3"])
def store(request, tmp_path) -> Iterator[ObjectStore]:
    if request.param != "s3":
        yield BACKENDS[request.param](tmp_path)
        return
    # Not imported by a kvpack that is alone: it needs the extra.
    from tests.s3_server import new_store as new_bucket_store

    server = request.getfixturevalue("s3_server")
    with contextlib.closing(new_bucket_store(server.endpoint)) as made:
        yield made


_SERIAL = itertools.count(1)


def name() -> str:
    return names.chunk_name(next(_SERIAL).to_bytes(32, "big"))


def put(store: ObjectStore, *pairs: tuple[str, bytes]) -> tuple[bool, ...]:
    return store.put_if_absent([ObjectData(*pair) for pair in pairs])


def test_the_first_put_creates_and_an_equal_one_finds(store: ObjectStore) -> None:
    one, two = name(), name()
    assert put(store, (one, b"rows")) == (True,)
    assert put(store, (two, b"more"), (one, b"rows")) == (True, False)
    assert store.get(one) == b"rows" and store.get(two) == b"more"


def test_other_bytes_under_a_name_are_a_conflict_and_nothing_is_replaced(
    store: ObjectStore,
) -> None:
    one = name()
    put(store, (one, b"rows"))
    for other in (b"rowS", b"row", b"rows ", b""):
        with pytest.raises(ConflictError):
            put(store, (one, other))
    assert store.get(one) == b"rows"


def test_a_part_of_an_object_is_exactly_that_part(store: ObjectStore) -> None:
    one = name()
    put(store, (one, bytes(range(100))))
    assert store.get(one, 10, 5) == bytes(range(10, 15))
    assert store.get(one, 90) == bytes(range(90, 100))
    assert store.get(one, 100) == b""
    for offset, length in ((90, 11), (101, None), (200, 1)):
        with pytest.raises(FormatError):
            store.get(one, offset, length)


def test_what_is_not_there_is_said_to_be_not_there(store: ObjectStore) -> None:
    one = name()
    with pytest.raises(NotStoredError):
        store.get(one)
    assert store.stat([one]) == (None,)
    assert store.delete([one]) == 0
    put(store, (one, b"x"))
    (found,) = store.stat([one])
    assert found is not None and (found.name, found.object_bytes) == (one, 1)
    assert store.delete([one, one]) == 1
    assert store.stat([one]) == (None,)


def test_a_deleted_name_can_be_used_again(store: ObjectStore) -> None:
    one = name()
    put(store, (one, b"a"))
    store.delete([one])
    assert put(store, (one, b"other")) == (True,)


def test_objects_that_are_only_a_name(store: ObjectStore) -> None:
    node = names.node_name(bytes(32), bytes(32))
    assert put(store, (node, b"")) == (True,)
    assert put(store, (node, b"")) == (False,)
    assert store.get(node) == b""
    assert [item.name for item in list_all(store, "nodes/")] == [node]


def test_listing_is_ordered_paged_and_by_prefix(store: ObjectStore) -> None:
    wanted = sorted(name() for _ in range(25))
    put(store, *((one, b"x") for one in wanted))
    put(store, (names.cut_name(bytes(32)), b"cut"))
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        page = store.list("chunks/", after, 10)
        assert len(page.objects) <= 10
        seen += [item.name for item in page.objects]
        after = page.next_after
    assert seen == wanted
    assert [item.name for item in list_all(store, wanted[3])] == [wanted[3]]
    assert list_all(store, names.peer_prefix(bytes(32))) == []


def test_entries_are_found_by_their_link(store: ObjectStore) -> None:
    links = [bytes([number]) * 32 for number in (1, 2, 255)]
    entries = [names.Entry(link, 7, bytes(16), link) for link in links]
    put(store, *((entry.name, b"") for entry in entries))
    for entry in entries:
        found = list_all(store, names.entries_prefix(entry.link))
        assert [names.parse_entry(item.name) for item in found] == [entry]
    assert len(list_all(store, "entries/")) == 3


BAD_NAMES = [
    "", "chunks", "chunks/", "/etc/passwd", "../x", "chunks/../cuts/" + "0" * 64,
    "chunks/" + "0" * 63, "chunks/" + "0" * 65, "chunks/" + "G" * 64, "chunks/" + "A" * 64,
    "chunks/" + "0" * 64 + "\n", "chunks/" + "0" * 64 + "\0", "chunks\\" + "0" * 64,
    "chunks/%2e%2e", "C:/" + "0" * 64, "chunks/x:y", "other/" + "0" * 64, "chunks//" + "0" * 64,
    "entries/" + "0" * 64, "CHUNKS/" + "0" * 64, "chunks/" + "\u0660" * 64, "x" * 5000, "format",
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_NAMES)
def test_no_other_name_reaches_the_place(store: ObjectStore, bad: str) -> None:
    for call in (
        lambda: put(store, (bad, b"x")),
        lambda: store.get(bad),
        lambda: store.stat([bad]),
        lambda: store.delete([bad]),
    ):
        with pytest.raises(FormatError):
            call()


def test_one_collector_at_a_time(store: ObjectStore) -> None:
    with store.collector(), pytest.raises(StoreBusyError), store.collector():
        raise RuntimeError("two collectors")
    with store.collector():
        pass


def test_a_session_is_saved_found_restored_collected_and_forgotten(store: ObjectStore) -> None:
    ids = token_ids(1500)
    session = Session(ids)
    for position in (256, 700, 1024, 1300):
        save(store, session, position)
    assert list(check_store(store, KEYRING, deep=True)) == []
    found = find_deepest(store, KEYRING, KEY, HEADER, ids)
    assert (found.position, found.misses) == (1300, ())
    reader = CutReader(store, KEYRING, found.cut.cut_id)
    assert state(reader.snapshot()) == state(snapshot(ids[:1300]))
    assert [hold.position for hold in cuts_of(store, bytes([7]) * 16)] == [1300, 1024, 700, 256]
    assert release_session(store, bytes([7]) * 16) == 4
    apply_gc(store, plan_gc(store, NOW), NOW, b"c" * 16, lambda: None)
    assert list(list_cuts(store)) == []
    assert all(list_all(store, f"{kind}/") == [] for kind in names.KINDS)


def test_a_place_takes_the_first_name_that_is_proposed_and_keeps_it(store: ObjectStore) -> None:
    first, second = b"a" * 16, b"b" * 16
    assert store.identity(first) == first
    assert store.identity(second) == first
    assert store.irregular() == ()
    with pytest.raises(FormatError, match="identity"):
        store.identity(b"short")
