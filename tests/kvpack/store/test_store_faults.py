"""faults.md groups C, L and N, as far as they concern a folder of files."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import stat
from pathlib import Path

import pytest
from disk_kit import SimulatedDisk
from store_kit import HEADER, KEY, KEYRING, NOW, Session, new_store, save, token_ids

from kvpack.errors import FormatError, KvpackError, LimitError, PublishError, VersionError
from kvpack.store import (
    ConflictError,
    CutReader,
    LocalStore,
    ObjectData,
    StoreError,
    apply_gc,
    check_store,
    find_deepest,
    names,
    open_store,
    plan_gc,
)
from kvpack.store.interface import list_all
from kvpack.store.opening import initialise

IDS = token_ids(700)
CHUNK = names.chunk_name(bytes(32))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_store(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777, 0o022])
def test_files_are_0600_and_folders_0700_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save(new_store(tmp_path), Session(IDS), 600)
    finally:
        os.umask(before)
    root = tmp_path / "store"
    for path in (root, *everything(root)):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o704])
def test_a_folder_that_others_can_enter_is_refused(folder: Path, store, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(StoreError, match=f"mode {mode:04o}.*expected 0700"):
        open_store(folder)


def test_a_folder_that_holds_something_else_is_not_taken_over(tmp_path: Path) -> None:
    other = tmp_path / "home"
    other.mkdir(mode=0o700)
    (other / "letter.txt").write_text("dear")
    for create in (True, False):
        with pytest.raises(FormatError):
            open_store(other, create=create)
    assert [path.name for path in other.iterdir()] == ["letter.txt"]


def test_only_create_makes_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        open_store(tmp_path / "none")
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(FormatError):
        open_store(tmp_path / "empty")
    (tmp_path / "file").write_bytes(b"")
    for create in (True, False):
        with pytest.raises(StoreError):
            open_store(tmp_path / "file", create=create)
    with pytest.raises(StoreError):
        open_store(tmp_path / "a" / "b", create=True)
    with pytest.raises(StoreError):
        open_store("nul\0name", create=True)


def test_a_store_of_another_version_is_refused_by_name(folder: Path, store) -> None:
    (folder / "format").write_bytes(b"kvpack-store-v2\n")
    with pytest.raises(VersionError, match=r"kvpack-store-v1.*kvpack-store-v2"):
        open_store(folder)


@pytest.mark.parametrize(
    "name",
    ["Кэш", "emoji 🗂", "e\u0301 decomposed", "with space", "-dash", "n" * 200, "CON", "a:b"],
)
def test_the_folder_may_have_any_name(tmp_path: Path, name: str, monkeypatch) -> None:
    store = open_store(tmp_path / name, create=True)
    save(store, Session(IDS), 600)
    monkeypatch.chdir(tmp_path)
    for way in (name, f"./{name}", f"{name}/"):
        again = open_store(way)
        assert find_deepest(again, KEYRING, KEY, HEADER, IDS).position == 600
        assert list(check_store(again, KEYRING)) == []


def test_a_path_of_more_than_300_characters_works(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 100] * 4)
    deep.mkdir(parents=True)
    save(open_store(deep / "store", create=True), Session(IDS), 600)
    with pytest.raises(StoreError, match="too long"):
        open_store(tmp_path / ("n" * 300), create=True)


def test_a_store_stays_usable_when_the_working_folder_changes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("store", create=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    save(store, Session(IDS), 600)
    assert not any((tmp_path / "elsewhere").iterdir())


def plant(folder: Path, kind: str, what: str, outside: Path) -> Path:
    """Put something that is no file of ours where an object would lie."""
    target = folder / CHUNK
    outside.mkdir()
    secret = outside / "secret"
    secret.write_bytes(b"somebody else's")
    if what == "link_to_file":
        target.symlink_to(secret)
    elif what == "link_to_folder":
        target.symlink_to(outside)
    elif what == "dangling_link":
        target.symlink_to(outside / "new")
    elif what == "fifo":
        os.mkfifo(target)
    elif what == "folder":
        target.mkdir()
    else:
        raise AssertionError(kind)
    return secret


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "what", ["link_to_file", "link_to_folder", "dangling_link", "fifo", "folder"]
)
def test_nothing_but_a_plain_file_is_read_written_or_followed(
    store: LocalStore, folder: Path, tmp_path: Path, what: str
) -> None:
    outside = tmp_path / "outside"
    secret = plant(folder, CHUNK, what, outside)
    with pytest.raises(KvpackError):
        store.get(CHUNK)
    assert store.stat([CHUNK]) == (None,)
    for data in (b"rows", b"somebody else's"):
        with pytest.raises((ConflictError, PublishError)):
            store.put_if_absent([ObjectData(CHUNK, data)])
    assert secret.read_bytes() == b"somebody else's"
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    strays = [item for item in store.irregular() if not item.is_leftover]
    assert [item.name for item in strays] == [CHUNK]
    assert {f.reason for f in check_store(store, KEYRING)} == {"stray"}
    # A collector touches only what is its own.
    apply_gc(store, plan_gc(store, NOW), NOW, b"c" * 16, lambda: None)
    assert (folder / CHUNK).is_symlink() or (folder / CHUNK).exists()


def test_a_folder_of_ours_that_became_a_link_is_not_followed(
    store: LocalStore, folder: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    shutil.move(folder / "chunks", outside)
    (folder / "chunks").symlink_to(outside)
    with pytest.raises(KvpackError):
        store.put_if_absent([ObjectData(CHUNK, b"rows")])
    with pytest.raises(KvpackError):
        store.get(CHUNK)
    assert list(outside.iterdir()) == []


def test_a_hard_link_to_a_stranger_is_never_written_through(
    store: LocalStore, folder: Path, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger"
    stranger.write_bytes(b"theirs")
    (folder / CHUNK).hardlink_to(stranger)
    with pytest.raises(ConflictError):
        store.put_if_absent([ObjectData(CHUNK, b"ours, longer")])
    store.delete([CHUNK])
    assert stranger.read_bytes() == b"theirs"


def test_what_others_put_into_the_folder_is_reported_and_left(
    store: LocalStore, folder: Path
) -> None:
    save(store, Session(IDS), 600)
    for name in ("chunks/notes.txt", "cuts/" + "0" * 63, "holds/.DS_Store", "README"):
        (folder / name).write_bytes(b"x")
    found = {f.name: f.reason for f in check_store(store, KEYRING)}
    assert set(found.values()) == {"stray"} and len(found) == 4
    apply_gc(store, plan_gc(store, NOW), NOW, b"c" * 16, lambda: None)
    assert len(store.irregular()) == 4


def test_a_pickle_planted_as_a_chunk_is_bytes_that_do_not_open(
    store: LocalStore, folder: Path, tmp_path: Path
) -> None:
    cut_id = save(store, Session(IDS), 600)
    chunk = next((folder / "chunks").iterdir())
    mark = tmp_path / "ran"
    chunk.write_bytes(f"cos\nsystem\n(S'touch {mark}'\ntR.".encode())
    assert {f.reason for f in check_store(store, KEYRING)} == {"malformed"}
    found = find_deepest(store, KEYRING, KEY, HEADER, IDS)
    assert found.cut is None and found.misses[0].cut_id == cut_id
    assert not mark.exists()


def test_declared_and_real_sizes_are_compared_before_memory_is_taken(
    store: LocalStore, folder: Path
) -> None:
    save(store, Session(IDS), 600)
    sparse = folder / names.chunk_name(b"s" * 32)
    for size in (1 << 31, 1 << 32, (1 << 40) + 7):
        with sparse.open("wb") as file:
            file.truncate(size)
        with pytest.raises(LimitError):
            store.get(names.chunk_name(b"s" * 32))
    hold = next((folder / "holds").iterdir())
    hold.write_bytes(b"x")
    with pytest.raises(LimitError):
        store.get(f"holds/{hold.name}")
    with pytest.raises(LimitError):
        store.put_if_absent([ObjectData(f"holds/{hold.name}", b"x")])


def test_every_cut_and_every_added_byte_of_every_file_is_found(
    store: LocalStore, folder: Path
) -> None:
    save(store, Session(IDS), 600)
    for path in [*(folder / "chunks").iterdir(), *(folder / "cuts").iterdir()]:
        good = path.read_bytes()
        for bad in (b"", good[:1], good[:-1], good + b"\0", good + good, bytes(len(good))):
            path.write_bytes(bad)
            assert any(f.severity.value == "damage" for f in check_store(store, KEYRING)), path
            found = find_deepest(store, KEYRING, KEY, HEADER, IDS)
            if found.cut is not None:  # Only opening it shows that the rows are others.
                with pytest.raises(KvpackError):
                    CutReader(store, KEYRING, found.cut.cut_id).snapshot()
        path.write_bytes(good)
    assert list(check_store(store, KEYRING)) == []


def test_a_folder_that_is_removed_while_it_is_used_is_an_error_with_its_path(
    store: LocalStore, folder: Path
) -> None:
    save(store, Session(IDS), 300)
    shutil.rmtree(folder)
    with pytest.raises(KvpackError) as caught:
        save(store, Session(IDS), 600)
    assert str(folder) in str(caught.value)
    found = find_deepest(store, KEYRING, KEY, HEADER, IDS)
    assert (found.cut, [miss.reason for miss in found.misses]) == (None, ["store_failed"])
    assert not folder.exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EROFS, "read-only"), (errno.EACCES, "does not let us write"),
     (errno.EDQUOT, "quota"), (errno.EFBIG, "larger than"), (errno.EOPNOTSUPP, "no links"),
     (errno.EIO, "Input/output error")],
)  # fmt: skip
@pytest.mark.parametrize("call", ["create", "write", "flush", "link", "flush_folder"])
def test_a_volume_that_refuses_is_named_with_its_reason_and_nothing_stays(
    code: int, words: str, call: str
) -> None:
    disk = SimulatedDisk()
    initialise(disk, "/volumes/packs")
    store = LocalStore(disk, "/volumes/packs")

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    setattr(disk, call, refuse)
    with pytest.raises(PublishError) as caught:
        store.put_if_absent([ObjectData(CHUNK, b"rows")])
    assert "/volumes/packs/chunks" in str(caught.value) and words in str(caught.value)
    assert all(not item.is_leftover for item in store.irregular())
    if call != "flush_folder":
        assert list_all(store, "chunks/") == []


def test_a_file_size_limit_of_the_process_is_an_error_and_leaves_nothing(
    store: LocalStore,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(PublishError, match="larger than this volume or process may write"):
            store.put_if_absent([ObjectData(CHUNK, bytes(5000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list_all(store, "chunks/") == [] and store.irregular() == ()


def test_a_file_that_shrinks_while_it_is_read_is_refused(store: LocalStore) -> None:
    disk = SimulatedDisk()
    initialise(disk, "sim")
    local = LocalStore(disk, "sim")
    local.put_if_absent([ObjectData(CHUNK, bytes(100))])
    plain = disk.read
    disk.read = lambda *a: plain(*a)[:50]  # type: ignore[method-assign]
    with pytest.raises(FormatError, match="100 bytes from 0, found 50"):
        local.get(CHUNK)
