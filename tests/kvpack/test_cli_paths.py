"""Names of every kind: what one command accepts, every other one accepts, and nothing escapes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import Run, furnish, runner
from pack_kit import import_path

_ROOT = str(Path(__file__).parents[2])

_GOOD_NAMES = [
    "кэш Гоша",
    "😀 emoji 👩‍👩‍👧",
    "e\u0301 decomposed",
    "\u00e9 composed",
    "with  spaces ",
    " leading",
    "-leading-dash",
    "--key",
    "trailing.",
    "CON",
    "nul.kvpack",
    "x:y",
    "a\\b",
    "%2e%2e",
    "~",
    "$HOME",
    "a\nb",
    "\x1b[31mred",
    "*?[a]",
    "'quoted\"",
    "\udcff\udcfe",
    "n" * 255,
    "д" * 127,
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    return runner(capsys)


@pytest.mark.parametrize("name", _GOOD_NAMES, ids=range(len(_GOOD_NAMES)))
def test_every_command_takes_every_name_that_the_volume_takes(run: Run, name: str) -> None:
    """As a pack, as a key, as a signer, as a store, and as what is written."""
    short = name if len(os.fsencode(name)) < 250 else name[: len(name) // 2]
    for folder in ("keys", "signers", "packs", "stores", "out"):
        Path(folder).mkdir()
    os.link("my.key", f"keys/{name}")
    os.link("session.kvpack", name)
    key = ["--key", f"keys/{name}"]
    session = ["--", name]
    assert run("keygen", "--signer", f"signers/{short}").code == 0
    signer = f"signers/{short}"
    for arguments in (
        ["verify", *key, *session],
        ["verify", *key, "--deep", "--json", *session],
        ["inspect", *session],
        ["ls", *key, *session],
        ["diff", *key, *session, "session.kvpack"],
        ["sign", *key, "--signer", signer, *session, f"packs/{name}"],
        ["verify", "--signer", f"{signer}.pub", f"packs/{name}"],
        ["import", *key, "--create", *session, f"stores/{name}"],
        ["ls", *key, f"stores/{name}"],
        ["check", *key, f"stores/{name}"],
        ["gc", "--yes", f"stores/{name}"],
    ):
        result = run(*arguments)
        assert (result.code, result.err) == (0, ""), arguments
        # What a terminal would act on does not reach it.
        assert "\x1b" not in result.out
    cut = json.loads(run("ls", "--json", *key, f"stores/{name}").out)["cut"]
    assert run("export", *key, f"stores/{name}", cut, f"out/{name}").code == 0
    assert Path(f"out/{name}").read_bytes() == Path("session.kvpack").read_bytes()
    for made in (f"packs/{name}", f"out/{name}", signer):
        assert stat.S_IMODE(Path(made).stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(f"stores/{name}").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "name", ["n" * 256, "n" * 300, "д" * 150, "absent/x", "session.kvpack/x", ".", "..", "x/"]
)
def test_a_name_that_cannot_be_written_says_why_and_leaves_nothing(run: Run, name: str) -> None:
    run("keygen", "--signer", "s")
    assert run("import", "--key", "my.key", "--create", "session.kvpack", "packs").code == 0
    cut = json.loads(run("ls", "--json", "packs").out)["cut"]
    before = sorted(Path().rglob("*"))
    for arguments in (
        ["keygen", name],
        ["keygen", "--signer", name],
        ["sign", "--key", "my.key", "--signer", "s", "session.kvpack", name],
        ["export", "--key", "my.key", "packs", cut, name],
    ):
        result = run(*arguments)
        assert (result.code, result.out) == (1, ""), arguments
        assert result.err.startswith("kvpack: error: ")
        assert name[:200] in result.err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("name", ["n" * 256, "n" * 300, "absent", "fifo", "device", "loop"])
def test_a_name_that_cannot_be_read_says_why_and_is_not_waited_for(run: Run, name: str) -> None:
    os.mkfifo("fifo")
    Path("device").symlink_to("/dev/zero")
    Path("loop").symlink_to("loop")
    for arguments in (
        ["verify", "--key", "my.key", name],
        ["verify", "--key", name, "session.kvpack"],
        ["verify", "--keyring", name, "session.kvpack"],
        ["verify", "--signer", name, "session.kvpack"],
        ["verify", "--key", "my.key", "--expect-layout", name, "session.kvpack"],
        ["inspect", name],
        ["ls", name],
        ["diff", "--key", "my.key", "session.kvpack", name],
        ["import", "--key", "my.key", "--create", name, "packs"],
        ["check", "--key", "my.key", name],
        ["gc", name],
    ):
        result = run(*arguments)
        assert (result.code in (1, 10), result.out) == (True, ""), arguments
        assert result.err.startswith("kvpack: error: ")


def test_an_empty_name_is_not_the_working_directory(run: Run) -> None:
    assert run("import", "--key", "my.key", "--create", "session.kvpack", "packs").code == 0
    Path("my.key").rename("k.key")
    os.chdir("packs")
    for arguments in (
        ["keygen", ""],
        ["keygen", "--signer", ""],
        ["verify", "--keyring", "", "../session.kvpack"],
        ["verify", "--key", "../k.key", ""],
        ["ls", ""],
        ["gc", ""],
        ["check", "--key", "../k.key", ""],
        ["import", "--key", "../k.key", "../session.kvpack", ""],
    ):
        result = run(*arguments)
        assert (result.code, result.out) == (2, ""), arguments
        assert "a name is empty" in result.err
    assert run("check", "--key", "../k.key", ".").code == 0


def test_a_link_is_never_written_through_and_a_linked_key_is_refused(run: Run) -> None:
    outside = Path("outside")
    outside.mkdir()
    (outside / "kept").write_text("kept")
    Path("link").symlink_to("outside/kept")
    Path("dangling").symlink_to("outside/new")
    Path("key-link").symlink_to("my.key")
    run("keygen", "--signer", "s")
    for name in ("link", "dangling"):
        assert run("keygen", name).code == 1
        assert run("keygen", "--signer", name).code == 1
        sign = ["sign", "--key", "my.key", "--signer", "s", "session.kvpack", name]
        assert run(*sign).code == 1
    assert sorted(one.name for one in outside.iterdir()) == ["kept"]
    assert (outside / "kept").read_text() == "kept"
    assert "symbolic link" in run("verify", "--key", "key-link", "session.kvpack").err
    # A pack may be reached by a link, and by a path with dots: it is what it is.
    Path("pack-link").symlink_to("session.kvpack")
    Path("home").symlink_to(".")
    for name in (
        "pack-link",
        "home/session.kvpack",
        "outside/../session.kvpack",
        "./session.kvpack",
    ):
        result = run("verify", "--key", "my.key", name)
        assert (result.code, result.out) == (0, f"{name}: OK\n")
    Path("hard").hardlink_to("session.kvpack")
    assert run("verify", "--key", "my.key", str(Path("hard").resolve())).code == 0


def test_links_inside_a_store_lead_nowhere(run: Run) -> None:
    assert run("import", "--key", "my.key", "--create", "session.kvpack", "packs").code == 0
    cut = json.loads(run("ls", "--json", "packs").out)["cut"]
    chunk = next(one for one in Path("packs/chunks").rglob("*") if one.is_file())
    chunk.rename("elsewhere")
    chunk.symlink_to(Path("elsewhere").resolve())
    assert run("check", "--key", "my.key", "packs").code == 13
    assert run("export", "--key", "my.key", "packs", cut, "out").code in (1, 10)
    assert not Path("out").exists()
    assert run("gc", "--yes", "--budget", "0", "packs").code == 0
    assert Path("elsewhere").exists()


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_modes_do_not_depend_on_the_umask(run: Run, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert run("keygen", "--signer", "s").code == 0
        sign = ["sign", "--key", "my.key", "--signer", "s", "session.kvpack", "signed"]
        assert run(*sign).code == 0
        importing = ["import", "--key", "my.key", "--create", "session.kvpack", "packs"]
        assert run(*importing).code == 0
    finally:
        os.umask(before)
    for path in Path("packs").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    for name in ("s", "s.pub", "signed"):
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o600


def test_names_that_differ_only_by_case_are_two_or_refused(run: Run) -> None:
    assert run("keygen", "Case.key").code == 0
    second = run("keygen", "case.key")
    assert second.code == (0 if len(list(Path().glob("[cC]ase.key"))) == 2 else 1)


def test_a_terminal_that_shows_ascii_only_gets_the_same_verdicts(run: Run, tmp_path: Path) -> None:
    """LANG=C is read when Python starts, so this needs a process of its own."""
    name = "кэш 😀"
    os.link("session.kvpack", name)
    environment = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    steps = [
        ["ls", "--key", "my.key", name],
        ["import", "--key", "my.key", "--create", name, "кэш"],
        ["ls", "--key", "my.key", "кэш"],
        ["verify", "--key", "my.key", "absent ☃"],
    ]
    child = """
import sys
from kvpack.cli import main
for step in " ".join(sys.argv[1:]).split(" :: "):
    print(main(step.split("|")))
"""
    done = subprocess.run(
        [sys.executable, "-c", child, " :: ".join("|".join(step) for step in steps)],
        cwd=tmp_path, env={**os.environ, **environment, "PYTHONPATH": import_path(_ROOT)},
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    codes = [line for line in done.stdout.decode().splitlines() if line in ("0", "1", "2", "10")]
    assert codes == ["0", "0", "0", "1"], done.stderr
    # The bytes that were typed come back: what the terminal makes of them is its own business.
    assert done.stderr.startswith("kvpack: error: absent ☃: No such file".encode())
    assert Path("кэш").is_dir()
