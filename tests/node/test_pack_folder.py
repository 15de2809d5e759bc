"""Names that clients choose (fault 45): whatever they are, nothing outside is touched."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from kvpack.errors import LimitError, PublishError
from kvpack.publish import private_name
from node.errors import CredentialsError, NodeBusyError, PackNotFoundError, UsageError
from node.pack_folder import LEFTOVER_S, NAME_BYTES_MAX, PackFolder, tenant_folder

BAD_NAMES = {
    "empty": "",
    "dot": ".",
    "dots": "..",
    "up": "../out",
    "absolute": "/etc/passwd",
    "through": "a/../../b",
    "below": "a/b",
    "backslash": "..\\out",
    "nul": "a\0b",
    "newline": "a\nb",
    "escaped": "%2e%2e%2fout",
    "drive": "C:out",
    "stream": "x:y",
    "hidden": ".kvpack-x.tmp",
    "ends-in-dot": "a.",
    "ends-in-blank": "a ",
    "override": "a\u202eb",
    "surrogate": "a\udc80",
    "256-bytes": "x" * 256,
    "256-bytes-of-two": "ä" * 128,
}


def put(folder: PackFolder, name: str, content: bytes = b"pack") -> None:
    with folder.write(name) as sink:
        sink.write(content)


def get(folder: PackFolder, name: str) -> bytes:
    with folder.open(name) as file:
        return file.read()


@pytest.fixture
def place(tmp_path):
    """``(folder, its path)``; outside lies a file that nobody may touch."""
    (tmp_path / "out").write_bytes(b"outside")
    path = tmp_path / "packs"
    path.mkdir(mode=0o700)
    yield PackFolder(path), path
    assert (tmp_path / "out").read_bytes() == b"outside"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "packs"]


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_name_that_is_more_or_less_than_one_part_of_a_path_is_refused(place, name):
    folder, path = place
    with pytest.raises(LimitError, match="filename"):
        put(folder, name)
    with pytest.raises(LimitError, match="filename"):
        folder.open(name)
    assert not list(path.iterdir())


@pytest.mark.parametrize("name", ["slot.bin", "x" * NAME_BYTES_MAX, "会話 3.kvpack", "Ünïcode"])
def test_a_pack_comes_back_under_its_name_and_is_replaced_whole(place, name):
    folder, path = place
    put(folder, name, b"one")
    put(folder, name, b"another")
    assert get(folder, name) == b"another"
    assert [one.name for one in path.iterdir()] == [name]


@pytest.mark.parametrize("kind", ["link", "dangling", "folder link", "hard link", "pipe", "folder"])
def test_what_is_no_pack_is_neither_read_nor_written(place, tmp_path, kind):
    folder, path = place
    name, outside = path / "x", tmp_path / "out"
    make = {
        "link": lambda: name.symlink_to(outside),
        "dangling": lambda: name.symlink_to(tmp_path / "new"),
        "folder link": lambda: name.symlink_to(tmp_path),
        "hard link": lambda: os.link(outside, name),
        "pipe": lambda: os.mkfifo(name),
        "folder": lambda: name.mkdir(),
    }
    make[kind]()
    with pytest.raises(UsageError, match="no pack of this node"):
        put(folder, "x")
    with pytest.raises(UsageError, match="no pack of this node"):
        folder.open("x")
    assert [one.name for one in path.iterdir()] == ["x"]


def test_a_link_that_is_put_there_while_a_pack_is_written_leads_nowhere(place, tmp_path):
    folder, path = place
    with pytest.raises(UsageError, match="no pack of this node"), folder.write("x") as sink:
        sink.write(b"pack")
        (path / "x").symlink_to(tmp_path / "out")
    assert (path / "x").is_symlink() and len(list(path.iterdir())) == 1


def test_a_folder_that_is_a_link_or_open_to_others_is_not_used(tmp_path):
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(CredentialsError):
        put(PackFolder(tmp_path / "link"), "x")
    real.chmod(0o755)
    with pytest.raises(CredentialsError, match="0755"):
        put(PackFolder(real), "x")
    assert not list(real.iterdir())


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_packs_are_private_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        tmp_path.chmod(0o700)
        path = tmp_path / "packs"
        path.mkdir(mode=0o700)
        path.chmod(0o700)
        folder = PackFolder(path)
        with folder.write("x") as sink:
            sink.write(b"pack")
            (private,) = path.iterdir()
            assert stat.S_IMODE(private.stat().st_mode) == 0o600
        assert stat.S_IMODE((path / "x").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_folder_is_made_private(tmp_path):
    before = os.umask(0)
    try:
        put(PackFolder(tmp_path / "packs"), "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "packs").stat().st_mode) == 0o700


def test_a_writer_that_fails_leaves_what_was_there(place):
    folder, path = place
    put(folder, "x", b"old")
    with pytest.raises(ZeroDivisionError), folder.write("x") as sink:
        sink.write(b"half")
        raise ZeroDivisionError
    assert get(folder, "x") == b"old" and len(list(path.iterdir())) == 1


def test_as_many_packs_as_may_be_are_kept_and_one_of_them_may_be_replaced(tmp_path):
    folder = PackFolder(tmp_path / "packs", files_max=2)
    put(folder, "a")
    put(folder, "b")
    with pytest.raises(NodeBusyError, match="as many as may be"):
        put(folder, "c")
    put(folder, "b", b"new")
    assert get(folder, "b") == b"new"


def test_what_a_process_left_that_ended_while_writing_is_removed_later(place):
    folder, path = place
    old, young = path / private_name(), path / private_name()
    for one in (old, young):
        one.write_bytes(b"half")
    os.utime(old, (0, old.stat().st_mtime - LEFTOVER_S - 1))
    put(folder, "x")
    assert {one.name for one in path.iterdir()} == {"x", young.name}


def test_a_pack_that_is_not_there_is_missed_and_a_full_volume_is_named(place, monkeypatch):
    folder, path = place
    with pytest.raises(PackNotFoundError):
        folder.open("x")

    def full(*_):
        raise OSError(28, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(PublishError, match="disk is full"):
        put(folder, "x")
    monkeypatch.undo()
    assert not list(path.iterdir())


def test_two_writers_of_one_name_each_write_a_whole_pack(place):
    folder, path = place
    gate = threading.Barrier(2, timeout=10)

    def write(letter):
        with folder.write("x") as sink:
            gate.wait()
            sink.write(letter * 10_000)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert get(folder, "x") in (b"a" * 10_000, b"b" * 10_000)
    assert len(list(path.iterdir())) == 1


def test_tenants_have_folders_of_their_own(tmp_path):
    root = tmp_path / "packs"
    assert tenant_folder(root, "local", "local") == root
    other = PackFolder(tenant_folder(root, "other", "local"))
    put(other, "x")
    with pytest.raises(PackNotFoundError):
        PackFolder(root).open("x")
    with pytest.raises(LimitError):
        PackFolder(root).open(".tenant-other")
