"""What is known where a session is placed: nodes, sessions, and what came of choosing.

Values check themselves. Nothing here asks a directory, a node or a clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvpack import limits
from node.directory import LEASE_S_MAX

#: Rows that any node may say it has room for: far above every machine, far below an overflow.
KV_BYTES_MAX: Final = 1 << 50

#: Sessions that a node may say it has.
SESSIONS_MAX: Final = 1 << 20

DIGEST_BYTES: Final = 32


class Continuation(enum.Enum):
    """How a session would go on at a place, as far as numerics tell before the probe does."""

    EXACT = "exact"
    COMPATIBLE = "compatible"


class Why(enum.Enum):
    """Why a node cannot take a session. In this order they are asked, and the first one is told."""

    ITSELF = "has it already"
    AWAY = "has no lease"
    LEAVING = "is being drained"
    MODEL = "has another model, tokenizer or tenant"
    NUMERICS = "computes otherwise, and nobody consented to a compatible continuation"
    SESSIONS = "has as many sessions as it may"
    MEMORY = "has too little free KV memory"


@dataclass(frozen=True, slots=True)
class Kind:
    """What decides whether rows of one node are of use on another: whole digests, compared.

    Attributes:
        identity: Model, tokenizer, shape and tenant; 32 bytes.
        numerics: On what rows are computed; 32 bytes.
    """

    identity: bytes
    numerics: bytes

    def __post_init__(self) -> None:
        for name in ("identity", "numerics"):
            length = len(getattr(self, name))
            limits.check_range(f"notice.{name}", length, DIGEST_BYTES, DIGEST_BYTES, "bytes")


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node, as it described itself last and as its lease stands now.

    Attributes:
        name: From its certificate.
        kind: What it computes, and on what.
        capacity_bytes: KV memory that it gives to sessions.
        free_bytes: What of that is not taken. 0 also where more is taken than it gives.
        sessions: How many it has.
        sessions_max: How many it may have.
        leaving: It is being drained: it takes nothing any more.
        lease_left_s: How long its lease runs yet; 0: it is over.
        address: Where it listens for gRPC.
        http: Where it listens for HTTP, as clients call it; empty: nowhere.
    """

    name: str
    kind: Kind
    capacity_bytes: int
    free_bytes: int
    sessions: int = 0
    sessions_max: int = 64
    leaving: bool = False
    lease_left_s: float = LEASE_S_MAX
    address: str = ""
    http: str = ""

    def __post_init__(self) -> None:
        limits.check_name("notice.node", self.name)
        limits.check_range("notice.capacity_bytes", self.capacity_bytes, 0, KV_BYTES_MAX, "bytes")
        limits.check_range("notice.free_bytes", self.free_bytes, 0, self.capacity_bytes, "bytes")
        limits.check_range("notice.sessions", self.sessions, 0, SESSIONS_MAX)
        limits.check_range("notice.sessions_max", self.sessions_max, 0, SESSIONS_MAX)

    @property
    def is_away(self) -> bool:
        """Whether nobody can tell that it runs."""
        return self.lease_left_s <= 0


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """One session: its id, and what its rows take, in bytes, on every node of its model."""

    session_id: str
    row_bytes: int

    def __post_init__(self) -> None:
        limits.check_range("session.row_bytes", self.row_bytes, 0, KV_BYTES_MAX, "bytes")


@dataclass(frozen=True, slots=True)
class Step:
    """One move of a plan."""

    session: SessionLoad
    source: str
    target: str
    continuation: Continuation


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A session that no node can take: how many nodes were refused for which reason.

    Attributes:
        session: Which.
        reasons: By reason, how many nodes; without the one that has the session.
        room_bytes: The most that a node has free which only lacks memory; None: there is none.
    """

    session: SessionLoad
    reasons: Mapping[Why, int] = field(default_factory=dict)
    room_bytes: int | None = None

    def sentence(self) -> str:
        """For people: the session by name, and why each node was refused."""
        told = [f"{count} x {why.value}" for why, count in self.reasons.items()]
        said = "; ".join(told) if told else "no other node is known"
        room = "" if self.room_bytes is None else f", at most {self.room_bytes} free"
        name, size = self.session.session_id, self.session.row_bytes
        return f"session {name} ({size} B): no node can take it: {said}{room}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves in the order in which they are made, and what stays where it is."""

    steps: tuple[Step, ...]
    unplaced: tuple[Unplaced, ...] = ()
