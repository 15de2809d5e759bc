"""The kvpack command as a user runs it: a real process, real files, real exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pack_kit import HEADER, NUMERICS, import_path, schedule, snapshot

from kvpack.bundle import BundleReader, BundleWriter, Header, encode_header, publish_new
from kvpack.bundle import write_snapshot as write
from kvpack.chunk import SealContext, seal_tile, seal_token_ids
from kvpack.codes import ComponentKind
from kvpack.keys import EpochKey, Keyring, load_key_file
from kvpack.layout import Producer
from kvpack.manifest import Component, Manifest, ParentReference, seal_manifest


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def run(
    folder: Path, *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None
) -> Result:
    done = subprocess.run(
        [sys.executable, "-m", "kvpack", *arguments],
        cwd=folder, input=stdin, capture_output=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": import_path(_ROOT), **(env or {})},
    )  # fmt: skip
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


_ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key, a good pack, one changed in a chunk, one cut, a delta, a foreign key."""
    folder = tmp_path_factory.mktemp("packs")
    assert run(folder, "keygen", "--tenant", "acme", "my.key").code == 0
    assert run(folder, "keygen", "--tenant", "acme", "other.key").code == 0
    assert run(folder, "keygen", "--tenant", "acme", "--epoch", "2", "next.key").code == 0
    key = load_key_file(folder / "my.key")
    with publish_new(folder / "good.kvpack") as file:
        write(file, key, HEADER, snapshot(300), NUMERICS, schedule(300))
    good = (folder / "good.kvpack").read_bytes()
    (folder / "changed.kvpack").write_bytes(good[:600] + bytes([good[600] ^ 1]) + good[601:])
    (folder / "cut.kvpack").write_bytes(good[:-1])
    (folder / "text.kvpack").write_bytes(b"just some text\n" * 100)
    (folder / "delta.kvpack").write_bytes(_delta(key))
    return folder


def _delta(key: EpochKey) -> bytes:
    context = SealContext(key, HEADER.identity_digest, HEADER.layout_digest)
    value, sink = snapshot(300), io.BytesIO()
    writer = BundleWriter(sink, key, encode_header(HEADER))
    for tile in value.tiles:
        if tile.spec.first_position >= 256:
            writer.add(seal_tile(context, tile))
    for chunk in seal_token_ids(context, value.token_ids[256:], 256):
        writer.add(chunk)
    manifest = Manifest(
        Producer.ENGINE, 300, NUMERICS, schedule(300), writer.references,
        (Component(ComponentKind.TARGET, HEADER.identity_digest),),
        ParentReference(bytes(32), 1, 256, 1),
    )  # fmt: skip
    writer.finish(seal_manifest(key, encode_header(HEADER), manifest))
    return sink.getvalue()


def test_keygen_makes_a_private_file_and_never_replaces_it(tmp_path: Path) -> None:
    made = run(tmp_path, "keygen", "--tenant", "acmé", "a.key")
    assert (made.code, made.out) == (0, "a.key: new key of tenant 'acmé', epoch 1\n")
    assert "kvpack: hint: keep a copy" in made.err
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600
    before = (tmp_path / "a.key").read_bytes()
    assert before.split()[6].decode() not in made.out + made.err

    again = run(tmp_path, "keygen", "a.key")
    assert (again.code, again.out) == (1, "")
    assert "kvpack: error: a.key: cannot publish: the name exists" in again.err
    assert (tmp_path / "a.key").read_bytes() == before
    assert json.loads(run(tmp_path, "keygen", "--json", "b.key").out) == {
        "key": "b.key", "tenant": "default", "epoch": 1,
    }  # fmt: skip
    assert run(tmp_path, "keygen", "--epoch", "0", "c.key").code == 10
    assert run(tmp_path, "keygen", "--epoch", "x", "c.key").code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--key", "my.key", "changed.kvpack"], 11, "changed.kvpack: chunks[0]: not authentic"),
        (["--key", "my.key", "cut.kvpack"], 10, "cut.kvpack: footer.magic"),
        (["--key", "my.key", "text.kvpack"], 10, "text.kvpack: header.magic"),
        (["--key", "my.key", "my.key"], 10, "my.key: header.magic"),
        (["--key", "my.key", "delta.kvpack"], 14, "delta.kvpack: parent 0000"),
        (["--key", "other.key", "good.kvpack"], 11, "good.kvpack: footer: not authentic"),
        (["--key", "next.key", "good.kvpack"], 11, "no key for tenant 'acme', epoch 1"),
        (["--key", "my.key", "absent.kvpack"], 1, "absent.kvpack: No such file"),
        (["--key", "my.key", "."], 10, ".: file: expected a regular file"),
        (["--key", "absent.key", "good.kvpack"], 1, "absent.key: No such file"),
        (["--key", "good.kvpack", "good.kvpack"], 1, "good.kvpack: "),
        (["--keyring", "absent", "good.kvpack"], 1, "absent: No such file"),
        (["good.kvpack"], 2, "verify needs a key"),
        (["--key", "my.key"], 2, "Missing argument 'PACK...'"),
        (["--key", "my.key", "--quick", "--deep", "good.kvpack"], 2, "contradict"),
        (["--nonsense"], 2, "No such option"),
    ],
)
def test_a_failure_has_its_code_one_error_line_and_an_empty_stdout(
    folder: Path, arguments: list[str], code: int, says: str
) -> None:
    result = run(folder, "verify", *arguments)
    assert (result.code, result.out) == (code, "")
    first, *others = result.err.splitlines()
    assert first.startswith("kvpack: error: ")
    assert says in first
    assert all(line.startswith("kvpack: hint: ") for line in others)
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "good.kvpack: OK"),
        (["--deep"], "good.kvpack: OK (manifest, shape, every chunk and every content id)"),
        (["--quick"], "good.kvpack: OK (manifest, shape and chunk headers; no payload was read)"),
        (["--keyring", "."], "good.kvpack: OK"),
    ],
)
def test_a_good_pack_is_ok(folder: Path, options: list[str], line: str) -> None:
    key = [] if "--keyring" in options else ["--key", "my.key"]
    if not key:
        (folder / "other.key").unlink()
    assert run(folder, "verify", *key, *options, "good.kvpack") == Result(0, line + "\n", "")
    if not key:
        run(folder, "keygen", "--tenant", "acme", "other.key")


def test_a_pack_through_a_pipe_has_the_same_verdict(folder: Path) -> None:
    for name, code in [("good", 0), ("changed", 11), ("cut", 10), ("text", 10), ("delta", 14)]:
        data = (folder / f"{name}.kvpack").read_bytes()
        piped = run(folder, "verify", "--key", "my.key", "-", stdin=data)
        assert (piped.code, piped.out) == (code, "" if code else "-: OK\n"), name
    assert run(folder, "verify", "--key", "my.key", "-").code == 10


def test_several_packs_each_get_their_line_and_the_first_failure_decides(folder: Path) -> None:
    names = ["good.kvpack", "cut.kvpack", "changed.kvpack", "absent", "good.kvpack"]
    result = run(folder, "verify", "--key", "my.key", *names)
    assert result.code == 10
    assert result.out.splitlines() == [
        "good.kvpack: OK",
        "cut.kvpack: FAILED (malformed)",
        "changed.kvpack: FAILED (not_authentic)",
        "absent: FAILED (io)",
        "good.kvpack: OK",
    ]

    as_json = run(folder, "verify", "--json", "--key", "my.key", *names)
    objects = [json.loads(line) for line in as_json.out.splitlines()]
    assert [one["ok"] for one in objects] == [True, False, False, False, True]
    assert [one.get("exit_code") for one in objects] == [None, 10, 11, 1, None]
    assert objects[2]["reason"] == "not_authentic"
    assert objects[0]["verified"] is True
    assert objects[0]["position"] == 300
    assert as_json.code == 10


def test_inspect_needs_no_key_says_so_and_shows_no_text(folder: Path) -> None:
    shown = run(folder, "inspect", "good.kvpack")
    assert shown.code == 0
    assert shown.out.startswith("good.kvpack: not verified")
    assert "tokens     300 of at most 4,096" in shown.out
    for shape in ("swa         2       5", "full        1       -", "none (NoPE)", "token_ids"):
        assert shape in shown.out
    one = json.loads(run(folder, "inspect", "--json", "good.kvpack").out)
    assert one["verified"] is False
    assert one["classes"]["full"] == {"chunks": 2, "plain_bytes": 3000, "stored_bytes": 3356}
    assert one["file_bytes"] == (folder / "good.kvpack").stat().st_size
    assert [layer["window_tokens"] for layer in one["layers"]] == [5, None, 5]

    # It looks at no chunk, so a changed one is not its business; a cut file is.
    assert run(folder, "inspect", "changed.kvpack").code == 0
    cut = run(folder, "inspect", "cut.kvpack")
    assert (cut.code, cut.out) == (10, "")
    assert cut.err.startswith("kvpack: error: cut.kvpack: footer.magic")
    failed = json.loads(run(folder, "inspect", "--json", "cut.kvpack").out)
    assert (failed["ok"], failed["exit_code"], failed["reason"]) == (False, 10, "malformed")
    delta = run(folder, "inspect", "delta.kvpack")
    assert "parent     0000000000000000…, 256 tokens" in delta.out


def test_another_identity_is_12(folder: Path, tmp_path: Path) -> None:
    key = load_key_file(folder / "my.key")
    reader = BundleReader.open(folder / "good.kvpack", Keyring([key]))
    context = SealContext(key, bytes(32), HEADER.layout_digest)
    with publish_new(tmp_path / "foreign.kvpack") as file:
        writer = BundleWriter(file, key, reader.index.header_bytes)
        for tile in snapshot(300).tiles:
            writer.add(seal_tile(context, tile))
        for chunk in seal_token_ids(context, snapshot(300).token_ids):
            writer.add(chunk)
        manifest = Manifest(
            Producer.ENGINE, 300, NUMERICS, schedule(300), writer.references,
            reader.manifest.components,
        )  # fmt: skip
        writer.finish(seal_manifest(key, reader.index.header_bytes, manifest))
    result = run(folder, "verify", "--key", "my.key", str(tmp_path / "foreign.kvpack"))
    assert (result.code, result.out) == (12, "")
    assert "do not delete it" in result.err
    assert Header.of(HEADER.identity, 1) == HEADER


def test_names_are_shown_as_typed_or_escaped(folder: Path, tmp_path: Path) -> None:
    good = (folder / "good.kvpack").read_bytes()
    for name, shown in [
        ("кэш 😀", "кэш 😀"),
        ("a\nb", "a\\nb"),
        ("\x1b[31mred", "\\x1b[31mred"),
        (os.fsdecode(b"\xff\xfe"), "\\xff\\xfe"),
        ("-dash", "-dash"),
    ]:
        (tmp_path / name).write_bytes(good)
        result = run(tmp_path, "verify", "--key", str(folder / "my.key"), "--", name)
        assert result == Result(0, f"{shown}: OK\n", "")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for name in ("кэш 😀", os.fsdecode(b"\xff\xfe")):
        arguments = ["verify", "--key", str(folder / "my.key"), "--", name]
        result = run(tmp_path, *arguments, env=ascii_only)
        assert (result.code, result.out.endswith(": OK\n"), result.err) == (0, True, "")


def test_help_and_version_and_no_command(folder: Path) -> None:
    assert run(folder, "--version").out.startswith("kvpack ")
    for command in ([], ["verify"], ["inspect"], ["keygen"]):
        helped = run(folder, *command, "--help")
        assert (helped.code, helped.err) == (0, "")
        assert helped.out.startswith(f"Usage: kvpack {' '.join(command)}".rstrip())
    nothing = run(folder)
    assert (nothing.code, nothing.out) == (2, "")
    assert "Commands:" in nothing.err
    unknown = run(folder, "frobnicate")
    assert (unknown.code, unknown.out) == (2, "")
    assert unknown.err.startswith("kvpack: error: No such command 'frobnicate'")


def test_a_reader_that_leaves_and_an_interrupt_give_no_traceback(folder: Path) -> None:
    command = [sys.executable, "-m", "kvpack"]
    environment = {**os.environ, "PYTHONPATH": import_path(_ROOT)}
    closed = subprocess.Popen(
        [*command, "inspect", "good.kvpack"], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    closed.stdout.close()
    assert b"Traceback" not in closed.stderr.read()
    assert closed.wait(timeout=30) == 1

    waiting = subprocess.Popen(
        [*command, "verify", "--key", "my.key", "-"], cwd=folder, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # A shell that starts jobs in the background has them ignore the interrupt, and that is
        # inherited: without this the test would depend on how the tests were started.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    # Half a pack: once it has been taken, the command is up and waits for the rest.
    waiting.stdin.write((folder / "good.kvpack").read_bytes()[:200])
    waiting.stdin.flush()
    _until_asleep_in_read(waiting.pid)
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=30)
    assert (waiting.returncode, out) == (130, b"")
    assert err.decode().strip() == "kvpack: error: interrupted"


def _until_asleep_in_read(pid: int) -> None:
    """Wait until the process has drained its pipe, for at most ten seconds."""
    import time

    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/syscall")
        if state.exists() and state.read_text().startswith("0 0x0 "):
            return
        time.sleep(0.05)
