"""What an operator reads of a node: its counters and its page. Open before the model is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from node.economics.looking import BookLook
from node.http.door import Door, DoorState, Served
from node.metrics.moves import MoveLog
from node.metrics.peers import Peers
from node.metrics.recorder import Recorder
from node.metrics.registry import NodeMetrics
from node.metrics.views import LadderView
from node.metrics.watcher import Parts, Watcher
from node.page.feed import StatusPage
from node.serving.health import HealthState

if TYPE_CHECKING:
    from pathlib import Path

    from node.engine_thread import EngineThread
    from node.server import Node
    from node.serving.floor import Floor
    from node.serving.ladder import RowLadder
    from node.serving.producer import RemoteCounts


class Desk:
    """One node's.

    Attributes:
        watcher: Reads the node.
        metrics: What ``/metrics`` answers.
        page: What ``/`` answers.
    """

    def __init__(self, node: str, door: Door) -> None:
        self._door = door
        self._floor: Floor | None = None
        self.watcher = Watcher(node, health=self._health)
        self.metrics = NodeMetrics(self.watcher.status, self.watcher.recorder)
        self.page = StatusPage(self.watcher, door.stopping, refresh=self.watcher.refresh)
        door.observers.append(self._served)
        door.refusal_observers.append(self.recorder.refuse)

    @property
    def recorder(self) -> Recorder:
        """What is counted here."""
        return self.watcher.recorder

    @contextlib.asynccontextmanager
    async def over(
        self,
        node: Node,
        engine: EngineThread,
        floor: Floor | None = None,
        ladder: RowLadder | None = None,
        *,
        resident_bytes_max: int = 0,
        remote: RemoteCounts | None = None,
        credentials_dir: Path | None = None,
    ) -> AsyncIterator[None]:
        """Watch ``node`` until the block ends."""
        sessions = node.sessions
        moves = MoveLog(self.recorder, node.transfers.under_way, engine.model.layout)
        node.moves.watch = node.transfers.watch = moves
        peers = Peers(sessions.directory, _pinned(credentials_dir, node.name))
        parts = Parts(engine.model, sessions, moves, peers, remote=remote)
        if floor is not None:
            parts.floor, parts.counts = floor.status, floor.counts
        if ladder is not None:
            kept = ladder
            parts.accounts = ladder.accounts
            parts.costs = None if ladder.book is None else BookLook(ladder.book)
            parts.ladder = lambda: LadderView(kept.resident_bytes, resident_bytes_max, kept.pending)
        self._floor, self.watcher.parts = floor, parts
        looking = asyncio.create_task(peers.run())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait({looking})

    def _health(self) -> tuple[HealthState, str]:
        if self._door.state is DoorState.LOADING:
            return HealthState.LOADING, ""
        if self._floor is not None and self._floor.health.state is HealthState.UNHEALTHY:
            return HealthState.UNHEALTHY, self._floor.health.why
        if self._door.state is DoorState.DRAINING:
            return HealthState.DRAINING, ""
        return HealthState.OK, ""

    def _served(self, served: Served) -> None:
        self.recorder.answer(served.route, served.status, served.seconds)


def _pinned(folder: Path | None, node: str) -> Callable[[], list[str]]:
    """Names of the other nodes that may be spoken to, as pinned at the moment of a call."""
    if folder is None:
        return list
    # Not at the top: a node without credentials imports nothing of certificates.
    from node.credentials import Role, read_pins

    return lambda: [peer.name for peer in read_pins(folder, Role.NODE) if peer.name != node]
