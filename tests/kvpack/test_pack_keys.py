"""Root keys and their files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvpack.errors import KeyFileError, LimitError, PublishError, UnknownKeyError
from kvpack.keys import (
    EpochKey,
    Keyring,
    generate_key,
    load_key_file,
    load_keyring,
    write_key_file,
)

_ROOT = bytes(range(32))


def test_a_subkey_is_hkdf_sha256_with_tenant_and_epoch_as_salt() -> None:
    salt = b"kvpack/v1" + b"\x04\x00acme" + b"\x07\x00\x00\x00"
    expected = HKDF(hashes.SHA256(), 32, salt, b"kvpack/v1/chunk\0" + b"s" * 32).derive(_ROOT)
    assert EpochKey("acme", 7, _ROOT).subkey("chunk", b"s" * 32) == expected


def test_purpose_context_tenant_epoch_and_root_each_give_another_key() -> None:
    keys = {
        EpochKey("acme", 1, _ROOT).subkey("chunk"),
        EpochKey("acme", 1, _ROOT).subkey("seal-id"),
        EpochKey("acme", 1, _ROOT).subkey("chunk", b"x"),
        EpochKey("acm", 1, _ROOT).subkey("chunk"),
        EpochKey("acme", 2, _ROOT).subkey("chunk"),
        EpochKey("acme", 1, bytes(32)).subkey("chunk"),
    }
    assert len(keys) == 6


def test_repr_and_errors_never_show_the_secret(tmp_path: Path) -> None:
    key = EpochKey("acme", 1, _ROOT)
    path = tmp_path / "k"
    write_key_file(path, key)
    text = path.read_text().replace("acme", "acmf")
    path.unlink()
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(KeyFileError) as caught:
        load_key_file(path)
    for shown in (repr(key), str(key), str(caught.value), repr(Keyring([key]))):
        assert _ROOT.hex()[:8] not in shown
        assert repr(_ROOT)[2:10] not in shown


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_a_key_file_is_0600_whatever_the_umask_and_reads_back(tmp_path: Path, umask: int) -> None:
    key = generate_key("acmé", 3)
    old = os.umask(umask)
    try:
        write_key_file(tmp_path / "k", key)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
    assert load_key_file(tmp_path / "k").subkey("chunk") == key.subkey("chunk")
    assert [entry.name for entry in tmp_path.iterdir()] == ["k"]


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    first = generate_key("acme")
    write_key_file(tmp_path / "k", first)
    with pytest.raises(PublishError, match="exists"):
        write_key_file(tmp_path / "k", generate_key("acme"))
    assert load_key_file(tmp_path / "k").subkey("x") == first.subkey("x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["k"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601, 0o644, 0o777])
def test_a_mode_that_lets_others_in_is_refused_by_name(tmp_path: Path, mode: int) -> None:
    write_key_file(tmp_path / "k", generate_key("acme"))
    (tmp_path / "k").chmod(mode)
    with pytest.raises(KeyFileError, match=f"{mode:04o}"):
        load_key_file(tmp_path / "k")


def test_links_fifos_folders_devices_and_absence_are_refused_without_waiting(
    tmp_path: Path,
) -> None:
    write_key_file(tmp_path / "k", generate_key("acme"))
    (tmp_path / "link").symlink_to(tmp_path / "k")
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name, why in [
        ("link", "symbolic link"),
        ("fifo", "regular file"),
        ("folder", "regular file"),
        ("absent", "No such file"),
        ("k/x", "Not a directory"),
    ]:
        with pytest.raises(KeyFileError, match=why):
            load_key_file(tmp_path / name)
    with pytest.raises(KeyFileError, match="regular file"):
        load_key_file("/dev/null")
    with pytest.raises(KeyFileError, match="not a file name"):
        load_key_file("a\0b")


def test_every_change_of_a_key_file_is_refused(tmp_path: Path) -> None:
    write_key_file(tmp_path / "good", generate_key("acme"))
    good = (tmp_path / "good").read_bytes()
    changed = [good[:cut] for cut in range(len(good))]
    changed += [good + b"\n", good + b"x", b"\xef\xbb\xbf" + good, good.replace(b"\n", b"\r\n")]
    changed += [
        good[:i] + bytes([good[i] ^ bit]) + good[i + 1 :]
        for i in range(len(good))
        for bit in (1, 32)
    ]
    path = tmp_path / "k"
    path.touch(0o600)
    for text in changed:
        path.write_bytes(text)
        with pytest.raises(KeyFileError):
            load_key_file(path)


def test_a_keyring_knows_what_it_holds(tmp_path: Path) -> None:
    old, new = generate_key("acme", 1), generate_key("acme", 2)
    ring = Keyring([old, new, old])
    assert len(ring) == 2
    assert ring.get("acme", 2) is new
    for tenant, epoch in (("acme", 3), ("other", 1)):
        with pytest.raises(UnknownKeyError, match=f"'{tenant}', epoch {epoch}"):
            ring.get(tenant, epoch)
    with pytest.raises(KeyFileError, match="two keys"):
        Keyring([old, generate_key("acme", 1)])

    write_key_file(tmp_path / "1.key", old)
    write_key_file(tmp_path / "2.key", new)
    (tmp_path / "notes.txt").write_text("not a key")
    assert {key.epoch for key in load_keyring(tmp_path)} == {1, 2}
    with pytest.raises(KeyFileError, match="No such file"):
        load_keyring(tmp_path / "absent")


@pytest.mark.parametrize(
    ("tenant", "epoch"),
    [("", 1), ("a\nb", 1), ("x" * 257, 1), ("\ud800", 1), ("a", 0), ("a", -1), ("a", 1 << 31)],
)
def test_tenant_and_epoch_have_caps(tenant: str, epoch: int) -> None:
    with pytest.raises(LimitError):
        generate_key(tenant, epoch)


def test_tenant_and_epoch_at_their_caps_are_good(tmp_path: Path) -> None:
    key = generate_key("x" * 256, (1 << 31) - 1)
    write_key_file(tmp_path / "k", key)
    assert load_key_file(tmp_path / "k").subkey("x") == key.subkey("x")
    with pytest.raises(LimitError, match="32 bytes"):
        EpochKey("a", 1, bytes(31))
