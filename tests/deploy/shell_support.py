"""Shell texts that are run as they are, by sh; our commands in them are run in this process.

Starting a command takes a second, and a text has many.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from kvpack.cli.commands import kvpack
from node.cli import main as kvnode

_PROGRAMS = {"kvpack": kvpack, "kvnode": kvnode}

#: What stands in for a program: it asks for its words to be run, and says what came of it.
_STAND_IN = """#!/bin/sh
{{ printf '%s\\n' {name} "$@"; }} > "{pipes}/ask"
read -r code < "{pipes}/answer"
cat "{pipes}/out"; cat "{pipes}/err" >&2
exit "$code"
"""
_END = "this is the end"


@dataclass(frozen=True)
class Ran:
    """What a shell text came to."""

    exit_code: int
    stdout: str
    stderr: str
    commands: list[list[str]]


def run_shell(text: str, pipes: Path, folder: Path, environment: dict[str, str]) -> Ran:
    """Run ``text`` by sh in ``folder``; ``kvnode`` and ``kvpack`` are answered from here.

    Args:
        text: For ``sh -e``.
        pipes: An empty folder for what this needs.
        folder: Where it runs.
        environment: Of the shell and, for ``KVNODE_…``, of the commands.
    """
    for name in _PROGRAMS:
        stand_in = pipes / name
        stand_in.write_text(_STAND_IN.format(name=name, pipes=pipes))
        stand_in.chmod(0o755)
    for name in ("ask", "answer"):
        (pipes / name).unlink(missing_ok=True)
        os.mkfifo(pipes / name)
    (pipes / "script").write_text(text)
    # Whatever the text does, somebody says in the end that it is over.
    wrapped = f'sh -e "{pipes}/script"; code=$?; echo "{_END}" > "{pipes}/ask"; exit $code'
    process = subprocess.Popen(
        ["sh", "-c", wrapped],
        cwd=folder,
        env={**os.environ, **environment, "PATH": f"{pipes}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    commands = _answer(pipes, folder, environment)
    stdout, stderr = process.communicate(timeout=30)
    return Ran(process.returncode, stdout, stderr, commands)


def _answer(pipes: Path, folder: Path, environment: dict[str, str]) -> list[list[str]]:
    commands: list[list[str]] = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        while True:
            words = (pipes / "ask").read_text().splitlines()
            if words == [_END]:
                return commands
            commands.append(words)
            name, *rest = words
            result = CliRunner().invoke(_PROGRAMS[name], rest, env=environment)
            (pipes / "out").write_text(result.stdout)
            (pipes / "err").write_text(result.stderr)
            (pipes / "answer").write_text(f"{result.exit_code}\n")
    finally:
        os.chdir(before)
