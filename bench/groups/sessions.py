"""How a drain grows with the number of sessions: the rows of ``python -m bench.drain``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.child import bench_json
from bench.groups import Order
from bench.kvnode import OURS
from bench.measured import Contender, Sample
from bench.turns import Turn

GROUP = "sessions"
_COUNTS, _QUICK = (1, 4, 16, 64), (1, 2)
_MIB = 16


def turns(order: Order) -> Iterator[Turn]:
    """One drain each, and single sessions one after another beside it."""
    for count in _QUICK if order.quick else _COUNTS:
        drain = Contender(f"sessions_{count}_drain", f"kvnode drain of {count} sessions", GROUP,
                          f"sessions_{count}_alone", OURS)  # fmt: skip
        alone = Contender(
            f"sessions_{count}_alone", f"as many bytes by single moves ({count})", GROUP,
            protects=OURS,
        )  # fmt: skip
        yield Turn([drain, alone], partial(_drained, count, order))


def _drained(count: int, order: Order) -> dict[str, Sample]:
    # It ends with 1 where its own bound is missed.
    found = bench_json(
        "bench.drain", "--json", "--sessions", str(count), "--mib", str(_MIB), "--alone", "3",
        "--dir", str(order.folder), limit_s=order.limit_s, good=(0, 1),
    )  # fmt: skip
    size = int(found["payload_bytes"])
    rates = sorted(found["single_move_mb_per_s"])
    detail = {"without_owner_s": found["without_owner_s"]["median"]}
    return {
        f"sessions_{count}_drain": Sample(found["drain_s"], size, detail=detail),
        f"sessions_{count}_alone": Sample(size / (1e6 * rates[len(rates) // 2]), size),
    }
