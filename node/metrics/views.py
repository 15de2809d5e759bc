"""What a node looks like at one moment: values alone, for the scrape and for the status page.

Nothing here holds text or tokens. Names of sessions are for the page, whose viewer owns them; the
metrics never read them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from node.economics.summary import Economy
from node.metrics.memory import MemoryShape
from node.serving.counts import Counts
from node.serving.health import HealthState
from node.serving.ladder.accounts import Accounts
from node.serving.producer import RemoteCounts
from node.serving.view import FloorView

#: What one page shows of each list. A node holds 64 sessions and knows as many peers as it pins.
SESSIONS_SHOWN: Final = 128
NODES_SHOWN: Final = 32
MOVES_SHOWN: Final = 16
REFUSALS_SHOWN: Final = 12

#: A node that serves nothing yet.
NO_FLOOR: Final = FloorView(HealthState.LOADING, "", (), 0, 0, False)


@dataclass(frozen=True, slots=True)
class LadderView:
    """What is kept for reuse.

    Attributes:
        resident_bytes: Rows held in memory.
        resident_bytes_max: What they may take.
        pending: Cuts on their way to the store.
    """

    resident_bytes: int = 0
    resident_bytes_max: int = 0
    pending: int = 0


@dataclass(frozen=True, slots=True)
class LeaseView:
    """This node's lease.

    Attributes:
        left_s: Seconds until this node fences itself; 0 where it is over.
        ttl_s: What a renewal gives.
        fenced: Operations that were refused since it was over.
        stale: Operations that were refused since their token was not the current one.
    """

    left_s: float
    ttl_s: float
    fenced: int = 0
    stale: int = 0


class Standing(enum.Enum):
    """What a session does, as far as its owner's node is concerned."""

    SERVING = "serving"
    HANDING_OVER = "handing_over"  # frozen until the directory says who owns it
    DORMANT = "dormant"  # its rows lie in the store until it is used
    ELSEWHERE = "elsewhere"  # another node owns it


@dataclass(frozen=True, slots=True)
class SessionView:
    """One session and who owns it.

    Attributes:
        session_id: Its name.
        owner: The node, or the store, that owns it.
        standing: What it does.
        position: Tokens that stand in its planes; 0 where another node has them.
        tokens: Tokens known.
        context_epoch: How often its context was rebuilt.
    """

    session_id: str
    owner: str
    standing: Standing
    position: int = 0
    tokens: int = 0
    context_epoch: int = 0


class Direction(enum.Enum):
    """Which way a session or copy goes, seen from this node."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class MoveView:
    """One move or copy under way.

    Attributes:
        session_id: What moves.
        direction: Which way.
        peer: The other node.
        copy: Whether the other node gets a session of its own.
        step: The state of its table, in its own word.
        done_bytes: Payload sent or received.
        total_bytes: Payload in all, as known now.
        bytes_per_s: Of the last seconds; 0 where nothing moved yet.
        elapsed_s: Since it began.
    """

    session_id: str
    direction: Direction
    peer: str
    copy: bool
    step: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds until all bytes are over, at the present rate; None where nobody can say."""
        left = max(0, self.total_bytes - self.done_bytes)
        if left and self.bytes_per_s <= 0:
            return None
        return left / self.bytes_per_s if left else 0.0


@dataclass(frozen=True, slots=True)
class EndedMove:
    """A move or copy that has ended.

    Attributes:
        session_id: What was to move.
        direction: Which way.
        peer: The other node.
        copy: Whether it was a copy.
        reason: Empty where it came about; else the stable word of what ended it.
        payload_bytes: Sent or received.
        took_s: From begin to end.
        pause_s: Without a token for the user; None where this node cannot know.
        at_s: When, on the recorder's clock.
    """

    session_id: str
    direction: Direction
    peer: str
    copy: bool
    reason: str
    payload_bytes: int
    took_s: float
    pause_s: float | None
    at_s: float


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of those that this one knows.

    Attributes:
        name: From its certificate.
        is_self: This one.
        lease_left_s: As the directory sees it; None where it does not say.
        sessions: Sessions that it owns, by the directory; None where it does not say.
        address: Where it was reached last; empty where not known.
    """

    name: str
    is_self: bool
    lease_left_s: float | None = None
    sessions: int | None = None
    address: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that was asked for and not done: its stable word, and when."""

    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Everything that is shown of one node at one moment.

    Attributes:
        node: Its name.
        model: The model folder's name; empty while it loads.
        encoding: Of the rows.
        version: Of this program.
        health: Whether it answers.
        why: What made it unhealthy, if it is.
        started_at_s: When it began, seconds since 1970.
        uptime_s: Since then, on a clock that nobody sets.
        lease: Its lease; None where it holds none.
        memory: What rows take.
        floor: Slots and queue.
        counts: What the slots did so far. Not a copy: it goes on.
        tokens_per_s: Generated lately.
        ladder: What is kept for reuse.
        accounts: What the ladder did so far. Not a copy: it goes on.
        remote: What remote prefill came to; None where it is off.
        economy: What kept rows cost and save, as measured; None where none are kept.
        sessions: Those of this node first; at most ``SESSIONS_SHOWN``.
        sessions_owned: Of this node, shown or not.
        sessions_max: What it may own.
        nodes: This one first.
        moves: Under way.
    """

    node: str
    model: str
    encoding: str
    version: str
    health: HealthState
    why: str
    started_at_s: float
    uptime_s: float
    lease: LeaseView | None
    memory: MemoryShape | None
    floor: FloorView = NO_FLOOR
    counts: Counts = field(default_factory=Counts)
    tokens_per_s: float = 0.0
    ladder: LadderView = LadderView()
    accounts: Accounts = field(default_factory=Accounts)
    remote: RemoteCounts | None = None
    economy: Economy | None = None
    sessions: tuple[SessionView, ...] = ()
    sessions_owned: int = 0
    sessions_max: int = 0
    nodes: tuple[NodeView, ...] = ()
    moves: tuple[MoveView, ...] = ()

    def positions(self) -> list[int]:
        """Tokens in the planes of every session and slot that holds rows here."""
        held = [session.position for session in self.sessions if _holds_rows(session)]
        slots = [
            slot.computed_tokens
            for slot in self.floor.slots
            if slot.computed_tokens and not slot.in_session
        ]
        return held + slots


def _holds_rows(session: SessionView) -> bool:
    here = session.standing in (Standing.SERVING, Standing.HANDING_OVER)
    return here and session.position > 0
