"""The fleet: nodes with memory, sessions with bytes, and what each node last said of itself."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from node.placement.publishing import is_news
from node.placement.values import Kind, NodeState, SessionLoad

MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """What is simulated.

    Attributes:
        nodes: How many.
        sessions: How many at the start; as many begin as end.
        sessions_max: Sessions of one node at most.
        builds: Kinds of numerics among the nodes, in equal parts but for chance.
        capacity_bytes: KV memory of one node.
        mean_bytes: Of a session's rows; sizes are log-normal.
        life_s: Mean time from a session's beginning to its end.
        grow_bytes: What one session in a hundred gains in each step.
        seed: All chance is drawn from it.
    """

    nodes: int = 1_000
    sessions: int = 100_000
    sessions_max: int = 256
    builds: int = 2
    capacity_bytes: int = 96 * GIB
    mean_bytes: int = 518 * MIB
    life_s: float = 3_600.0
    grow_bytes: int = 16 * MIB
    seed: int = 8


@dataclass(slots=True)
class Machine:
    """One node. ``said`` is its notice: what others know, and not always how it stands."""

    name: str
    kind: Kind
    sessions: set[int] = field(default_factory=set)
    taken_bytes: int = 0
    leaving: bool = False
    is_up: bool = True
    said: NodeState | None = None


@dataclass(slots=True)
class Counts:
    """Writes to the directory, by what they are for."""

    claims: int = 0
    releases: int = 0
    transfers: int = 0
    notices: int = 0

    @property
    def all(self) -> int:
        """Together. Renewals of leases are not among them: an etcd counts none as a write."""
        return self.claims + self.releases + self.transfers + self.notices


class World:
    """All of it. Sessions are numbers; ``where`` and ``size`` tell the node and the bytes."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.draw = random.Random(shape.seed)
        kinds = [Kind(b"m" * 32, bytes([i]) * 32) for i in range(shape.builds)]
        self.machines = [Machine(f"n{i:04}", self.draw.choice(kinds)) for i in range(shape.nodes)]
        self.by_name = {one.name: one for one in self.machines}
        self.where: dict[int, Machine] = {}
        self.size: dict[int, int] = {}
        self.order: list[int] = []
        self.counts = Counts()
        self._next = 0
        for _ in range(shape.sessions):
            self.begin()

    def begin(self) -> bool:
        """A session begins on some node that is up and takes one; False: eight were asked."""
        for _ in range(8):
            machine = self.draw.choice(self.machines)
            size = int(self.draw.lognormvariate(0.0, 1.0) * self.shape.mean_bytes / 1.6487)
            if (
                machine.is_up and not machine.leaving
                and len(machine.sessions) < self.shape.sessions_max
                and machine.taken_bytes + size <= self.shape.capacity_bytes
            ):  # fmt: skip
                number, self._next = self._next, self._next + 1
                self.size[number] = size
                self.order.append(number)
                self._enter(number, machine)
                self.counts.claims += 1
                return True
        return False

    def end(self) -> bool:
        """Some session ends, if its node is up; gives whether it did."""
        place = self.draw.randrange(len(self.order))
        number = self.order[place]
        machine = self.where[number]
        if not machine.is_up:
            return False
        self.order[place] = self.order[-1]
        self.order.pop()
        self._leave(number, machine)
        del self.where[number], self.size[number]
        self.counts.releases += 1
        return True

    def grow(self) -> None:
        """One session in a hundred gains rows."""
        for number in self.draw.sample(self.order, len(self.order) // 100):
            machine = self.where[number]
            if machine.is_up:
                self.size[number] += self.shape.grow_bytes
                machine.taken_bytes += self.shape.grow_bytes

    def move(self, number: int, target: Machine) -> None:
        """A session changes its owner."""
        self._leave(number, self.where[number])
        self._enter(number, target)
        self.counts.transfers += 1

    def loads(self, machine: Machine) -> list[SessionLoad]:
        """What a node would list."""
        return [SessionLoad(str(one), self.size[one]) for one in machine.sessions]

    def state(self, machine: Machine) -> NodeState:
        """How a node stands."""
        capacity = self.shape.capacity_bytes
        return NodeState(
            machine.name, machine.kind, capacity, max(0, capacity - machine.taken_bytes),
            len(machine.sessions), self.shape.sessions_max, machine.leaving,
        )  # fmt: skip

    def publish(self) -> None:
        """Every node that is up writes its notice where that is news."""
        for machine in self.machines:
            if machine.is_up:
                now = self.state(machine)
                if machine.said is None or is_news(machine.said, now):
                    machine.said = now
                    self.counts.notices += 1

    def notices(self) -> list[NodeState]:
        """What anybody can read of the nodes whose lease runs."""
        return [one.said for one in self.machines if one.is_up and one.said is not None]

    def _enter(self, number: int, machine: Machine) -> None:
        self.where[number] = machine
        machine.sessions.add(number)
        machine.taken_bytes += self.size[number]

    def _leave(self, number: int, machine: Machine) -> None:
        machine.sessions.discard(number)
        machine.taken_bytes -= self.size[number]
