"""``python -m bench.placement``: simulate, and print one JSON object."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from bench.placement.churn import Churn, Hours
from bench.placement.reading import read_all
from bench.placement.world import Shape
from node.directory import open_directory


def main(arguments: list[str]) -> int:
    """Read options, run, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__)
    parser.add_argument("--nodes", type=int, default=Shape().nodes)
    parser.add_argument("--sessions", type=int, default=Shape().sessions)
    parser.add_argument("--hours", type=float, default=Churn().hours)
    parser.add_argument("--seed", type=int, default=Shape().seed)
    parser.add_argument("--drains-per-hour", type=float, default=Churn().drains_per_hour)
    parser.add_argument("--crashes-per-hour", type=float, default=Churn().crashes_per_hour)
    parser.add_argument(
        "--directory", metavar="URL", help="Instead: read so many notices from this directory."
    )
    given = parser.parse_args(arguments)
    if given.directory is not None:
        print(json.dumps(asyncio.run(_read(given.directory, given.nodes)), indent=1))
        return 0
    shape = Shape(nodes=given.nodes, sessions=given.sessions, seed=given.seed)
    churn = Churn(
        hours=given.hours,
        drains_per_hour=given.drains_per_hour,
        crashes_per_hour=given.crashes_per_hour,
    )
    begun = time.perf_counter()
    told = Hours(shape, churn).run()
    told["wall_s"] = time.perf_counter() - begun
    print(json.dumps(told, indent=1))
    return 0


async def _read(url: str, nodes: int) -> dict[str, Any]:
    directory = open_directory(url)
    try:
        return await read_all(directory, nodes)
    finally:
        await directory.close()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
