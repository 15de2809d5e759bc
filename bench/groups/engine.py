"""Decode and rollback: the rows of ``python -m bench.engine``, in this bench's shape."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.groups import Order
from bench.measured import FAILED, Contender, Sample
from bench.turns import NoFigureError, Turn

GROUP = "engine"
ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 240.0


def turns(order: Order) -> Iterator[Turn]:
    """One run holds all rounds: its own turns are between two loops at one position."""
    found = _run(["decode"] if order.quick else ["decode", "rollback"], 0.1 if order.quick else 0.5)
    for row in found["rows"]:
        word = _word(row["name"])
        rounds = list(zip(row["rounds_s"]["ours"], row["rounds_s"]["theirs"], strict=True))
        other = Contender(
            f"{word}_{_other(row['against'])}", f"{row['against']}: {row['name']}", GROUP
        )
        ours = Contender(word, row["name"], GROUP, other.name)
        for number, (ours_s, theirs_s) in enumerate(rounds):
            ours.samples.append(Sample(ours_s, 0, round=number))
            other.samples.append(Sample(theirs_s, 0, round=number))
        yield _done(ours, other)


def _run(parts: list[str], scale: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.engine", "--json", "--scale", str(scale)]
    command += [word for part in parts for word in ("--only", part)]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )  # fmt: skip
    if ran.returncode:
        lines = ran.stderr.strip().splitlines()
        raise OSError(lines[-1] if lines else f"bench.engine ended with {ran.returncode}")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def _word(name: str) -> str:
    """``decode`` for the model that a row of what is wanted is about."""
    words = re.sub(r"\W+", "_", name.lower()).strip("_")
    return "decode" if words == "decode_tiny_muse_glimmer" else words


def _other(against: str) -> str:
    return "mlx_lm" if against.startswith("mlx-lm") else "reference"


def _done(ours: Contender, other: Contender) -> Turn:
    """A turn that was taken: its samples stay as they are."""

    def once() -> dict[str, Sample]:
        raise NoFigureError(FAILED, "there was no round")

    return Turn([ours, other], once, rounds_taken=True)
