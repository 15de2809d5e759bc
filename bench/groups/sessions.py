"""How a drain grows with the number of sessions: the rows of ``python -m bench.drain``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.groups import Order
from bench.kvnode import OURS
from bench.measured import FAILED, NOT_THERE_YET, Contender, Sample
from bench.turns import NoFigureError, Turn

GROUP = "sessions"
ROOT = Path(__file__).resolve().parents[2]
_COUNTS, _QUICK = (1, 4, 16, 64), (1, 2)
_MIB = 16
_LIMIT_S = 180.0


def turns(order: Order) -> Iterator[Turn]:
    """One drain each, and single sessions one after another beside it."""
    for count in _QUICK if order.quick else _COUNTS:
        drain = Contender(f"sessions_{count}_drain", f"kvnode drain of {count} sessions", GROUP,
                          f"sessions_{count}_alone", OURS)  # fmt: skip
        alone = Contender(
            f"sessions_{count}_alone", f"as many bytes by single moves ({count})", GROUP,
            protects=OURS,
        )  # fmt: skip
        yield Turn([drain, alone], lambda count=count: _drained(count, order.folder))


def _drained(count: int, folder: Path) -> dict[str, Sample]:
    if importlib.util.find_spec("bench.drain.__main__") is None:
        raise NoFigureError(NOT_THERE_YET, "no bench.drain in this checkout")
    command = [sys.executable, "-m", "bench.drain", "--json", "--sessions", str(count)]
    command += ["--mib", str(_MIB), "--alone", "3", "--dir", str(folder)]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )  # fmt: skip
    # It ends with 1 where its own bound is missed.
    if ran.returncode not in (0, 1) or not ran.stdout.strip():
        lines = ran.stderr.strip().splitlines()
        raise NoFigureError(FAILED, lines[-1] if lines else f"it ended with {ran.returncode}")
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    size = int(found["payload_bytes"])
    rates = sorted(found["single_move_mb_per_s"])
    detail = {"without_owner_s": found["without_owner_s"]["median"]}
    return {
        f"sessions_{count}_drain": Sample(found["drain_s"], size, detail=detail),
        f"sessions_{count}_alone": Sample(size / (1e6 * rates[len(rates) // 2]), size),
    }
