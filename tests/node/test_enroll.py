"""Keys that stay, requests that travel, certificates that come back: by the commands themselves."""

from __future__ import annotations

import stat

import pytest
from click.testing import CliRunner

from kvpack.keys import generate_key, load_key_file, write_key_file
from node import certificates, enroll
from node.cli import main
from node.errors import CredentialsError
from node.trust import load_credentials


def kvnode(*arguments) -> list[str]:
    """Words that a command prints; it must succeed."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout.split()


def refused(*arguments) -> str:
    """The one line that a command says when it must fail."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code != 0 and result.stdout == ""
    assert result.stderr.startswith("kvnode: error: ") and result.stderr.count("\n") == 1
    return result.stderr


def by_steps(tmp_path, name: str):
    """A folder enrolled as on another machine than the authority's."""
    authority, folder = tmp_path / "authority", tmp_path / name
    if not authority.exists():
        kvnode("enroll", "authority", "--authority", authority)
    request, asked = kvnode("enroll", "request", "--credentials", folder, "--name", name)
    leaf, signed = kvnode("enroll", "sign", "--authority", authority, request)
    # Two people can compare what was asked for with what was signed.
    assert asked == signed and len(asked) == 64
    kvnode("enroll", "accept", "--credentials", folder, leaf, authority / "ca-cert.pem")
    return folder


def test_only_requests_and_certificates_travel(tmp_path):
    folder = by_steps(tmp_path, "one")
    credentials = load_credentials(folder)
    assert credentials.name == "one"
    assert credentials.authority_pem == (tmp_path / "authority" / "ca-cert.pem").read_bytes()
    for path in (tmp_path / "authority").iterdir():
        assert credentials.key_pem not in path.read_bytes()
    assert b"PRIVATE" not in (folder / "one-cert.pem").read_bytes()
    for path in (*folder.iterdir(), *(tmp_path / "authority").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_renew_keeps_the_old_pair_until_the_new_one_is_accepted(tmp_path):
    folder = by_steps(tmp_path, "one")
    other = by_steps(tmp_path, "two")
    before = load_credentials(folder)
    kvnode("pin", "--credentials", other, "--node", folder / "node-cert.pem")
    request, _ = kvnode("enroll", "renew", "--credentials", folder)
    leaf = tmp_path / "next.pem"
    kvnode("enroll", "sign", "--authority", tmp_path / "authority", request, "--out", leaf)
    assert load_credentials(folder) == before
    assert "--renewed" in refused("pin", "--credentials", other, "--node", leaf)
    kvnode("pin", "--credentials", other, "--renewed", "--node", leaf)
    kvnode(
        "enroll", "accept", "--credentials", folder, leaf, tmp_path / "authority" / "ca-cert.pem"
    )
    after = load_credentials(folder)
    assert after.certificate_pem == leaf.read_bytes() and after.key_pem != before.key_pem
    assert sorted(path.name for path in folder.glob("*.pem")) == [
        "ca-cert.pem",
        "node-cert.pem",
        "node-key.pem",
        "one-cert.pem",
    ]
    digest = certificates.leaf_digest(before.certificate_pem).hex()
    listed = kvnode("pins", "--credentials", other)
    assert listed.count("one") == 2 and digest in listed
    kvnode("unpin", "--credentials", other, "--node", "one", "--leaf", digest[:16])
    (peer,) = load_credentials(other).peers
    assert peer.certificate_pem == after.certificate_pem
    assert "no pinned" in refused("unpin", "--credentials", other, "--node", "one", "--leaf", "00")


def test_a_certificate_for_another_key_name_or_time_or_of_another_authority_is_not_accepted(
    tmp_path,
):
    folder = by_steps(tmp_path, "one")
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    authority = tmp_path / "authority"
    root = (authority / "ca-cert.pem").read_bytes()
    key = certificates.load_key(load_credentials(folder).key_pem, "key")
    renamed = enroll.sign_request(authority, certificates.request_for(key, "other"))
    strange = certificates.load_key(certificates.new_key(), "key")
    foreign = enroll.sign_request(authority, certificates.request_for(strange, "one"))
    enroll.make_authority(tmp_path / "elsewhere")
    own = certificates.request_for(key, "one")
    elsewhere = enroll.sign_request(tmp_path / "elsewhere", own)
    other_root = (tmp_path / "elsewhere" / "ca-cert.pem").read_bytes()
    late = enroll.sign_request(
        authority, own, lambda: certificates.utc_now().replace(year=certificates.utc_now().year - 2)
    )
    for leaf, issuer, why in (
        (renamed, root, "expected 'one'"),
        (foreign, root, "not for the key"),
        (elsewhere, root, "not made by that authority"),
        (elsewhere, other_root, "another authority"),
        (late, root, "expired on"),
        (b"garbage", root, "not a certificate"),
        (root, root, "is not for the key|expected 1 to 63"),
    ):
        with pytest.raises(CredentialsError, match=why):
            enroll.accept(folder, leaf, issuer)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept


def test_a_request_may_be_made_again_until_its_certificate_came(tmp_path):
    first = certificates.load_request(enroll.make_request(tmp_path / "one", "one"))
    again = certificates.load_request(enroll.make_request(tmp_path / "one", "one"))
    assert first.public_key() == again.public_key()
    assert "no key is there" in refused_accept(tmp_path)


def refused_accept(tmp_path) -> str:
    by_steps(tmp_path, "two")
    (tmp_path / "empty").mkdir(mode=0o700)
    paths = tmp_path / "two" / "node-cert.pem", tmp_path / "authority" / "ca-cert.pem"
    return refused("enroll", "accept", "--credentials", tmp_path / "empty", *paths)


def test_a_tenant_key_is_handed_over_by_a_step_of_its_own(tmp_path):
    folder = by_steps(tmp_path, "one")
    write_key_file(tmp_path / "acme.key", generate_key("acme"))
    kvnode("enroll", "tenant-key", "--credentials", folder, tmp_path / "acme.key")
    copied = (folder / "tenant.key").read_bytes()
    assert copied == (tmp_path / "acme.key").read_bytes()
    assert load_key_file(folder / "tenant.key").tenant == "acme"
    write_key_file(tmp_path / "other.key", generate_key("other"))
    assert "exists" in refused(
        "enroll", "tenant-key", "--credentials", folder, tmp_path / "other.key"
    )


def test_one_step_and_wrong_usage(tmp_path):
    kvnode("enroll", "--authority", tmp_path / "a", "--credentials", tmp_path / "c", "--name", "n")
    assert load_credentials(tmp_path / "c").name == "n"
    assert "expected --authority" in refused("enroll", "--name", "n")
    assert "go after" in refused("enroll", "--name", "n", "renew", "--credentials", tmp_path / "c")
    assert "expected one of" in refused("unpin", "--credentials", tmp_path / "c")
    wrong = "enroll", "sign", "--authority", tmp_path / "a", tmp_path / "c" / "node-cert.pem"
    assert "signing request: not one in PEM" in refused(*wrong)
    (tmp_path / "request.pem").write_bytes(enroll.make_request(tmp_path / "d", "d"))
    none = "enroll", "sign", "--authority", tmp_path / "none", tmp_path / "request.pem"
    assert "cannot be opened" in refused(*none)
