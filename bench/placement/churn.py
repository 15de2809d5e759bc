"""Hours of a fleet: sessions come, grow and go, nodes are drained and die, others are levelled."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Any, Final

from bench.placement.world import Machine, Shape, World
from node.config import LEASE_S
from node.lease import RENEWALS
from node.placement.balancing import plan_rebalance
from node.placement.choosing import choose, plan_drain
from node.placement.values import NodeState, Step

#: One step of simulated time: notices are written at most so often.
STEP_S: Final = LEASE_S / RENEWALS


@dataclass(frozen=True, slots=True)
class Churn:
    """What happens, and how fast moves are.

    Attributes:
        hours: Of simulated time.
        drains_per_hour: Nodes that are emptied and started again, as a rolling upgrade does.
        crashes_per_hour: Nodes that die and come back.
        away_s: How long a node takes to start.
        rebalance_s: Between two rebalances.
        rate: Bytes a second of one stream.
        streams: Moves of one drain at once.
        exposed_s: Without an owner, for each move: the tail and the commit.
    """

    hours: float = 1.0
    drains_per_hour: float = 60.0
    crashes_per_hour: float = 5.0
    away_s: float = 60.0
    rebalance_s: float = 300.0
    rate: float = 1.0e9
    streams: int = 2
    exposed_s: float = 0.045


@dataclass(order=True, slots=True)
class _Event:
    """Something that will have happened at ``at_s``."""

    at_s: float
    number: int
    step: Step | None = field(compare=False, default=None)
    machine: Machine | None = field(compare=False, default=None)


@dataclass(slots=True)
class _Timer:
    """Wall time of one kind of decision."""

    times: int = 0
    total_s: float = 0.0
    worst_s: float = 0.0

    def add(self, begun: float) -> None:
        """One more."""
        spent = time.perf_counter() - begun
        self.times, self.total_s = self.times + 1, self.total_s + spent
        self.worst_s = max(self.worst_s, spent)

    def told(self) -> dict[str, float]:
        """In milliseconds."""
        mean = self.total_s / max(1, self.times)
        return {"times": self.times, "mean_ms": 1e3 * mean, "worst_ms": 1e3 * self.worst_s}


class Hours:
    """One run."""

    def __init__(self, shape: Shape, churn: Churn) -> None:
        self.world = World(shape)
        self.churn = churn
        self.now_s = 0.0
        self._events: list[_Event] = []
        self._moving: set[int] = set()
        self._numbers = 0
        self.drain_moves = self.rebalance_moves = self.refused = self.gone = self.overfilled = 0
        self.unplaceable = self.drains = self.crashes = 0
        self.drain_s: list[float] = []
        self.unserved_s = 0.0
        self.peak_writes = 0
        self.timers = {"choose": _Timer(), "drain": _Timer(), "rebalance": _Timer()}

    def run(self) -> dict[str, Any]:
        """Simulate, and tell."""
        world, churn = self.world, self.churn
        world.publish()
        setup = world.counts.all
        step_ends = world.shape.sessions * STEP_S / world.shape.life_s
        due = {"drain": 0.0, "crash": 0.0, "rebalance": churn.rebalance_s, "ends": 0.0}
        while self.now_s < churn.hours * 3600:
            before = world.counts.all
            self.now_s += STEP_S
            self._arrivals()
            due["ends"] += step_ends
            for _ in range(int(due["ends"])):
                if world.end() and not world.begin():
                    self.refused += 1
            due["ends"] %= 1.0
            world.grow()
            due["drain"] += churn.drains_per_hour * STEP_S / 3600
            due["crash"] += churn.crashes_per_hour * STEP_S / 3600
            if due["drain"] >= 1:
                due["drain"] -= 1
                self._drain()
            if due["crash"] >= 1:
                due["crash"] -= 1
                self._crash()
            if self.now_s >= due["rebalance"]:
                due["rebalance"] += churn.rebalance_s
                self._rebalance()
            world.publish()
            self.peak_writes = max(self.peak_writes, world.counts.all - before)
        return self._told(setup)

    def _some(self) -> Machine | None:
        """A node that is up and stays."""
        for _ in range(8):
            machine = self.world.draw.choice(self.world.machines)
            if machine.is_up and not machine.leaving:
                return machine
        return None

    def _drain(self) -> None:
        machine = self._some()
        if machine is None:
            return
        self.drains += 1
        machine.leaving = True
        nodes = self.world.notices()
        loads = [
            one for one in self.world.loads(machine) if int(one.session_id) not in self._moving
        ]
        if loads:
            begun = time.perf_counter()
            choose(loads[0], machine.name, machine.kind, nodes)
            self.timers["choose"].add(begun)
        begun = time.perf_counter()
        plan = plan_drain(machine.name, machine.kind, loads, nodes)
        self.timers["drain"].add(begun)
        self.unplaceable += len(plan.unplaced)
        self.drain_moves += len(plan.steps)
        spent_s = self._send(plan.steps, self.churn.streams)
        self.drain_s.append(spent_s)
        self._later(spent_s + STEP_S, machine=machine)

    def _rebalance(self) -> None:
        nodes = self.world.notices()
        busy = {self.world.where[one].name for one in self._moving if one in self.world.where}
        quiet: list[NodeState] = [one for one in nodes if one.name not in busy]
        held = {one.name: self.world.loads(self.world.by_name[one.name]) for one in quiet}
        begun = time.perf_counter()
        plan = plan_rebalance(quiet, held)
        self.timers["rebalance"].add(begun)
        self.rebalance_moves += len(plan.steps)
        self._send(plan.steps, 1)

    def _crash(self) -> None:
        machine = self._some()
        if machine is None:
            return
        self.crashes += 1
        # What is durable there is served again once it is back: nobody takes it over before.
        machine.is_up = False
        self.unserved_s += len(machine.sessions) * self.churn.away_s
        self._later(self.churn.away_s, machine=machine)

    def _send(self, steps: tuple[Step, ...], streams: int) -> float:
        """Begin moves, ``streams`` at a time; gives when the last one is over."""
        free = [0.0] * streams
        for step in steps:
            self._moving.add(int(step.session.session_id))
            at_s = heapq.heappop(free) + step.session.row_bytes / self.churn.rate
            heapq.heappush(free, at_s)
            self._later(at_s, step=step)
        return max(free)

    def _later(self, after_s: float, **what: Any) -> None:
        self._numbers += 1
        heapq.heappush(self._events, _Event(self.now_s + after_s, self._numbers, **what))

    def _arrivals(self) -> None:
        """Moves and starts that are over by now."""
        while self._events and self._events[0].at_s <= self.now_s:
            event = heapq.heappop(self._events)
            if event.step is not None:
                self._arrived(event.step)
            elif event.machine is not None:
                self._started(event.machine)

    def _arrived(self, step: Step) -> None:
        world, number = self.world, int(step.session.session_id)
        self._moving.discard(number)
        target = world.by_name[step.target]
        here = world.where.get(number)
        if here is None or here.name != step.source or not here.is_up or not target.is_up:
            self.gone += 1
            return
        world.move(number, target)
        self.unserved_s += self.churn.exposed_s
        self.overfilled += target.taken_bytes > world.shape.capacity_bytes

    def _started(self, machine: Machine) -> None:
        if machine.is_up and machine.leaving:
            # Drained: the process is replaced now, and what is left on it waits for that.
            machine.is_up = False
            self.unserved_s += len(machine.sessions) * self.churn.away_s
            self._later(self.churn.away_s, machine=machine)
            return
        machine.is_up, machine.leaving, machine.said = True, False, None

    def _told(self, setup: int) -> dict[str, Any]:
        world, moves = self.world, self.world.counts.transfers
        seconds = self.churn.hours * 3600
        counts = world.counts
        fills = [one.taken_bytes / world.shape.capacity_bytes for one in world.machines]
        drains = sorted(self.drain_s)
        return {
            "nodes": world.shape.nodes,
            "sessions": len(world.order),
            "hours": self.churn.hours,
            "seed": world.shape.seed,
            "moves": {
                "made": moves, "drain": self.drain_moves, "rebalance": self.rebalance_moves,
                "not_made": self.gone, "per_s": moves / seconds,
            },
            "drains": {
                "nodes": self.drains, "sessions_that_stayed": self.unplaceable,
                "median_s": drains[len(drains) // 2] if drains else 0.0,
                "worst_s": drains[-1] if drains else 0.0,
            },
            "crashes": self.crashes,
            "openings_refused": self.refused,
            "arrivals_over_capacity": self.overfilled,
            "directory_writes": {
                "per_s": (counts.all - setup) / seconds,
                "peak_per_s": self.peak_writes / STEP_S,
                "claims": counts.claims - world.shape.sessions, "releases": counts.releases,
                "transfers": counts.transfers, "notices": counts.notices - world.shape.nodes,
            },
            "without_owner": {
                "moves_s": moves * self.churn.exposed_s,
                "each_move_s": self.churn.exposed_s,
                "moves_and_restarts_s": self.unserved_s,
                "part_of_all_session_time": self.unserved_s / (seconds * world.shape.sessions),
            },
            "fill": {"min": min(fills), "max": max(fills), "mean": sum(fills) / len(fills)},
            "decisions": {name: timer.told() for name, timer in self.timers.items()},
        }  # fmt: skip
