"""A credentials folder that follows certificates which cert-manager makes and renews."""

from __future__ import annotations

import datetime
import importlib.util
import stat
import sys

import pytest
from deploy_support import DEPLOY

from kvpack.errors import KvpackError
from kvpack.keys import generate_key, write_key_file
from node import certificates
from node.credentials import Role, load_credentials, read_pins


def load():
    path = DEPLOY / "container" / "credentials_sync.py"
    spec = importlib.util.spec_from_file_location("credentials_sync", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sync = load()


class Issuer:
    """Secrets as kubelet mounts them: links, readable by a group."""

    def __init__(self, root):
        self.root = root
        self.authority = certificates.new_authority()
        self.leaves = {}
        self.count = 0

    def issue(self, name):
        # Each a second later than the one before: certificates count no smaller times.
        self.count += 1
        key = certificates.new_key()
        leaf = certificates.issue(
            self.authority,
            certificates.request_for(certificates.load_key(key, "key"), name),
            lambda: certificates.utc_now() + datetime.timedelta(seconds=self.count),
        )
        own = self.root / name
        self._mount(own / "tls.key", key)
        # As issuers that are no root of their own do it: the chain, leaf first.
        self._mount(own / "tls.crt", leaf + self.authority.certificate_pem)
        self._mount(own / "ca.crt", self.authority.certificate_pem)
        self.leaves.setdefault(name, []).append(certificates.leaf_digest(leaf))
        return own

    def give(self, name, role):
        """The certificate of ``name`` as one of ``role``'s, as it is now."""
        content = (self.root / name / "tls.crt").read_bytes()
        self._mount(self.peers / role.value / f"{name}.crt", content)

    @property
    def peers(self):
        return self.root / "peers"

    def _mount(self, path, content):
        path.parent.mkdir(parents=True, exist_ok=True)
        real = path.with_name(f"..{path.name}")
        real.write_bytes(content)
        real.chmod(0o440 | stat.S_IWUSR)
        if not path.is_symlink():
            path.symlink_to(real.name)


@pytest.fixture
def issuer(tmp_path):
    return Issuer(tmp_path / "mnt")


@pytest.fixture
def key(tmp_path):
    write_key_file(tmp_path / "tenant.key", generate_key("prod"))
    return tmp_path / "tenant.key"


def digests(folder, role, name):
    return [one.digest for one in read_pins(folder, role) if one.name == name]


def test_a_folder_that_was_made_of_secrets_is_a_credentials_folder(issuer, key, tmp_path):
    folder = tmp_path / "credentials"
    sync.copy_own(folder, issuer.issue("kvpack-0"), key)
    made = load_credentials(folder)
    assert made.name == "kvpack-0"
    assert (folder / "tenant.key").read_bytes() == key.read_bytes()
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_renewed_pair_is_taken_whole_and_again_changes_nothing(issuer, key, tmp_path):
    folder = tmp_path / "credentials"
    sync.copy_own(folder, issuer.issue("kvpack-0"), key)
    sync.copy_own(folder, issuer.issue("kvpack-0"), key)
    certificate = load_credentials(folder).certificate_pem
    assert certificates.leaf_digest(certificate) == issuer.leaves["kvpack-0"][1]
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    sync.copy_own(folder, issuer.root / "kvpack-0", key)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert not (folder / "next-key.pem").exists()


def test_another_tenant_key_or_a_pair_that_does_not_fit_changes_nothing(issuer, key, tmp_path):
    folder, other = tmp_path / "credentials", tmp_path / "other.key"
    own = issuer.issue("kvpack-0")
    sync.copy_own(folder, own, key)
    write_key_file(other, generate_key("prod"))
    with pytest.raises(KvpackError, match="another tenant key"):
        sync.copy_own(folder, own, other)
    (own / "tls.key").write_bytes(certificates.new_key())
    with pytest.raises(KvpackError, match="not for the key"):
        sync.copy_own(folder, own, key)
    load_credentials(folder)
    assert (folder / "tenant.key").read_bytes() == key.read_bytes()


def test_pins_follow_their_certificates_with_the_old_leaf_beside_the_new_one(issuer, key, tmp_path):
    folder = tmp_path / "credentials"
    sync.copy_own(folder, issuer.issue("kvpack-0"), key)
    for name in ("kvpack-0", "kvpack-1", "kvpack-2"):
        issuer.issue(name)
        issuer.give(name, Role.NODE)
    issuer.issue("client")
    issuer.give("client", Role.CLIENT)
    assert len(sync.follow_pins(folder, issuer.peers)) == 3
    assert sync.follow_pins(folder, issuer.peers) == []
    leaves = issuer.leaves["kvpack-1"]
    for _ in range(3):
        issuer.issue("kvpack-1")
        issuer.give("kvpack-1", Role.NODE)
        sync.follow_pins(folder, issuer.peers)
        assert set(digests(folder, Role.NODE, "kvpack-1")) == set(leaves[-2:])
    (issuer.peers / "nodes" / "kvpack-2.crt").unlink()
    assert sync.follow_pins(folder, issuer.peers) == ["nodes/kvpack-2: unpinned"]
    assert digests(folder, Role.CLIENT, "client") == issuer.leaves["client"]
    assert digests(folder, Role.NODE, "kvpack-0") == []


def test_one_bad_certificate_shuts_nobody_else_out_and_no_volume_unpins_nobody(
    issuer, key, tmp_path
):
    folder = tmp_path / "credentials"
    sync.copy_own(folder, issuer.issue("kvpack-0"), key)
    for name in ("kvpack-1", "kvpack-2"):
        issuer.issue(name)
        issuer.give(name, Role.NODE)
    sync.follow_pins(folder, issuer.peers)
    (issuer.peers / "nodes" / "kvpack-1.crt").write_text("no certificate")
    issuer.issue("kvpack-2")
    issuer.give("kvpack-2", Role.NODE)
    said = sync.follow_pins(folder, issuer.peers)
    assert "nodes/kvpack-1: left as it was" in said[0]
    assert digests(folder, Role.NODE, "kvpack-1") == issuer.leaves["kvpack-1"]
    assert set(digests(folder, Role.NODE, "kvpack-2")) == set(issuer.leaves["kvpack-2"])
    with pytest.raises(KvpackError, match="neither nodes/ nor clients/"):
        sync.follow_pins(folder, tmp_path / "not-mounted")
    assert digests(folder, Role.NODE, "kvpack-2")


def test_a_volume_that_was_opened_to_its_group_is_closed_again(tmp_path):
    inside = tmp_path / "data" / "keys"
    inside.mkdir(parents=True)
    (inside / "a.key").write_text("x")
    (inside / "link").symlink_to("a.key")
    for path in (tmp_path / "data", inside, inside / "a.key"):
        path.chmod(0o2770)
    sync.make_private(tmp_path / "data")
    for path in (tmp_path / "data", inside, inside / "a.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    sync.make_private(tmp_path / "nothing")


def test_the_command_does_both_parts_and_says_why_not(issuer, key, tmp_path, monkeypatch, capsys):
    folder, copy = tmp_path / "credentials", tmp_path / "http" / "api-keys"

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["credentials_sync", *map(str, words)])
        sync.main()

    own = issuer.issue("kvpack-0")
    issuer.issue("kvpack-1")
    issuer.give("kvpack-1", Role.NODE)
    command(
        "own", "--credentials", folder, "--own", own, "--tenant-key", key, "--private", tmp_path
    )
    command("pins", "--credentials", folder, "--peers", issuer.peers, "--once",
            "--copy", f"{own / 'tls.crt'}:{copy}")  # fmt: skip
    assert [one.name for one in read_pins(folder, Role.NODE)] == ["kvpack-1"]
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert "api-keys: copied" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: .*tls\.crt: cannot be read"):
        command("own", "--credentials", folder, "--own", tmp_path / "none")
