"""The kvpack command on stores and packs in buckets."""

from __future__ import annotations

import importlib.metadata
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from cli_kit import Run, furnish, runner

from tests.s3_server import OWNER, new_url, shared

_KEY = ("--key", "my.key")


@pytest.fixture(scope="module")
def s3_server():
    return shared()


@pytest.fixture
def run(s3_server, tmp_path, monkeypatch, capsys) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in OWNER.environment(s3_server.endpoint).items():
        monkeypatch.setenv(name, value)
    # As the installed package offers it; a checkout that is not installed offers nothing.
    offered = importlib.metadata.EntryPoint("s3", "node.s3.reach:S3", "kvpack.stores")
    monkeypatch.setattr(
        importlib.metadata, "entry_points",
        lambda group: [offered] if group == "kvpack.stores" else [],
    )  # fmt: skip
    furnish(tmp_path)
    return runner(capsys)


def test_every_store_command_takes_a_bucket(run: Run) -> None:
    url = new_url()
    checked = run("store", "check", "--json", url)
    assert checked.code == 0
    assert json.loads(checked.out).items() >= {"ok": True, "racers": 8, "rounds": 3}.items()
    missing = run("ls", url)
    assert missing.code == 10 and url in missing.err and missing.out == ""
    cut = json.loads(run("import", "--json", *_KEY, "--create", "session.kvpack", url).out)["cut"]
    listed = json.loads(run("ls", "--json", *_KEY, url).out)
    assert (listed["cut"], listed["verified"], listed["name"]) == (cut, True, url)
    assert f"{url}: OK" in run("check", *_KEY, "--deep", url).out
    assert run("export", *_KEY, url, cut[:8], "out.kvpack").code == 0
    assert Path("out.kvpack").read_bytes() == Path("session.kvpack").read_bytes()
    plan = json.loads(run("gc", "--json", "--yes", "--budget", "0", url).out)
    assert plan["applied"]["deleted"] > 0
    assert run("ls", url).out.startswith(f"{url}: 0 cuts")


def test_a_pack_in_a_bucket_is_read_by_a_link_and_never_replaced(run: Run) -> None:
    url = new_url()
    assert run("import", *_KEY, "--create", "session.kvpack", "packs").code == 0
    cut = json.loads(run("ls", "--json", *_KEY, "packs").out)["cut"]
    assert run("export", *_KEY, "packs", cut, f"{url}/a.kvpack").code == 0
    again = run("export", *_KEY, "packs", cut, f"{url}/a.kvpack")
    assert again.code == 1 and "exists already" in again.err and again.out == ""
    linked = json.loads(run("store", "link", "--json", "--expires", "60", f"{url}/a.kvpack").out)
    with urllib.request.urlopen(linked["url"]) as answer:  # noqa: S310 - a URL of ours
        Path("fetched.kvpack").write_bytes(answer.read())
    assert Path("fetched.kvpack").read_bytes() == Path("session.kvpack").read_bytes()
    assert OWNER.secret not in linked["url"]
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(linked["url"].replace("a.kvpack", "b.kvpack"))  # noqa: S310
    assert run("store", "link", f"{url}/none.kvpack").code == 1
    assert run("store", "link", "session.kvpack").code == 1


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("s3://KEY:SECRET@bucket/a", "without account"),
        ("s3://bucket/a?key=SECRET", "without account"),
        ("s3://Bucket/a", "bucket"),
        ("gs://bucket/a", "expected a folder's path or s3://"),
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(run: Run, url: str, word: str) -> None:
    for arguments in (("ls",), ("gc", "--json"), ("store", "check"), ("check", *_KEY)):
        result = run(*arguments, url)
        assert result.code == 1 and word in result.err
        assert "SECRET" not in result.out + result.err


def test_a_wrong_secret_and_an_absent_service_are_one_line_each(run: Run, monkeypatch) -> None:
    url = new_url()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "quite-another-secret")
    result = run("store", "check", url)
    assert result.code == 1 and "403 (SignatureDoesNotMatch)" in result.err and url in result.err
    assert "quite-another-secret" not in result.err and "hint: credentials" in result.err
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    result = run("store", "check", url)
    assert result.code == 1 and "no credentials" in result.err


def test_a_folder_can_be_checked_too(run: Run) -> None:
    run("import", *_KEY, "--create", "session.kvpack", "packs")
    before = sorted(str(path) for path in Path("packs").rglob("*"))
    assert "one won" in run("store", "check", "packs").out
    assert sorted(str(path) for path in Path("packs").rglob("*")) == before
