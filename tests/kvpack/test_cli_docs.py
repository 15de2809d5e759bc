"""Every example of docs/cli.md, run in its order; what it shows is what comes out."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from cli_kit import Run, changed, furnish, runner, with_changed_row, write_pack
from pack_kit import FULL, import_path, snapshot

from kvpack.cli import exchange_commands
from kvpack.cli.commands import kvpack
from kvpack.identity import NumericsFingerprint
from kvpack.layout import LayerKind

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "cli.md").read_text()
_CUT = "3510b51f80bcf167"
_HEX = re.compile(r"\b[0-9a-f]{16}\b")


def _examples() -> list[tuple[str, int, list[str]]]:
    """Each command line of the page, its exit code, and the lines that it shows."""
    found: list[tuple[str, int, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", _PAGE, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                command, _, code = line[2:].partition("   # exits with ")
                found.append((command, int(code or 0), []))
            else:
                found[-1][2].append(line)
    return found


def _other() -> None:
    """Another build made it, and one value row of layer 1 at position 7 is another one."""
    state = snapshot(300)
    numbers = [i for i, tile in enumerate(state.tiles) if tile.spec.kind is LayerKind.FULL]
    keys_bytes = 256 * 2 * FULL.key_dim
    numerics = NumericsFingerprint((("backend", "cpu"), ("mlx", "0.32.5")))
    changed_state = with_changed_row(state, numbers[0], keys_bytes + 7 * 2 * FULL.value_dim)
    write_pack("other.kvpack", changed_state, numerics=numerics)


def _call(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    words = shlex.split(command)
    if words[0] == "cat":
        # The example's pipe, as a file behind standard input.
        with Path(words[1]).open("rb") as piped:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped))
            result = run(*words[4:])
            monkeypatch.undo()
        return result.code, result.out
    assert words[0] == "kvpack"
    target = words[words.index(">") + 1] if ">" in words else ""
    result = run(*(words[1 : words.index(">")] if target else words[1:]))
    if target:
        Path(target).write_text(result.out)
        return result.code, ""
    return result.code, result.out


def test_every_example_does_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        furnish(tmp_path)
        _other()
        changed("damaged.kvpack", "session.kvpack")
        run, cut = runner(capsys), _CUT
        examples = [one for one in _examples() if "mlx-lm" not in one[0]]
        assert len(examples) >= 20
        for command, code, shown in examples:
            found, out = _call(run, command.replace(_CUT, cut), monkeypatch)
            assert found == code, command
            # Ids and digests depend on the cipher that suits this machine, and on random keys.
            assert _HEX.sub("X", out).splitlines() == [_HEX.sub("X", x) for x in shown], command
            if " import " in command:
                cut = out.split()[-1]
    finally:
        os.chdir(before)


def test_the_examples_with_mlx_lm_reach_the_engines_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are run for real where the engine is (tests/engine/interchange)."""
    called: list[tuple[click.Command, dict[str, object]]] = []
    monkeypatch.setattr(
        exchange_commands,
        "_invoke",
        lambda _, command, **options: called.append((command, options)),
    )
    run = runner(capsys)
    for command, code, _ in _examples():
        if "mlx-lm" in command:
            assert run(*shlex.split(command)[1:]).code == code
    assert [command.name for command, _ in called] == ["import", "export"]
    for command, options in called:
        assert set(options) == {parameter.name for parameter in command.params}
        required = [each.name for each in command.params if each.required]
        assert all(options[str(name)] for name in required)


def test_every_command_and_exit_code_is_on_the_page() -> None:
    run_there = {shlex.split(command)[1] for command, _, _ in _examples()} - {"session.kvpack"}
    assert run_there == set(kvpack.commands)
    for code in (0, 1, 2, 10, 11, 12, 13, 14, 130):
        assert f"\n| {code} |" in _PAGE


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shells_get_their_completion(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from kvpack.cli import main; main([])"],
        env={**os.environ, "PYTHONPATH": import_path(_ROOT), "_KVPACK_COMPLETE": f"{shell}_source"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "_KVPACK_COMPLETE" in done.stdout and f"{shell}_complete" in done.stdout
