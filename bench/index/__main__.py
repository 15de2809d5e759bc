"""``python -m bench.index``: stores of 10^3 to 10^6 chunks, as a table or as JSON.

A row of ``index`` is one store: its sizes, and the figures of each case by name. ``growth`` is the
slope of a figure over the number of chunks, both as logarithms: 1 is linear, 0 does not grow.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.index.cases import CASES
from bench.index.world import World, make_world

_LIMIT_S = 1800
#: Of these a slope says something.
_GROWING = (
    "open_ms", "tidy_ms", "hit_cpu_ms", "again_cpu_ms", "leaves_cpu_ms", "miss_cpu_ms",
    "fork_cpu_ms", "save_cpu_ms", "save_first_cpu_ms", "plan_cpu_ms", "plan_peak_mib",
    "step_cpu_ms", "check_cpu_ms", "check_peak_mib", "check_first_ms",
)  # fmt: skip


def run_case(case: str, world: World) -> dict[str, object]:
    """One case in a process of its own."""
    command = [sys.executable, "-m", "bench.index.cases", case, str(world.path)]
    command += [str(world.sessions), str(world.forks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise OSError(f"{case}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line through the logarithms of ``points``, least squares."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len(logs) < 2:
        return math.nan
    mean_x = sum(x for x, _ in logs) / len(logs)
    mean_y = sum(y for _, y in logs) / len(logs)
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.index", description=__doc__)
    parser.add_argument("--chunks", default="1000,10000,100000", help="sizes, with commas between")
    parser.add_argument("--only", choices=tuple(CASES), action="append", help="default: all")
    parser.add_argument("--stubs", action="store_true", help="made-up chunks that take no room")
    parser.add_argument("--folder", type=Path, help="where stores are made; default: temporary")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for size in map(int, options.chunks.split(",")):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            load = os.getloadavg()[0]
            world = make_world(Path(folder) / "store", size, stubs=options.stubs)
            row: dict[str, object] = dataclasses.asdict(world) | {"chunks": size, "load": load}
            row["made"] = world.chunks
            del row["path"]
            for case in options.only or CASES:
                row |= run_case(case, world)
            rows.append(row)
            print(f"{size} chunks: done, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    growth = {
        name: slope([(float(str(row["made"])), float(str(row[name]))) for row in rows])
        for name in _GROWING
        if all(name in row for row in rows)
    }
    if options.json:
        json.dump({"index": rows, "growth": growth}, sys.stdout)
        sys.stdout.write("\n")
        return
    print("| figure | " + " | ".join(str(row["chunks"]) for row in rows) + " | slope |")
    print("| --- |" + " ---: |" * (len(rows) + 1))
    for name in sorted({name for row in rows for name in row if not name.endswith("each_ms")}):
        cells = [str(row.get(name, "")) for row in rows]
        cells = [f"{float(cell):.3g}" if cell else "" for cell in cells]
        fitted = f"{growth[name]:.2f}" if name in growth else ""
        print(f"| {name} | {' | '.join(cells)} | {fitted} |")


if __name__ == "__main__":
    main()
