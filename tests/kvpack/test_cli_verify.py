"""verify and sign: signers, samples, expectations, keyrings, progress."""

from __future__ import annotations

import io
import json
import math
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cli_kit import Run, changed, furnish, runner, write_pack
from pack_kit import IDENTITY, KEY, header_for, snapshot

from kvpack.bundle import BundleReader
from kvpack.cli.progress import Progress
from kvpack.errors import KeyFileError, LimitError
from kvpack.expectation import ExpectationError, load_identity, load_layout
from kvpack.header import Header
from kvpack.keys import EpochKey, Keyring, write_key_file
from kvpack.signer import load_public_signer, load_signer
from kvpack.verify import Sample


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    return runner(capsys)


def _sign(run: Run, name: str = "signed.kvpack") -> None:
    if not Path("s").exists():
        assert run("keygen", "--signer", "s").code == 0
    assert run("sign", "--key", "my.key", "--signer", "s", "session.kvpack", name).code == 0


def test_a_signature_changes_only_the_tail(run: Run) -> None:
    _sign(run)
    plain, signed = Path("session.kvpack").read_bytes(), Path("signed.kvpack").read_bytes()
    with BundleReader.open("session.kvpack", Keyring([KEY])) as reader:
        index = reader.index
    end = index.footer.manifest_offset + index.footer.manifest_bytes
    assert signed[:end] == plain[:end]
    assert len(signed) == len(plain) + 96
    assert stat.S_IMODE(Path("signed.kvpack").stat().st_mode) == 0o600

    # A signed pack is signed anew: the second signer's block replaces the first one's.
    assert run("keygen", "--signer", "t").code == 0
    assert run("sign", "--key", "my.key", "--signer", "t", "signed.kvpack", "again").code == 0
    assert run("verify", "--signer", "t.pub", "again").code == 0
    assert run("verify", "--signer", "s.pub", "again").code == 11
    assert len(Path("again").read_bytes()) == len(signed)


def test_nothing_is_signed_that_does_not_open(run: Run) -> None:
    run("keygen", "--signer", "s")
    changed("bad.kvpack", "session.kvpack")
    for name in ("bad.kvpack", "my.key"):
        result = run("sign", "--key", "my.key", "--signer", "s", name, "out")
        assert (result.code, result.out) == (11 if name == "bad.kvpack" else 10, "")
        assert not Path("out").exists()
    assert run("sign", "--key", "my.key", "--signer", "my.key", "session.kvpack", "out").code == 1
    assert run("sign", "--signer", "s", "session.kvpack", "out").code == 2
    assert run("sign", "--key", "my.key", "--signer", "s", "session.kvpack", "bad.kvpack").code == 1
    assert list(Path().glob(".*")) == []


@pytest.mark.parametrize("both", [False, True])
def test_a_signer_is_asked_for_with_and_without_the_key(run: Run, both: bool) -> None:
    _sign(run)
    key = ["--key", "my.key"] if both else []
    assert run("verify", *key, "--signer", "s.pub", "signed.kvpack").code == 0
    one = json.loads(run("verify", "--json", *key, "--signer", "s.pub", "signed.kvpack").out)
    assert one["signer"] == load_public_signer("s.pub").hex()
    assert (one["ok"], one["depth"]) == (True, "full" if both else "signature")

    unsigned = run("verify", *key, "--signer", "s.pub", "session.kvpack")
    assert (unsigned.code, unsigned.out) == (11, "")
    assert "not signed" in unsigned.err
    changed("bad.kvpack", "signed.kvpack")
    assert run("verify", *key, "--signer", "s.pub", "bad.kvpack").code == 11


def test_options_that_contradict_each_other_are_usage(run: Run) -> None:
    run("keygen", "--signer", "s")
    for options in (
        ["--signer", "s.pub", "--deep", "session.kvpack"],
        ["--signer", "s.pub", "--sample", "5%", "session.kvpack"],
        ["--signer", "s.pub", "-"],
        ["--key", "my.key", "--sample", "5%", "-"],
        ["--key", "my.key", "--sample", "5%", "--quick", "session.kvpack"],
        *(["--key", "my.key", "--sample", bad, "session.kvpack"]
          for bad in ("0", "0%", "101%", "x", "-1", "1e1", "nan", "5%%", "")),
    ):  # fmt: skip
        result = run("verify", *options)
        assert (result.code, result.out) == (2, ""), options
    assert run("keygen", "--signer", "--tenant", "x", "t").code == 2
    assert not Path("t").exists()


def test_signer_files_are_private_checked_and_never_replaced(run: Run) -> None:
    said = run("keygen", "--signer", "--json", "s")
    made = json.loads(said.out)
    assert bytes.fromhex(made["public_key"]) == load_public_signer("s.pub")
    seed = load_signer("s").private_bytes_raw().hex()
    assert seed not in said.out + said.err
    assert stat.S_IMODE(Path("s").stat().st_mode) == 0o600
    assert run("keygen", "--signer", "s").code == 1
    Path("u.pub").write_text("taken")
    assert run("keygen", "--signer", "u").code == 1
    assert not Path("u").exists()

    text = Path("s").read_text()
    for name, content in [
        ("digit", text.replace(seed[:2], "00" if seed[:2] != "00" else "01", 1)),
        ("hex", text.replace(seed, "zz" * 32)),
        ("short", text.replace(seed, seed[:-2])),
        ("title", text.replace("signer-v1", "signer-v2")),
        ("empty", ""),
        ("more", text + "\n"),
    ]:
        Path(name).write_text(content)
        Path(name).chmod(0o600)
        with pytest.raises(KeyFileError) as caught:
            load_signer(name)
        assert seed[2:] not in str(caught.value)
    Path("s").chmod(0o640)
    Path("link").symlink_to("s.pub")
    for name in ("s", "link"):
        with pytest.raises(KeyFileError):
            load_signer(name)
    assert load_public_signer("link") == load_public_signer("s.pub")
    for name in ("s", "absent", ".", "my.key"):
        with pytest.raises(KeyFileError):
            load_public_signer(name)


def test_a_sample_is_the_same_every_time_and_finds_what_lies_in_it(run: Run) -> None:
    blob = Path("session.kvpack").read_bytes()
    for percent, count in [(0.000001, 1), (5, 1), (26, 2), (100, 4)]:
        chosen = Sample(percent).choose(blob, 4)
        assert len(chosen) == count == math.ceil(4 * percent / 100)
        assert chosen == Sample(percent).choose(blob, 4)
    assert Sample(5).choose(blob, 0) == frozenset()
    many = [Sample(5).choose(bytes([seed]) * 32, 1000) for seed in range(2)]
    assert [len(one) for one in many] == [50, 50] and many[0] != many[1]
    for percent in (0, -1, 100.1, math.nan):
        with pytest.raises(LimitError):
            Sample(percent)

    with BundleReader.open("session.kvpack", Keyring([KEY])) as reader:
        index, references = reader.index, reader.manifest.references
    chosen = Sample(26).choose(index.manifest_blob, len(references))
    offset = index.footer.header_bytes
    for number, reference in enumerate(references):
        bad = changed(f"bad{number}", "session.kvpack", offset + reference.object_bytes - 20)
        found = run("verify", "--key", "my.key", "--sample", "26%", str(bad))
        assert found.code == (11 if number in chosen else 0), number
        # The header of a chunk that is not opened is checked all the same.
        head = changed(f"head{number}", "session.kvpack", offset + 100)
        assert run("verify", "--key", "my.key", "--sample", "26%", str(head)).code in (10, 11)
        offset += reference.object_bytes
    one = json.loads(
        run("verify", "--json", "--key", "my.key", "--sample", "26", "session.kvpack").out
    )
    assert (one["opened_chunks"], one["chunk_count"]) == (2, 4)


def test_what_inspect_says_is_what_may_be_expected(run: Run) -> None:
    Path("e").write_text(run("inspect", "--json", "session.kvpack").out)
    assert (load_identity("e"), load_layout("e")) == (IDENTITY, IDENTITY.layout)
    options = ["--key", "my.key", "--expect-layout", "e", "--expect-identity", "e"]
    assert run("verify", *options, "session.kvpack").code == 0

    longer = replace(IDENTITY.layout, max_context_tokens=8192)
    write_pack("longer", replace(snapshot(9), layout=longer), header=header_for(longer))
    weights = replace(IDENTITY, weights_digest=bytes([9]) * 32)
    write_pack("weights", snapshot(9), header=Header.of(weights, 1))
    for option, name, field in [
        ("--expect-layout", "longer", "max_context_tokens: expected 4096, found 8192"),
        ("--expect-identity", "longer", "max_context_tokens"),
        ("--expect-identity", "weights", "weights_digest: expected 0101"),
    ]:
        result = run("verify", "--key", "my.key", option, "e", name)
        assert (result.code, result.out) == (12, ""), name
        assert field in result.err
    assert run("verify", "--key", "my.key", "--expect-layout", "e", "weights").code == 0

    _sign(run)
    signed = ["--signer", "s.pub", "--expect-identity", "e", "signed.kvpack"]
    assert run("verify", *signed).code == 0
    Path("f").write_text(Path("e").read_text().replace("01" * 32, "03" * 32))
    assert run("verify", *signed[:2], "--expect-identity", "f", "signed.kvpack").code == 12


_LAYER = {
    "kind": "full",
    "window_tokens": None,
    "kv_heads": 1,
    "key_dim": 2,
    "value_dim": 3,
    "rope": None,
}


def _layout(maximum: str = "1", encoding: str = '"f16le"', **layer: object) -> str:
    layers = json.dumps([{**_LAYER, **layer}])
    return f'{{"layers":{layers},"encoding":{encoding},"max_context_tokens":{maximum}}}'


def test_the_expectation_that_the_next_test_breaks_is_a_good_one(run: Run) -> None:
    Path("e").write_text(_layout())
    assert load_layout("e").layers[0].value_dim == 3


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{}", "{", "[" * 100_000, '"text"', "\udcff", " " * ((1 << 20) + 1),
        '{"layers":[],"encoding":"f16le","max_context_tokens":1}',
        '{"layers":{},"encoding":"f16le","max_context_tokens":1}',
        *map(_layout, ["1e400", "NaN", "true", "-1", "0", "2147483648", "9223372036854775808"]),
        *(_layout(encoding=bad) for bad in ('"f8"', "2", "null", '"f16le","encoding":"f16le"')),
        *(_layout(**{name: bad}) for name in _LAYER for bad in (-1, 1 << 64, [], "x", 1.5)),
    ],
)  # fmt: skip
def test_an_expectation_that_says_nothing_is_refused(text: str, run: Run) -> None:
    Path("e").write_bytes(text.encode("utf-8", "surrogateescape"))
    for load in (load_layout, load_identity):
        with pytest.raises(ExpectationError):
            load("e")
    result = run("verify", "--key", "my.key", "--expect-layout", "e", "session.kvpack")
    assert (result.code, result.out) == (1, "")
    assert "hint: kvpack inspect --json" in result.err


def test_keyrings_may_be_folders_and_files_and_several(run: Run) -> None:
    for folder, epoch in [("one", 2), ("two", 1)]:
        Path(folder).mkdir()
        key = KEY if epoch == 1 else EpochKey("acme", 2, bytes(32))
        write_key_file(Path(folder) / "k.key", key)
    rings = ["--keyring", "one", "--keyring", "two"]
    assert run("verify", *rings, "session.kvpack").code == 0
    assert run("verify", "--keyring", "one", "session.kvpack").code == 11
    assert run("verify", "--keyring", "one", "--keyring", "my.key", "session.kvpack").code == 0
    assert run("verify", *rings, "--key", "my.key", "session.kvpack").code == 0
    write_key_file("false.key", EpochKey("acme", 1, bytes([5]) * 32))
    result = run("verify", *rings, "--key", "false.key", "session.kvpack")
    assert (result.code, result.out) == (1, "")
    assert "two keys for tenant 'acme', epoch 1" in result.err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_on_a_terminal_after_a_second_and_nowhere_else() -> None:
    now = [0.0]
    for stream, seconds, shows in [
        (_Terminal(), 0.9, False),
        (_Terminal(), 1.1, True),
        (io.StringIO(), 9.0, False),
    ]:
        now[0] = 0.0
        with Progress("a", 4_000_000, stream, lambda: now[0]) as progress:
            now[0] = seconds
            for _ in range(3):
                progress.advance(1_000_000)
        said = stream.getvalue()
        # Once, though three pieces went by: not more often than ten times a second.
        assert said.count("a: 25 %, 1 of 4 MB") == (1 if shows else 0)
        assert bool(said) is shows
        assert not shows or said.endswith("\r\x1b[K")
    with Progress("b", 0, (stream := _Terminal()), lambda: now[0]) as progress:
        now[0] += 2
        progress.advance(1_000_000)
    assert "b: 1 MB" in stream.getvalue()


def test_verify_tells_its_progress_every_byte_of_the_chunks(run: Run) -> None:
    from kvpack.verify import verify_bundle, verify_signature

    _sign(run)
    told: list[int] = []
    report = verify_bundle("signed.kvpack", Keyring([KEY]), progress=told.append)
    assert sum(told) == report.description.footer.chunks_bytes
    verify_signature("signed.kvpack", load_public_signer("s.pub"), progress=told.append)
    assert sum(told) == 2 * report.description.footer.chunks_bytes
