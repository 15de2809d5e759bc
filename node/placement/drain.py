"""``kvnode drain``: every session of a node goes elsewhere, in rounds.

Nothing is kept on this side: what is left to do is what the node still has. So a drain that was
killed is begun again, and one that ended finds nothing. A move that a killed drain had begun goes
on by itself, and is waited for. A session is named in the end, with the reason, if no node can take
it; it stays, and serves where it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvpack import limits
from node.client import NodeClient
from node.config import Address
from node.errors import PeerAnswerError, PeerUnavailableError
from node.pb.v1 import session_pb2 as pb
from node.placement.choosing import plan_drain
from node.placement.moving import fleet_of, held_by, move_one, named
from node.placement.values import NodeState, Plan, Step

#: Moves at once at most. Of these one streams at a time (:mod:`node.migration.turns`); a second one
#: is prepared meanwhile and a third one ends, so that the wire is never idle. More only take
#: memory.
PARALLEL_MAX: Final = 16
PARALLEL: Final = 3

#: Tries of one session; each goes to a node that has not failed yet, where there is one.
TRIES: Final = 4

#: Between two rounds in which nothing moved, and between two looks at a move of somebody else's.
PAUSE_S: Final = 0.5

#: Looks at a move of somebody else's, ten minutes of them.
WAITS: Final = 1200

#: Reasons of a node after which the same step may be possible a moment later.
_PASSING: Final = frozenset({"session_frozen", "stale_token", "busy", "directory_unavailable"})

#: Reasons that say that the session is not there any more.
_GONE: Final = frozenset({"session_moved", "session_not_found"})


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """Options of ``kvnode drain``.

    Attributes:
        node: Its name.
        address: Where it listens.
        credentials_dir: A client's.
        accept_compatible: Continuations that are not bit-exact will do.
        compress: Rows are compressed where that saves 3 % or more.
        parallel: Moves at once, 1 to 16.
        timeout_s: What is not begun by then stays.

    Raises:
        LimitError: ``parallel`` is outside its range.
    """

    node: str
    address: Address
    credentials_dir: Path
    accept_compatible: bool = False
    compress: bool = False
    parallel: int = PARALLEL
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        limits.check_range("drain.parallel", self.parallel, 1, PARALLEL_MAX, "moves")


@dataclass(slots=True)
class Progress:
    """How far a drain is, for whoever shows it. ``sent`` counts the moves under way."""

    total_bytes: int = 0
    done_bytes: int = 0
    sent: dict[str, int] = field(default_factory=dict)

    @property
    def moved_bytes(self) -> int:
        """Of the total."""
        return min(self.total_bytes, self.done_bytes + sum(self.sent.values()))


@dataclass(slots=True)
class Drained:
    """What became of a node's sessions.

    Attributes:
        moved: Where they went, with what was measured.
        gone: Those that went by somebody else's doing meanwhile.
        stayed: By id, why.
        other_tenants: How many sessions of other tenants stay: those do not move.
        seconds: In all.
    """

    moved: list[pb.MigrateResult] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    stayed: dict[str, str] = field(default_factory=dict)
    other_tenants: int = 0
    seconds: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether the node has nothing any more that would be lost with it."""
        return not self.stayed and not self.other_tenants


class Drain:
    """One drain of one node.

    Args:
        client: Of the node.
        order: What was asked for.
        show: Told of progress.
    """

    def __init__(
        self, client: NodeClient, order: DrainOrder, show: Callable[[Progress], None]
    ) -> None:
        self._client = client
        self._order = order
        self._show = show
        self._progress = Progress()
        self._done = Drained()
        self._tries: dict[str, int] = {}
        self._waits: dict[str, int] = {}
        self._nodes: dict[str, NodeState] = {}
        self._last: dict[str, str] = {}
        self._failed: set[str] = set()
        self._end_s = time.monotonic() + order.timeout_s

    async def run(self) -> Drained:
        """Move all that can be moved.

        Raises:
            PeerUnavailableError: The node does not answer.
            PeerAnswerError: It refuses this client.
        """
        begun_s = time.monotonic()
        self._done.other_tenants = (await self._client.leave()).other_tenants_sessions
        moved = -1
        while (plan := await self._plan()) is not None:
            if moved == len(self._done.moved):
                await asyncio.sleep(PAUSE_S)
            moved = len(self._done.moved)
            await self._make(plan)
        self._done.seconds = time.monotonic() - begun_s
        return self._done

    async def _plan(self) -> Plan | None:
        """What is to be done yet; None: nothing that could be."""
        held, nodes = await held_by(self._client), await fleet_of(self._client)
        self._nodes = {one.name: one for one in nodes}
        loads = {one.session_id: one for one in held.loads}
        # A short one may have got tokens since, and one that stayed may have gone.
        self._done.stayed = {
            name: why for name, why in self._done.stayed.items() if name in loads
        } | dict.fromkeys(held.short, "too short to move: no row yet")
        if time.monotonic() >= self._end_s:
            for name in loads:
                self._done.stayed.setdefault(name, self._late(name))
            return None
        open_loads = [one for name, one in loads.items() if name not in self._done.stayed]
        if not open_loads:
            return None
        own = named(nodes, self._order.node)
        plan = plan_drain(
            own.name, own.kind, open_loads, self._usable(nodes),
            accept_compatible=self._order.accept_compatible,
        )  # fmt: skip
        for one in plan.unplaced:
            name = one.session.session_id
            before = self._last.get(name)
            self._done.stayed[name] = one.sentence() + (f" (tried: {before})" if before else "")
        left = sum(step.session.row_bytes for step in plan.steps)
        self._progress.total_bytes = self._progress.done_bytes + left
        return plan

    def _usable(self, nodes: tuple[NodeState, ...]) -> list[NodeState]:
        """The nodes, those that failed as if they were away."""
        return [
            dataclasses.replace(one, lease_left_s=0.0) if one.name in self._failed else one
            for one in nodes
        ]

    async def _make(self, plan: Plan) -> None:
        """Make the steps, some at a time; what is not begun when the time is over is left."""
        steps = iter(plan.steps)

        async def mover() -> None:
            for step in steps:
                if time.monotonic() >= self._end_s:
                    return
                await self._step(step)

        async with asyncio.TaskGroup() as movers:
            for _ in range(min(self._order.parallel, len(plan.steps))):
                movers.create_task(mover())

    async def _step(self, step: Step) -> None:
        name, size = step.session.session_id, step.session.row_bytes

        def report(sent_bytes: int) -> None:
            self._progress.sent[name] = min(sent_bytes, size)
            self._show(self._progress)

        try:
            result = await move_one(
                self._client, step, Address.parse(self._nodes[step.target].address),
                accept_compatible=self._order.accept_compatible,
                compress=self._order.compress, report=report,
            )  # fmt: skip
        except PeerAnswerError as error:
            await self._refused(step, error)
        except PeerUnavailableError as error:
            # The node itself: whether it is there at all, the next look at it tells.
            self._note(name, str(error))
        else:
            self._done.moved.append(result)
            self._progress.done_bytes += size
        finally:
            self._progress.sent.pop(name, None)
            self._show(self._progress)

    async def _refused(self, step: Step, error: PeerAnswerError) -> None:
        name = step.session.session_id
        if error.peer_reason in _GONE:
            self._done.gone.append(name)
            self._progress.done_bytes += step.session.row_bytes
        elif error.peer_reason == "session_state":
            # A move of somebody else's, perhaps of the drain before this one: it is not hurried.
            self._waits[name] = self._waits.get(name, 0) + 1
            if self._waits[name] > WAITS:
                self._done.stayed[name] = f"session {name}: {error}"
            await asyncio.sleep(PAUSE_S)
        elif error.peer_reason == "consent_needed":
            self._done.stayed[name] = f"session {name}: {error}"
        elif error.peer_reason in _PASSING:
            self._note(name, str(error))
        else:
            self._failed.add(step.target)
            self._note(name, f"node {step.target}: {error}")

    def _note(self, name: str, why: str) -> None:
        self._last[name] = why
        self._tries[name] = self._tries.get(name, 0) + 1
        if self._tries[name] >= TRIES:
            self._done.stayed[name] = f"session {name}: not moved in {TRIES} tries: {why}"

    def _late(self, name: str) -> str:
        before = self._last.get(name)
        return f"session {name}: the time was over" + (f" (tried: {before})" if before else "")


async def drain_node(order: DrainOrder, show: Callable[[Progress], None]) -> Drained:
    """Move every session off a node.

    Raises:
        CredentialsError: The folder is not usable.
        PeerUnavailableError: The node does not answer.
        PeerAnswerError: It refuses this client.
    """
    async with NodeClient(order.credentials_dir, order.node, order.address) as client:
        return await Drain(client, order, show).run()
