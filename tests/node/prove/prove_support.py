"""Runs the command and its parts, with this project's packages and a bound on time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from node.tiny import make_tiny_model

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
SECONDS = 240.0

#: Group of the report -> whether bits are promised.
GROUPS = {
    "control": True,
    "snapshot": True,
    "pack": True,
    "tiles": True,
    "used": True,
    "rollback": True,
    "single calls": False,
    "chunk sizes": False,
    "blocks": False,
}


def environment() -> dict[str, str]:
    """This project first; what was on the path before stays, for MLX may lie there."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(ROOT), str(HERE), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def tiny(folder: Path, arch: str = "muse_glimmer", window: int = 8, layers: int = 4) -> Path:
    make_tiny_model(folder, arch, seed=5, window=window, layers=layers)
    return folder


def kvnode(
    *arguments: str, cwd: Path, seconds: float = SECONDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """``kvnode`` in its own process, outside the repository, with these environment variables."""
    command = [sys.executable, "-P", "-m", "node", *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def prove_json(*arguments: str, cwd: Path, exit_code: int = 0) -> dict:
    """The object that ``kvnode prove --json`` prints, once its exit code was as expected."""
    ran = kvnode("prove", "--json", *arguments, cwd=cwd)
    assert ran.returncode == exit_code, ran.stderr + ran.stdout
    lines = ran.stdout.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def groups_of(run: dict) -> dict[str, dict]:
    return {group["group"]: group for group in run["groups"]}
