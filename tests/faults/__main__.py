"""``python -m tests.faults``: FAULT_RUNS randomized runs on real processes, and a table.

FAULT_SEED sets the first seed (0), FAULT_SECONDS a bound on the whole (3,600), FAULT_KEEP a new
folder in which logs and data stay. Exits with 1 if anything did not hold, and prints the seed of
each such run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from node.config import prepare_process

# gRPC reads its environment when it is imported.
prepare_process()

from .campaign import Campaign  # noqa: E402
from .lab import Lab, started  # noqa: E402
from .nursery import Nursery  # noqa: E402
from .plan import plan_of  # noqa: E402
from .result import Result, kinds  # noqa: E402


async def campaign(
    lab: Lab, nursery: Nursery, seeds: range, seconds: float
) -> tuple[list[Result], set[str]]:
    """One run for each seed, until the time is over; also every point that was reached."""
    runs, results = Campaign(lab, nursery), []
    end = time.monotonic() + seconds
    async with started(*runs.nodes):
        for seed in seeds:
            if time.monotonic() > end:
                print(f"stopped after {len(results)} runs: {seconds:.0f} s are over")
                break
            result = await runs.run(plan_of(seed))
            results.append(result)
            _tell(result)
    return results, {point for node in runs.nodes for point in node.reached()}


def _tell(result: Result) -> None:
    print(f"{result.seconds:5.1f} s  {result.plan}  -> {result.outcome}", flush=True)
    for text in result.found.all():
        print(f"        FOUND {text}", flush=True)


def _table(results: list[Result], reached: set[str], seconds: float) -> None:
    from node.fault_points import POINTS

    counts = kinds(results)
    modes = Counter(result.plan.mode for result in results)
    rows = [
        ("runs", f"{len(results)} ({', '.join(f'{n} {mode}' for mode, n in modes.items())})"),
        ("in which the fault came about", sum(result.fired for result in results)),
        ("processes started again", sum(result.starts for result in results)),
        ("sessions lost", counts["lost"]),
        ("sessions owned twice", counts["owned_twice"]),
        ("runs with wrong bits", counts["wrong_bits"]),
        ("runs with leftovers", counts["leftovers"]),
        ("released without a new owner", counts["released"]),
        ("other", counts["other"]),
        ("points reached", f"{len(reached & set(POINTS))} of {len(POINTS)}"),
        ("seconds", f"{seconds:.0f}"),
    ]
    print()
    for name, value in rows:
        print(f"{name:32} {value}")
    missing = sorted(set(POINTS) - reached)
    if missing:
        print(f"never reached: {', '.join(missing)}")


def main() -> None:
    """Run, print, exit."""
    first, runs = int(os.environ.get("FAULT_SEED", "0")), int(os.environ.get("FAULT_RUNS", "500"))
    seconds = float(os.environ.get("FAULT_SECONDS", "3600"))
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        kept = os.environ.get("FAULT_KEEP")
        folder = kept or stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpack-faults-"))
        lab = Lab.make(Path(folder) / "lab")
        with contextlib.closing(Nursery()) as nursery:
            seeds = range(first, first + runs)
            results, reached = asyncio.run(campaign(lab, nursery, seeds, seconds))
    _table(results, reached, time.monotonic() - start)
    sys.exit(1 if any(result.found.all() for result in results) else 0)


if __name__ == "__main__":
    main()
