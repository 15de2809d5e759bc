"""Another bench of this project, run for its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.measured import FAILED
from bench.turns import NoFigureError

ROOT = Path(__file__).resolve().parents[1]


def bench_json(
    module: str, *arguments: str, limit_s: float, good: tuple[int, ...] = (0,)
) -> dict[str, Any]:
    """What ``python -m MODULE`` prints as its last line, or as all lines, on standard output.

    Args:
        module: To be run.
        arguments: Its own.
        limit_s: What it may take.
        good: Exit codes with which it has said something.

    Raises:
        NoFigureError: It failed, in its last words, or took longer.
    """
    try:
        ran = subprocess.run(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True,
            timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoFigureError(FAILED, f"{module} took more than {limit_s:.0f} s") from None
    if ran.returncode not in good or not ran.stdout.strip():
        lines = ran.stderr.strip().splitlines()
        raise NoFigureError(FAILED, lines[-1] if lines else f"it ended with {ran.returncode}")
    try:
        found: dict[str, Any] = json.loads(ran.stdout)
    except ValueError:
        found = json.loads(ran.stdout.strip().splitlines()[-1])
    return found
