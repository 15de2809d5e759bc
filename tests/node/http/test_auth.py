"""Keys and tenants: every route, every kind of caller; nothing new is open by oversight."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json

import pytest
from click.testing import CliRunner
from harness import ask, code, served

from node.config import Address
from node.errors import CredentialsError, UsageError
from node.http.access import Access
from node.http.auth import ApiKeys, LiveKeys, add_key, key_of
from node.http.options import HttpOptions
from node.http.routes import ENDPOINTS

NIGHT = {"messages": [{"role": "user", "content": "It was a dark night and"}], "max_tokens": 2}


@dataclasses.dataclass
class Keyed:
    node: object
    file: object
    admin: str
    alice: str
    bob: str


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auth")
    file = folder / "keys"
    admin = add_key(file, "ops", is_admin=True)
    alice, bob = add_key(file, "alice"), add_key(file, "bob")
    with served(folder / "data", "--api-key-file", str(file)) as node:
        yield Keyed(node, file, admin, alice, bob)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def path_of(endpoint) -> str:
    return endpoint.path.replace("{", "").replace("}", "").replace(":path", "")


def called(keyed, endpoint, key: str | None):
    headers = {} if key is None else bearer(key)
    body = b"{}" if endpoint.method == "POST" else None
    return ask(keyed.node.base_url + path_of(endpoint), endpoint.method, body, **headers)


def test_every_route_is_closed_to_whoever_has_no_key_or_a_wrong_one(keyed):
    for endpoint in ENDPOINTS:
        if endpoint.access is Access.PUBLIC:
            assert called(keyed, endpoint, None)[0] == 200
            continue
        for key in (None, "", "kvp-" + "x" * 43, keyed.alice + "x", keyed.alice[:-1]):
            answer = called(keyed, endpoint, key)
            assert (answer[0], code(answer)) == (401, "invalid_api_key"), endpoint
            assert "Bearer" in answer[1]["WWW-Authenticate"]


def test_a_tenants_key_opens_no_route_of_the_nodes_own(keyed):
    admin = [endpoint for endpoint in ENDPOINTS if endpoint.access is Access.ADMIN]
    assert admin
    for endpoint in admin:
        answer = called(keyed, endpoint, keyed.alice)
        assert (answer[0], code(answer)) == (403, "admin_only"), endpoint
    for endpoint in ENDPOINTS:
        if endpoint.access is Access.TENANT:
            assert called(keyed, endpoint, keyed.alice)[0] not in (401, 403), endpoint


def test_browsers_may_send_the_key_as_a_password(keyed):
    word = base64.b64encode(f"anybody:{keyed.admin}".encode()).decode()
    url = f"{keyed.node.v1}/models"
    assert ask(url, Authorization=f"Basic {word}")[0] == 200
    for other in ("Basic !!!", "Basic", f"Digest {keyed.admin}", f"Bearer{keyed.admin}"):
        assert ask(url, Authorization=other)[0] == 401
    assert key_of(f"bearer  {keyed.admin} ") == keyed.admin


def test_one_tenant_begins_from_nothing_that_another_computed(keyed):
    def cached(key):
        answer = ask(
            f"{keyed.node.v1}/chat/completions", "POST", json.dumps(NIGHT).encode(), **bearer(key)
        )
        assert answer[0] == 200, answer
        return json.loads(answer[2])["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(keyed.alice) == 0
    assert cached(keyed.alice) > 0
    assert cached(keyed.bob) == 0
    keys = {path.name for path in (keyed.node.data_dir / "keys").iterdir()}
    assert {"alice.key", "bob.key"} <= keys
    assert all((keyed.node.data_dir / "keys" / key).stat().st_mode & 0o77 == 0 for key in keys)


def test_a_key_that_is_taken_out_of_the_file_is_refused_from_then_on(keyed):
    carol = add_key(keyed.file, "carol")
    assert ask(f"{keyed.node.v1}/models", **bearer(carol))[0] == 200
    kept = [line for line in keyed.file.read_text().splitlines() if not line.startswith("carol")]
    keyed.file.write_text("\n".join(kept) + "\n")
    assert ask(f"{keyed.node.v1}/models", **bearer(carol))[0] == 401
    assert ask(f"{keyed.node.v1}/models", **bearer(keyed.alice))[0] == 200


def test_refusals_are_written_down_without_keys_or_text(keyed):
    wrong = "kvp-very-wrong"
    ask(f"{keyed.node.v1}/models?secret=1", **bearer(wrong))
    body = json.dumps({**NIGHT, "n": 2}).encode()
    ask(f"{keyed.node.v1}/chat/completions", "POST", body, **bearer(keyed.alice))
    assert keyed.node.stop() == 0
    file = keyed.node.data_dir / "refusals.jsonl"
    assert file.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert any(one["code"] == "invalid_api_key" and one["tenant"] == "" for one in lines)
    last = lines[-1]
    assert (last["tenant"], last["route"]) == ("alice", "/v1/chat/completions")
    assert (last["status"], last["code"]) == (400, "unsupported_parameter")
    told = file.read_text() + keyed.node.log.read_text()
    assert not any(word in told for word in (wrong, "secret", "dark night", keyed.alice))


def test_the_command_prints_a_key_once_and_keeps_its_digest(tmp_path):
    from node.cli import main

    file = tmp_path / "keys"

    def run(*arguments):
        return CliRunner().invoke(main, ["apikey", "add", "--file", str(file), *arguments])

    key = run("--tenant", "alice").stdout.strip()
    other = run("--tenant", "ops", "--admin").stdout.strip()
    text = file.read_text()
    assert text == (
        f"alice:{hashlib.sha256(key.encode()).hexdigest()}\n"
        f"ops:{hashlib.sha256(other.encode()).hexdigest()}:admin\n"
    )
    assert file.stat().st_mode & 0o777 == 0o600
    keys = LiveKeys(file)
    assert keys.caller(key).tenant == "alice" and not keys.caller(key).is_admin
    assert keys.caller(other).is_admin and keys.caller("") is None
    refused = run("--tenant", "../alice")
    assert refused.exit_code == 2 and file.read_text() == text


@pytest.mark.parametrize(
    "text",
    ["", "# nobody\n", "alice\n", "alice:12\n", f"../x:{'0' * 64}\n", f"a:{'0' * 64}:root\n"],
)
def test_a_key_file_with_a_strange_line_or_none_is_refused(text):
    with pytest.raises(CredentialsError):
        ApiKeys.parse(text, "keys")


def test_a_key_file_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / "keys"
    add_key(file, "alice")
    file.chmod(0o640)
    with pytest.raises(CredentialsError, match="too open"):
        LiveKeys(file)


def test_a_port_that_others_reach_needs_tls_and_keys(tmp_path):
    file = tmp_path / "x"
    for host in ("0.0.0.0", "192.168.1.2", "example.com", "::"):  # noqa: S104
        address = Address(host, 8080)
        for given in ({}, {"api_key_file": file}, {"tls_certificate": file, "tls_key": file}):
            with pytest.raises(UsageError):
                HttpOptions(address, **given)
        HttpOptions(address, file, file, file)
    for host in ("127.0.0.1", "localhost", "::1", "127.8.9.1"):
        assert HttpOptions(Address(host, 0)).is_loopback
    with pytest.raises(UsageError):
        HttpOptions(Address("127.0.0.1", 0), tls_key=file)
