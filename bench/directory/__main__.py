"""``python -m bench.directory URL…``: claims, transfers and the rest of a session's life, timed.

One caller, one call after another; sessions are new in each round and released at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import time
from pathlib import Path

from node.config import prepare_process
from node.credentials import LiveCredentials

CALLS = ("claim", "transfer", "put", "owner", "release", "renew")


async def measure(url: str, credentials: Path | None, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, by name."""
    from node.directory import open_directory

    live = None if credentials is None else LiveCredentials(credentials)
    name = "bench" if live is None else live.current().name
    directory = open_directory(url, live)
    took: dict[str, list[float]] = {call: [] for call in CALLS}

    async def timed(call: str, *arguments):
        begun_s = time.perf_counter()
        result = await getattr(directory, call)(*arguments)
        took[call].append(time.perf_counter() - begun_s)
        return result

    run, incarnation = secrets.token_hex(6), secrets.token_bytes(16)
    try:
        await directory.register(name, incarnation, 60.0)
        for number in range(rounds):
            session = f"bench-{run}-{number}"
            token = await timed("claim", session, name, secrets.token_bytes(16))
            token = await timed("transfer", session, token, name, secrets.token_bytes(16))
            await timed("put", session, token, secrets.token_bytes(64))
            await timed("owner", session)
            await timed("release", session, token)
            await timed("renew", name, incarnation, 60.0)
        await directory.expire(name, incarnation)
    finally:
        await directory.close()
    return took


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.directory", description=__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL", help="as of kvnode serve --directory")
    parser.add_argument("--credentials", type=Path)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prepare_process()
    for url in options.urls:
        took = asyncio.run(measure(url, options.credentials, options.rounds))
        row: dict[str, object] = {"directory": url.partition(":")[0], "rounds": options.rounds}
        for call, seconds in took.items():
            cuts = statistics.quantiles(seconds, n=100)
            row |= {f"{call}_p50_ms": round(cuts[49] * 1000, 3)}
            row |= {f"{call}_p99_ms": round(cuts[98] * 1000, 3)}
        if options.json:
            print(json.dumps(row))
            continue
        print(f"{row['directory']}: {options.rounds} rounds, p50 / p99 in ms")
        for call in CALLS:
            print(f"  {call:9} {row[f'{call}_p50_ms']:8} / {row[f'{call}_p99_ms']}")


if __name__ == "__main__":
    main()
