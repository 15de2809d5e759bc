"""One group in a process of its own: ``python -m bench.group NAME ORDER RESULT``.

ORDER is JSON; RESULT is a file that is replaced after every round, so that a group that is ended
has said what it had.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from bench.groups import Order
from bench.machine import adopt_orphans
from bench.measured import FAILED, Contender
from bench.turns import Turn, take_turns


def main() -> None:
    """Run the group that the arguments name."""
    name, asked, result = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    adopt_orphans()
    limit_s, only = asked.pop("limit_s"), set(asked.pop("only"))
    module = importlib.import_module(f"bench.groups.{name}")
    with contextlib.ExitStack() as kept:
        order = Order(**{**asked, "folder": Path(asked["folder"]), "kept": kept})
        turns = wanted_turns(list(module.turns(order)), only)
        _run(name, turns, order.rounds, limit_s, result)


def _run(name: str, turns: list[Turn], rounds: int, limit_s: float, result: Path) -> None:
    contenders = [contender for turn in turns for contender in turn.contenders]

    def tell() -> None:
        _write(result, contenders)
        done = max((len(one.samples) for one in contenders), default=0)
        print(f"{name}: round {done} of {rounds}", file=sys.stderr, flush=True)

    take_turns(turns, rounds, limit_s, tell)
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
    for contender in contenders:
        if not contender.samples and not contender.reason:
            contender.status, contender.reason = FAILED, "no round was finished"
    values: list[dict[str, Any]] = [contender.as_json() for contender in contenders]
    for contender in contenders:
        if contender.reason == "no round was finished":
            contender.status, contender.reason = "measured", ""
    fresh = result.with_suffix(".new")
    fresh.write_text(json.dumps(values))
    fresh.replace(result)


if __name__ == "__main__":
    main()
