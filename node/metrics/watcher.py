"""Reads a running node's parts into one plain status: for the scrape, and for the page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvpack import __version__
from kvpack.layout import CacheLayout
from node.economics.looking import BookLook
from node.lease import NodeLease
from node.metrics.memory import MemoryShape
from node.metrics.moves import MoveLog, Speed
from node.metrics.peers import Peers
from node.metrics.recorder import Recorder
from node.metrics.views import (
    NO_FLOOR,
    SESSIONS_SHOWN,
    LadderView,
    LeaseView,
    NodeStatus,
    NodeView,
    SessionView,
    Standing,
)
from node.serving.counts import Counts
from node.serving.health import HealthState
from node.serving.ladder.accounts import Accounts
from node.serving.producer import RemoteCounts
from node.serving.view import FloorView
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


@dataclass(slots=True)
class Parts:
    """A node's parts once its model is there.

    Attributes:
        model: What runs.
        sessions: What it owns.
        moves: What comes and goes.
        peers: The other nodes.
        floor: Slots and queue, at this moment.
        counts: What the slots did.
        ladder: What is kept, at this moment.
        accounts: What the ladder did.
        remote: What remote prefill came to; None where it is off.
        costs: What kept rows cost and save; None where none are kept.
    """

    model: ModelFacts
    sessions: Sessions
    moves: MoveLog
    peers: Peers | None = None
    floor: Callable[[], FloorView] = lambda: NO_FLOOR
    counts: Counts = field(default_factory=Counts)
    ladder: Callable[[], LadderView] = LadderView
    accounts: Accounts = field(default_factory=Accounts)
    remote: RemoteCounts | None = None
    costs: BookLook | None = None


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
    _speed: Speed = field(default_factory=Speed)

    async def refresh(self) -> None:
        """Read anew what comes from a disk and has changed there, for :meth:`status`."""
        if self.parts is not None and self.parts.costs is not None:
            await self.parts.costs.look()

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
        # The one that was used last first.
        owned = [
            _view(one, sessions.node)
            for one in reversed(sessions.all())
            if not is_transient(one.session_id)
        ]
        elsewhere = parts.peers.sessions if parts.peers is not None else ()
        lease = _lease(sessions.lease, sessions)
        here = NodeView(self.node, True, lease.left_s, len(owned), self.address)
        layout = parts.model.layout
        return NodeStatus(
            self.node, parts.model.name, layout.encoding.value, __version__, state, detail,
            self._started_at_s, uptime_s, lease, MemoryShape.of(layout),
            floor=parts.floor(),
            counts=parts.counts,
            tokens_per_s=self._speed.look(time.monotonic(), parts.counts.generated_tokens),
            ladder=parts.ladder(),
            accounts=parts.accounts,
            remote=parts.remote,
            economy=None if parts.costs is None else parts.costs.economy,
            sessions=(*owned, *elsewhere)[:SESSIONS_SHOWN],
            sessions_owned=len(owned),
            sessions_max=SESSIONS_MAX,
            nodes=(here, *(parts.peers.nodes if parts.peers is not None else ())),
            moves=parts.moves.views(),
        )  # fmt: skip


def _view(session: Session, node: str) -> SessionView:
    standing = Standing.DORMANT if session.asleep else Standing.SERVING
    if session.phase is Phase.FROZEN:
        standing = Standing.HANDING_OVER
    return SessionView(
        session.session_id, node, standing,
        session.position, session.next_index, session.context_epoch,
    )  # fmt: skip


def _lease(lease: NodeLease, sessions: Sessions) -> LeaseView:
    return LeaseView(lease.left_s(), lease.ttl_s, lease.refused, sessions.stale_refused)
