"""Running our commands as a user would."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]


#: Marks every process that this test process started, and what those started.
MARK = f"KVNODE_TEST_RUN={os.getpid()}"


def environment() -> dict[str, str]:
    name, _, value = MARK.partition("=")
    # What was on the path before stays: the packages that we need may lie there.
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(ROOT), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), name: value}


def command(module: str, *arguments: str, seconds: float = 90.0, cwd: Path | None = None):
    """Run ``kvnode`` (module ``node``) or ``kvpack`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment(),
        cwd=cwd,
        check=False,
    )


def at_once(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """What ``kvnode`` says to arguments that it refuses, or to a question about itself.

    In this process: a start of one costs a second, and what is asked is the answer.
    """
    from node.cli import main

    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        # What a command sets in its environment is not for those that come after it.
        mock.patch.dict(os.environ),
    ):
        code = 0
        try:
            main(list(arguments))
        except SystemExit as ended:
            code = ended.code or 0
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def failed_cleanly(ran, exit_code: int | None = None) -> str:
    """Check that a command failed as it should; gives its one error line."""
    lines = ran.stderr.strip().splitlines()
    assert ran.returncode != 0 and ran.returncode == (exit_code or ran.returncode)
    assert ran.stdout == ""
    assert len(lines) == 1 and lines[0].startswith("kvnode: error: "), ran.stderr
    return lines[0]


def bound(seconds: float) -> float:
    """``seconds`` on a machine that has its cores for itself; more where it is shared."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def our_processes() -> set[int]:
    """Ids of living processes that run ``-m node`` and that this test process is behind."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            marked = MARK.encode() in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marked and b"node" in arguments and b"-m" in arguments and state != "Z":
            found.add(int(folder.name))
    return found


def wait_until_gone(pids: set[int], seconds: float) -> bool:
    """Whether all of ``pids`` end within ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not pids & our_processes():
            return True
        time.sleep(0.1)
    return False
