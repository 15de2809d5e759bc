"""Runs the case list: first child, second child, sums by group."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.prove.cases import Group, Plan, RollbackStation, Station, make_plan
from node.prove.compare import Comparison
from node.prove.cost import (
    Cost,
    Ledger,
    history_s,
    patience_s,
    rollback_cost,
    station_cost,
)
from node.prove.cuts import make_key
from node.prove.messages import Facts
from node.prove.process import (
    COMMAND,
    ChildProcess,
    ModelRefusedError,
    ProveChildError,
    Refused,
    child_process,
)
from node.prove.result import DtypeRun, GroupResult, first_difference

#: Reading weights from a slow disk.
_LOAD_S: Final = 900.0

#: Names of cases in one sentence of what was left out.
_NAMED_MAX: Final = 8

Item = Station | RollbackStation
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """What is proved, and how thoroughly.

    Attributes:
        model: Model folder, or ``owner/name`` for the local Hugging Face cache.
        dtype: Dtype to load it in, None for its own.
        quick: A short list.
        budget_s: Seconds for cases that are not essential.
        command: Starts a child.
    """

    model: Path
    dtype: str | None
    quick: bool
    budget_s: float
    command: Sequence[str] = COMMAND


class Run:
    """One dtype: a folder, two children, and the sums."""

    def __init__(self, options: ProveOptions, folder: Path, progress: Progress) -> None:
        self._options = options
        self._folder = folder
        self._progress = progress
        self._start = time.monotonic()
        self._ledger = Ledger(options.budget_s)
        self._results = {group: GroupResult(group) for group in Group}
        self._left_out: list[str] = []

    async def prove(self) -> DtypeRun:
        """Both children, one after the other.

        Raises:
            ModelRefusedError: The model cannot be loaded in this dtype.
            ProveChildError: A child could not do its work; the message says what.
        """
        make_key(self._folder)
        async with self._child("writer") as child:
            facts = await self._load(child)
            plan = make_plan(facts.shape, quick=self._options.quick)
            self._left_out.extend(plan.left_out)
            written = await self._write(child, facts, plan)
        # The first has ended: weights are in memory once, and nothing of it can be shared.
        async with self._child("reader") as child:
            again = await self._load(child)
            await self._read(child, facts, plan, written)
        return DtypeRun(
            facts,
            tuple(self._results.values()),
            tuple(self._left_out),
            first_difference(facts.numerics, again.numerics),
            self._elapsed_s,
        )

    def _child(self, name: str) -> Any:  # noqa: ANN401  an asynchronous context manager
        return child_process(self._folder / f"{name}.log", self._options.command)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start

    async def _load(self, child: ChildProcess) -> Facts:
        self._progress("loading the model", 0.0)
        said = await child.ask(
            "load",
            _LOAD_S,
            model=_spelled(self._options.model),
            dtype=self._options.dtype,
            folder=str(self._folder),
        )
        if isinstance(said, Refused):
            raise ModelRefusedError(said.message)
        return Facts.from_json(said)

    async def _write(self, child: ChildProcess, facts: Facts, plan: Plan) -> list[Item]:
        control_s = 2 * history_s(facts, plan.control)
        await self._written(child, "write control", control_s, history=plan.control)
        for pair in plan.shapes:
            seconds = sum(history_s(facts, way) for way in (pair.left, pair.right))
            said = await child.ask("shapes", patience_s(seconds), pair=pair)
            self._count(pair.group, _comparison(said, pair.left.title))
        written, skipped = [], _Skipped()
        items = list(_by_importance(plan))
        for index, item in enumerate(items):
            cost = _cost(facts, item)
            why = None if item.essential else self._ledger.why_not(cost, self._elapsed_s)
            if why is not None:
                skipped.add(why, item.label)
                continue
            self._progress(f"computing {item.label}", index / len(items) / 2)
            await self._written(child, _write_operation(item), cost.write_s, station=item)
            self._ledger.read_s += cost.read_s
            written.append(item)
        self._left_out.extend(skipped.sentences())
        return written

    async def _written(
        self, child: ChildProcess, operation: str, seconds: float, **values: object
    ) -> None:
        """Let the first child write something; it compares the same calls twice on the way."""
        said = await child.ask(operation, patience_s(seconds), **values)
        if isinstance(said, Refused):
            raise ProveChildError(f"{operation}: {said.message}")
        self._ledger.file_bytes += said["file_bytes"]
        self._count(Group.CONTROL, Comparison.from_json(said["control"]))

    async def _read(
        self, child: ChildProcess, facts: Facts, plan: Plan, written: Sequence[Item]
    ) -> None:
        said = await child.ask(
            "read control", patience_s(history_s(facts, plan.control)), history=plan.control
        )
        self._count(Group.CONTROL, _comparison(said, plan.control.title))
        skipped = _Skipped()
        for index, item in enumerate(written):
            if not item.essential and self._elapsed_s > self._options.budget_s:
                skipped.add("time", item.label)
                continue
            self._progress(f"restoring {item.label}", 0.5 + index / len(written) / 2)
            if isinstance(item, Station):
                await self._restores(child, facts, item)
            else:
                await self._blocks(child, facts, item)
        self._left_out.extend(skipped.sentences())

    async def _restores(self, child: ChildProcess, facts: Facts, station: Station) -> None:
        wait_s = patience_s(station_cost(facts, station).read_s)
        for route, kind in station.restores:
            said = await child.ask(
                "restore", wait_s, station=station, route=route, continuation=kind
            )
            where = f"{station.label}, then {kind.value}"
            self._count(route.group, _comparison(said, where))

    async def _blocks(self, child: ChildProcess, facts: Facts, station: RollbackStation) -> None:
        wait_s = patience_s(rollback_cost(facts, station).read_s)
        for count, kept in station.blocks:
            said = await child.ask("rollback", wait_s, station=station, block=(count, kept))
            where = f"{station.label}, {kept} of {count} kept"
            self._count(Group.ROLLBACK, _comparison(said, where))

    def _count(self, group: Group, compared: Comparison) -> None:
        self._results[group] = self._results[group].plus(compared)


async def prove_dtype(options: ProveOptions, progress: Progress) -> DtypeRun:
    """Prove one dtype in a private folder that is gone afterwards.

    Raises:
        ProveChildError: It could not be done.
    """
    with tempfile.TemporaryDirectory(prefix="kvnode-prove-") as folder:
        return await Run(options, Path(folder), progress).prove()


def _spelled(model: Path) -> str:
    """A folder as an absolute path; anything else as it was given, for it may be an id."""
    return str(model.resolve()) if model.is_dir() else model.as_posix()


def _comparison(said: Any | Refused, where: str) -> Comparison:  # noqa: ANN401
    """The answer as a comparison: what a restore refuses has failed, not merely ended."""
    if isinstance(said, Refused):
        return Comparison(steps=1, first_difference=f"{said.kind}: {said.message}").at(where)
    return Comparison.from_json(said).at(where)


def _by_importance(plan: Plan) -> Iterator[Item]:
    items: list[Item] = [*plan.stations, *plan.rollbacks]
    yield from (item for item in items if item.essential)
    yield from plan_rest(plan)


def plan_rest(plan: Plan) -> Iterator[Item]:
    """What is not essential; a rollback station has many cases, so few sessions go before it."""
    rest = [station for station in plan.stations if not station.essential]
    blocks = [station for station in plan.rollbacks if not station.essential]
    while rest or blocks:
        yield from rest[:_NAMED_MAX]
        yield from blocks[:1]
        rest, blocks = rest[_NAMED_MAX:], blocks[1:]


def _cost(facts: Facts, item: Item) -> Cost:
    return station_cost(facts, item) if isinstance(item, Station) else rollback_cost(facts, item)


def _write_operation(item: Item) -> str:
    return "write station" if isinstance(item, Station) else "write rollback"


class _Skipped:
    """Names of what was left out, by reason."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, why: str, label: str) -> None:
        self._names.setdefault(why, []).append(label)

    def sentences(self) -> Iterator[str]:
        """One for each reason."""
        for why, names in self._names.items():
            more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
            yield f"for want of {why}: {'; '.join(names[:_NAMED_MAX])}{more}"
