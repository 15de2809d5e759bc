"""One group in a process of its own: ``python -m bench.group NAME ORDER RESULT``.

ORDER is JSON; RESULT is a file that is replaced after every turn, so that a group that is ended
has said what it had. Its time begins with the process: payloads that are made first are in it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.groups import Order
from bench.machine import adopt_orphans
from bench.measured import MEASURED, TIMED_OUT, Contender
from bench.turns import Turn, take_turns


def main() -> None:
    """Run the group that the arguments name."""
    begun_s = time.monotonic()
    name, asked, result = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    adopt_orphans()
    only, end_s = set(asked.pop("only")), begun_s + asked["limit_s"]
    module = importlib.import_module(f"bench.groups.{name}")
    with contextlib.ExitStack() as kept:
        order = Order(**{**asked, "folder": Path(asked["folder"]), "kept": kept})
        turns = wanted_turns(list(module.turns(order)), only)
        _run(name, turns, order.rounds, end_s, result)


def _run(name: str, turns: list[Turn], rounds: int, end_s: float, result: Path) -> None:
    contenders = [contender for turn in turns for contender in turn.contenders]

    def tell(number: int) -> None:
        _write(result, contenders)
        left_s = end_s - time.monotonic()
        print(f"{name}: round {number + 1}, {left_s:.0f} s left", file=sys.stderr, flush=True)

    take_turns(turns, rounds, end_s, tell)
    _write(result, contenders)


def wanted_turns(turns: list[Turn], only: set[str]) -> list[Turn]:
    """Those of the contenders that were asked for, and of whom they are measured against."""
    if not only:
        return turns
    known = {one.name: one for turn in turns for one in turn.contenders}
    names, todo = set(), list(only)
    while todo:
        name = todo.pop()
        if name in known and name not in names:
            names.add(name)
            todo.append(known[name].against)
    return [turn for turn in turns if any(one.name in names for one in turn.contenders)]


def _write(result: Path, contenders: list[Contender]) -> None:
    values: list[dict[str, Any]] = [contender.as_json() for contender in contenders]
    for value in values:
        if not value["samples"] and value["status"] == MEASURED:
            value |= {"status": TIMED_OUT, "reason": "no round was finished"}
    fresh = result.with_suffix(".new")
    fresh.write_text(json.dumps(values))
    fresh.replace(result)


if __name__ == "__main__":
    main()
