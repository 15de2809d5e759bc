"""Publication: durable, then visible, never over a name that is taken, nothing left behind."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvpack import publish
from kvpack.errors import PublishError
from kvpack.publish import is_private_name, publish_new


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_nothing_is_visible_before_the_end_and_the_mode_is_private_from_birth(
    tmp_path: Path,
) -> None:
    with publish_new(tmp_path / "a") as file:
        (private,) = tmp_path.iterdir()
        assert is_private_name(private.name)
        assert stat.S_IMODE(private.stat().st_mode) == 0o600
        file.write(b"one")
        file.write(memoryview(b"two"))
    assert (tmp_path / "a").read_bytes() == b"onetwo"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert _names(tmp_path) == ["a"]
    assert (tmp_path / "a").stat().st_nlink == 1
    assert not is_private_name("a")


def test_an_error_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), publish_new(tmp_path / "a") as file:
        file.write(b"x")
        raise ZeroDivisionError
    assert _names(tmp_path) == []


def test_an_os_error_of_the_callers_own_is_not_renamed(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), publish_new(tmp_path / "a"):
        raise ConnectionResetError
    assert _names(tmp_path) == []


def test_a_taken_name_is_kept_also_when_it_appears_at_the_last_moment(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(PublishError, match="exists"), publish_new(tmp_path / "a"):
        pytest.fail("a taken name was found only after the work")
    with pytest.raises(PublishError, match="exists"), publish_new(tmp_path / "b") as file:
        file.write(b"new")
        (tmp_path / "b").write_bytes(b"somebody else's")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert (tmp_path / "b").read_bytes() == b"somebody else's"
    assert _names(tmp_path) == ["a", "b"]


def test_a_dangling_link_of_that_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PublishError, match="exists"), publish_new(tmp_path / "a") as file:
        file.write(b"x")
    assert _names(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "not a file name"),
        (".", "not a file name"),
        ("..", "not a file name"),
        ("folder/", "not a file name"),
        ("a\0b", "not a file name"),
        ("missing/a", "does not exist"),
        ("file/a", "not a folder"),
        ("x" * 300, "too long"),
    ],
)
def test_names_that_cannot_be_published_say_why(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    path = f"{tmp_path}/{name}" if name else ""
    with pytest.raises(PublishError, match=why), publish_new(path) as file:
        file.write(b"x")
    assert _names(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["кэш 😀", "-dash", "a" * 255, "e\u0301", "x:y", "%2e%2e"])
def test_odd_names_work(tmp_path: Path, name: str) -> None:
    with publish_new(tmp_path / name) as file:
        file.write(b"x")
    assert (tmp_path / name).read_bytes() == b"x"


def test_a_long_path_of_short_names_works(tmp_path: Path) -> None:
    folder = tmp_path / Path(*["n" * 50] * 8)
    folder.mkdir(parents=True)
    with publish_new(folder / "a") as file:
        file.write(b"x")
    assert (folder / "a").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("code", "why"),
    [(errno.ENOSPC, "full.*9 bytes more.*free"), (errno.EROFS, "read-only"), (errno.EIO, "Input")],
)
def test_a_refused_write_names_the_reason_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, why: str
) -> None:
    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(publish.os, "write", refuse)
    with pytest.raises(PublishError, match=why), publish_new(tmp_path / "a") as file:
        file.write(b"123456789")
    assert _names(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_failed_fsync_or_link_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(publish.os, call, refuse)
    with pytest.raises(PublishError, match="cannot publish"), publish_new(tmp_path / "a") as file:
        file.write(b"x")
    assert _names(tmp_path) == []


def test_a_volume_without_links_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "operation not supported")

    monkeypatch.setattr(publish.os, "link", refuse)
    with pytest.raises(PublishError, match="no links"), publish_new(tmp_path / "a") as file:
        file.write(b"x")
    assert _names(tmp_path) == []


@pytest.mark.parametrize("refuses", [False, True])
def test_a_long_file_is_written_out_on_the_way_and_flushed_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    calls: list[object] = []
    flush = os.fsync

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert (offset, advice) == (0, 4)
        calls.append(length)
        if refuses:
            raise OSError(errno.EINVAL, "invalid argument")

    def note(descriptor: int) -> None:
        calls.append("fsync")
        flush(descriptor)

    monkeypatch.setattr(publish.os, "posix_fadvise", advise, raising=False)
    monkeypatch.setattr(publish.os, "POSIX_FADV_DONTNEED", 4, raising=False)
    monkeypatch.setattr(publish.os, "fsync", note)
    piece = os.urandom(publish.WRITE_OUT_BYTES // 4)
    with publish_new(tmp_path / "a") as file:
        for _ in range(9):
            file.write(piece)
    assert calls == [4 * len(piece), 8 * len(piece), "fsync", "fsync"]  # The file and its folder.
    assert (tmp_path / "a").read_bytes() == 9 * piece


def test_partial_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(publish.os, "write", lambda fd, data: whole(fd, data[:3]))
    with publish_new(tmp_path / "a") as file:
        assert file.write(b"0123456789") == 10
        assert file.written_bytes == 10
    assert (tmp_path / "a").read_bytes() == b"0123456789"


_CHILD = """
import resource, signal, sys
from kvpack.publish import publish_new
from kvpack.errors import PublishError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with publish_new(sys.argv[1]) as file:
        file.write(bytes(5000))
except PublishError as error:
    sys.exit(0 if "larger" in str(error) else 3)
sys.exit(4)
"""


def test_a_real_file_size_limit_fails_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)
    done = subprocess.run([sys.executable, "-c", _CHILD, tmp_path / "a"], timeout=30, check=False)
    assert done.returncode == 0
    assert _names(tmp_path) == []


_KILLED = """
import os, signal, sys
from kvpack.publish import publish_new
with publish_new(sys.argv[1]) as file:
    file.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_only_a_name_that_is_known_as_private(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _KILLED, tmp_path / "a"], timeout=30, check=False)
    (left,) = tmp_path.iterdir()
    assert is_private_name(left.name)


def test_a_link_planted_at_the_private_name_is_neither_followed_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    monkeypatch.setattr(publish.secrets, "token_hex", lambda _: "known")
    (tmp_path / ".kvpack-known.tmp").symlink_to(victim)
    with pytest.raises(PublishError, match="exists"), publish_new(tmp_path / "a") as file:
        file.write(b"theirs")
    assert victim.read_bytes() == b"mine"
    assert _names(tmp_path) == [".kvpack-known.tmp", "victim"]
