"""Looking a prompt up in stores of many chunks: the rows of ``python -m bench.index``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from bench.child import bench_json
from bench.groups import Order
from bench.measured import Contender, Sample
from bench.turns import Turn

GROUP = "lookup"
KEYED = "names of blocks by a keyed hash; chunks are checked when they are opened"
_QUICK, _USUAL = (1_000,), (1_000, 10_000, 100_000)

#: Prompts that are looked up, and how they are called here; the first is the one that is wanted.
_KINDS = {
    "hit": "a whole session is there",
    "leaves": "a prompt leaves a session half way",
    "miss": "nothing is there",
    "fork": "one of many sessions that share a beginning",
}


def turns(order: Order) -> Iterator[Turn]:
    """A store of each size. Its run holds all rounds: each lookup is timed by itself."""
    yield from turns_of(GROUP, _QUICK if order.quick else _USUAL, order)


def turns_of(group: str, sizes: tuple[int, ...], order: Order) -> Iterator[Turn]:
    """A turn for each of the sizes."""
    for size in sizes:
        contenders = [
            Contender(
                _word(kind, size), f"lookup among {size:,} chunks: {title}", group, protects=KEYED
            )
            for kind, title in _KINDS.items()
        ]
        yield Turn(contenders, partial(_looked_up, size, order.limit_s), rounds_max=1)


def _looked_up(size: int, limit_s: float) -> dict[str, list[Sample]]:
    rows = _run(size, limit_s)
    return {
        _word(kind, size): samples
        for row in rows
        for kind in _KINDS
        if (samples := _samples(row, kind))
    }


def _word(kind: str, size: int) -> str:
    return f"lookup{'' if kind == 'hit' else '_' + kind}_{size}"


def _run(size: int, limit_s: float) -> list[Mapping[str, Any]]:
    # Chunks that no lookup opens are made up: they take no room and no time to be sealed.
    found = bench_json(
        "bench.index", "--json", "--only", "lookup", "--stubs", "--chunks", str(size),
        limit_s=limit_s,
    )  # fmt: skip
    return [row for row in _flat(found["index"]) if "chunks" in row]


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
