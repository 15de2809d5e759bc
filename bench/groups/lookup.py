"""Looking a prompt up in stores of many chunks: the rows of ``python -m bench.index``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.groups import Order
from bench.measured import FAILED, NOT_THERE_YET, Contender, Sample
from bench.turns import NoFigureError, Turn

GROUP = "lookup"
ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 500.0
_QUICK, _USUAL, _SLOW = (1_000,), (1_000, 10_000, 100_000), (1_000_000,)

#: Prompts that are looked up, and how they are called here; the first is the one that is wanted.
_KINDS = {
    "hit": "a whole session is there",
    "leaves": "a prompt leaves a session half way",
    "miss": "nothing is there",
    "fork": "one of many sessions that share a beginning",
}


def turns(order: Order) -> Iterator[Turn]:
    """One run holds all rounds: each lookup is timed by itself."""
    sizes = _QUICK if order.quick else _USUAL + (_SLOW if order.slow else ())
    contenders = [
        Contender(_word(kind, size), f"lookup among {size:,} chunks: {title}", GROUP)
        for size in sizes
        for kind, title in _KINDS.items()
    ]
    if importlib.util.find_spec("bench.index.__main__") is None:
        yield Turn(contenders, lambda: _refuse(NOT_THERE_YET, "no bench.index in this checkout"))
        return
    try:
        rows = _run(sizes)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = str(error)
        yield Turn(contenders, lambda: _refuse(FAILED, reason))
        return
    known = {contender.name: contender for contender in contenders}
    for row in rows:
        for kind in _KINDS:
            contender = known.get(_word(kind, int(row["chunks"])))
            if contender is not None:
                contender.samples += _samples(row, kind)
    yield Turn([one for one in contenders if one.samples], dict, rounds_taken=True)
    empty = [one for one in contenders if not one.samples]
    if empty:
        yield Turn(empty, lambda: _refuse(FAILED, "bench.index gave no row"))


def _word(kind: str, size: int) -> str:
    return f"lookup{'' if kind == 'hit' else '_' + kind}_{size}"


def _run(sizes: tuple[int, ...]) -> list[Mapping[str, Any]]:
    # Chunks that no lookup opens are made up: they take no room and no time to be sealed.
    command = [sys.executable, "-m", "bench.index", "--json", "--only", "lookup", "--stubs"]
    command += ["--chunks", ",".join(map(str, sizes))]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )  # fmt: skip
    if ran.returncode:
        lines = ran.stderr.strip().splitlines()
        raise OSError(lines[-1] if lines else f"bench.index ended with {ran.returncode}")
    return [row for row in _flat(json.loads(ran.stdout)["index"]) if "chunks" in row]


def _flat(rows: list[Any]) -> Iterator[dict[str, Any]]:
    """Figures of a store's cases beside its size, however deep they stand."""
    for row in rows:
        inner = {key: value for key, value in row.items() if isinstance(value, dict)}
        yield {**row, **{key: value for one in inner.values() for key, value in one.items()}}


def _samples(row: Mapping[str, Any], kind: str) -> list[Sample]:
    """Every lookup where they are told; else the quickest, the middle one and the 95th of 100."""
    every = row.get(f"{kind}_each_ms")
    if every is None:
        names = (f"{kind}_least_ms", f"{kind}_median_ms", f"{kind}_p95_ms")
        every = [row[name] for name in names if name in row]
    return [Sample(value / 1e3, 0, round=number) for number, value in enumerate(every)]


def _refuse(status: str, reason: str) -> dict[str, Sample]:
    raise NoFigureError(status, reason)
