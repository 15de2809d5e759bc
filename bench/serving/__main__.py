"""``python -m bench.serving``: what serving is held to, as a table or as JSON.

A part takes one to three minutes on two busy cores, ``first-token`` and ``long-prompt`` about a
minute for each round. Processes are its own and end with it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from bench.serving.concurrent import four_chats, long_prompt
from bench.serving.publication import publication
from bench.serving.restart import conversation, first_token, mlx_lm_edit
from bench.serving.rows import HEAD, Row
from bench.serving.same import same_texts
from bench.serving.soak import REQUESTS, soak, start_up, work_folder

PARTS = (
    "start", "conversation", "first-token", "texts", "chats", "long-prompt", "publication", "soak",
    "mlx-lm-edit",
)  # fmt: skip


def measure(part: str, folder: Path, rounds: int | None, requests: int) -> Iterator[Row]:
    """Run one part."""
    if part == "start":
        yield start_up(folder, rounds or 5)
    elif part == "conversation":
        yield from conversation(folder)
    elif part == "first-token":
        yield first_token(folder, rounds or 2)
    elif part == "texts":
        yield from same_texts(folder)
    elif part == "chats":
        yield from four_chats(folder, rounds or 6)
    elif part == "long-prompt":
        yield from long_prompt(folder, rounds or 2)
    elif part == "publication":
        yield from publication(rounds or 4)
    elif part == "soak":
        yield from soak(folder, requests)
    else:
        yield mlx_lm_edit(folder)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, help="default: each part's own")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of soak")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # Told to stop, it ends the servers first: the other one does not notice that its parent went.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows: list[Row] = []
    if not options.json:
        print(HEAD)
    for part in options.only or PARTS:
        with work_folder() as folder:
            for row in measure(part, folder, options.rounds, options.requests):
                # At once: a run that is cut short has said it.
                print(row.markdown(), flush=True, file=sys.stderr if options.json else sys.stdout)
                rows.append(row)
    if options.json:
        versions = {name: version(name) for name in ("mlx", "mlx-lm")}
        json.dump({"machine": versions, "rows": [row.as_json() for row in rows]}, sys.stdout)
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
