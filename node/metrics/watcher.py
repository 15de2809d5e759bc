"""Reads a running node's parts into one plain status: for the scrape, and for the page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvpack import __version__
from kvpack.layout import CacheLayout
from node.lease import NodeLease
from node.metrics.memory import MemoryShape
from node.metrics.moves import MoveLog
from node.metrics.peers import Peers
from node.metrics.recorder import Recorder
from node.metrics.views import (
    SESSIONS_SHOWN,
    FloorView,
    HealthState,
    LadderView,
    LeaseView,
    NodeStatus,
    NodeView,
    SessionView,
    Standing,
)
from node.session import Phase, Session
from node.sessions import SESSIONS_MAX, Sessions
from node.transient import is_transient


class ModelFacts(Protocol):
    """What is shown of a model."""

    @property
    def name(self) -> str:
        """Its folder's name."""

    @property
    def layout(self) -> CacheLayout:
        """Shape of its rows."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A node's parts once its model is there.

    Attributes:
        model: What runs.
        sessions: What it owns.
        moves: What comes and goes.
        peers: The other nodes.
        floor: Slots and queue, at this moment.
        ladder: What is kept, at this moment.
        dormant: Sessions whose rows lie in the store, at this moment.
    """

    model: ModelFacts
    sessions: Sessions
    moves: MoveLog
    peers: Peers | None = None
    floor: Callable[[], FloorView] = FloorView
    ladder: Callable[[], LadderView] = LadderView
    dormant: Callable[[], Iterable[SessionView]] = tuple


@dataclass(slots=True)
class Watcher:
    """What ``/metrics`` and the page read. Begins before the model is there.

    Attributes:
        node: This node's name.
        address: Where it listens; empty where not known.
        recorder: Its counters.
        health: Whether it answers, and why not.
        parts: Set once there are any.
    """

    node: str
    address: str = ""
    recorder: Recorder = field(default_factory=Recorder)
    health: Callable[[], tuple[HealthState, str]] = lambda: (HealthState.OK, "")
    parts: Parts | None = None
    _started_at_s: float = field(default_factory=time.time)
    _started_s: float = field(default_factory=time.monotonic)

    def status(self) -> NodeStatus:
        """The node as it is now. Reads only; waits for nothing."""
        state, detail = self.health()
        uptime_s = time.monotonic() - self._started_s
        parts = self.parts
        if parts is None:
            return NodeStatus(
                self.node, "", "", __version__, state, detail, self._started_at_s, uptime_s,
                None, None, nodes=(NodeView(self.node, True, address=self.address),),
            )  # fmt: skip
        sessions = parts.sessions
        owned = [*_live(sessions), *parts.dormant()]
        elsewhere = parts.peers.sessions if parts.peers is not None else ()
        lease = _lease(sessions.lease, sessions)
        here = NodeView(self.node, True, lease.left_s, len(owned), self.address)
        layout = parts.model.layout
        return NodeStatus(
            self.node, parts.model.name, layout.encoding.value, __version__, state, detail,
            self._started_at_s, uptime_s, lease, MemoryShape.of(layout),
            floor=parts.floor(),
            ladder=parts.ladder(),
            sessions=(*owned, *elsewhere)[:SESSIONS_SHOWN],
            sessions_owned=len(owned),
            sessions_max=SESSIONS_MAX,
            nodes=(here, *(parts.peers.nodes if parts.peers is not None else ())),
            moves=parts.moves.views(),
        )  # fmt: skip


def _live(sessions: Sessions) -> list[SessionView]:
    page, _ = sessions.page("", SESSIONS_MAX)
    return [_view(one, sessions.node) for one in page if not is_transient(one.session_id)]


def _view(session: Session, node: str) -> SessionView:
    frozen = session.phase is Phase.FROZEN
    return SessionView(
        session.session_id, node, Standing.HANDING_OVER if frozen else Standing.SERVING,
        session.position, session.next_index, session.context_epoch,
    )  # fmt: skip


def _lease(lease: NodeLease, sessions: Sessions) -> LeaseView:
    return LeaseView(lease.left_s(), lease.ttl_s, lease.refused, sessions.stale_refused)
