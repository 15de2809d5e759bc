"""Programs that the tests of metrics need, and what is scraped, as numbers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def program(name: str) -> str:
    """Path of a program; the test is skipped, and says so, where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: nothing was checked against the real program")
    return found


def promtool(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """One run of promtool."""
    return subprocess.run(
        [program("promtool"), *arguments], input=given, capture_output=True, timeout=30, check=False
    )


def samples(text: str) -> dict[str, float]:
    """``name{labels}`` and value of each line."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
