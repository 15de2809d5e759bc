"""What this node's moves do, as they do it: how far, how fast, and how they ended."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from kvpack.errors import AuthenticationError, FormatError, KvpackError
from kvpack.layout import CacheLayout, LayerKind
from node.metrics.recorder import Recorder
from node.metrics.views import MOVES_SHOWN, Direction, EndedMove, MoveView
from node.migration.inbound import Inbound
from node.migration.orders import Moved, Order, Progress
from node.migration.table import TargetState

#: The time over which a move's speed is taken, in seconds.
SPEED_S: Final = 5.0

#: Moves that are followed at once: more than can be under way, so none is lost by accident.
FOLLOWED_MAX: Final = 128


class Speed:
    """Bytes per second over the last seconds, from a count that is looked at now and then."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=64)

    def look(self, now_s: float, count: int) -> float:
        """Note ``count``; gives the speed up to now."""
        self._seen.append((now_s, count))
        while len(self._seen) > 2 and self._seen[0][0] < now_s - SPEED_S:
            self._seen.popleft()
        first_s, first = self._seen[0]
        return max(0, count - first) / (now_s - first_s) if now_s > first_s else 0.0


@dataclass(slots=True)
class _Given:
    """One move that this node makes."""

    session_id: str
    order: Order
    begun_s: float
    progress: Progress | None = None
    speed: Speed = field(default_factory=Speed)

    def view(self, now_s: float) -> MoveView:
        progress = self.progress or Progress("preparing", 0, 0, 0, 0)
        return MoveView(
            self.session_id, Direction.OUT, self.order.target, bool(self.order.copy_as),
            progress.step, progress.sent_payload_bytes, progress.total_payload_bytes,
            self.speed.look(now_s, progress.sent_payload_bytes), now_s - self.begun_s,
        )  # fmt: skip


@dataclass(slots=True)
class _Taken:
    """One transfer into this node, as it was when it was looked at last."""

    first_seen_s: float
    speed: Speed = field(default_factory=Speed)


class MoveLog:
    """Follows moves given away and transfers taken; a :class:`node.migration.watch.MoveWatch`.

    Args:
        recorder: Counts those that ended.
        under_way: Transfers into this node that have not ended.
        layout: Shape of the rows.
        clock_s: Monotonic.
    """

    def __init__(
        self,
        recorder: Recorder,
        under_way: Callable[[], Iterable[Inbound]],
        layout: CacheLayout,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorder = recorder
        self._under_way = under_way
        self._layout = layout
        self._clock_s = clock_s
        self._numbers = itertools.count(1)
        self._given: dict[int, _Given] = {}
        self._taken: dict[str, _Taken] = {}

    def views(self) -> tuple[MoveView, ...]:
        """Every move under way, those given away first."""
        now_s = self._clock_s()
        given = [one.view(now_s) for one in self._given.values()]
        inbound = list(self._under_way())
        alive = {str(one.offer.key) for one in inbound}
        for key in self._taken.keys() - alive:
            del self._taken[key]
        return (*given, *(self._view(one, now_s) for one in inbound))[:MOVES_SHOWN]

    def begun(self, session_id: str, order: Order) -> int:
        """A move given away has begun."""
        number = next(self._numbers)
        if len(self._given) < FOLLOWED_MAX:
            self._given[number] = _Given(session_id, order, self._clock_s())
        return number

    def progressed(self, number: int, progress: Progress) -> None:
        """It came so far."""
        given = self._given.get(number)
        if given is not None:
            given.progress = progress
            given.speed.look(self._clock_s(), progress.sent_payload_bytes)

    def ended(self, number: int, outcome: Moved | KvpackError | None) -> None:
        """It came about, or why not."""
        given = self._given.pop(number, None)
        if given is None:
            return
        now_s, copy = self._clock_s(), bool(given.order.copy_as)
        sent = given.progress.sent_payload_bytes if given.progress else 0
        pause_s: float | None = None
        reason = ""
        if isinstance(outcome, Moved):
            sent = outcome.timeline.payload_bytes
            pause_s = None if copy else outcome.timeline.exposed_handover_s
            self._recorder.timed(outcome.timeline, outcome.wire_bytes, copy=copy)
        else:
            reason = "stopped" if outcome is None else _reason_of(outcome)
        self._recorder.move_ended(
            EndedMove(
                given.session_id, Direction.OUT, given.order.target, copy, reason, sent,
                now_s - given.begun_s, pause_s, now_s,
            )
        )  # fmt: skip

    def arrived(self, inbound: Inbound) -> None:
        """A transfer into this node has ended."""
        now_s, offer = self._clock_s(), inbound.offer
        seen = self._taken.pop(str(offer.key), None)
        reason = ""
        if inbound.state is not TargetState.COMMITTED:
            reason = "aborted" if inbound.failure is None else inbound.failure.reason
        if isinstance(inbound.failure, AuthenticationError | FormatError):
            self._recorder.verify_failed("transfer")
        self._recorder.move_ended(
            EndedMove(
                offer.session_id, Direction.IN, offer.key.source, offer.copy, reason,
                inbound.receiver.object_bytes, now_s - (seen.first_seen_s if seen else now_s),
                None, now_s,
            )
        )  # fmt: skip

    def _view(self, inbound: Inbound, now_s: float) -> MoveView:
        offer = inbound.offer
        taken = self._taken.setdefault(str(offer.key), _Taken(now_s))
        done, position = inbound.receiver.object_bytes, offer.position
        total = sum(self._layout.state_bytes(kind, position) for kind in LayerKind)
        return MoveView(
            offer.session_id, Direction.IN, offer.key.source, offer.copy, inbound.state.value,
            done, max(done, total), taken.speed.look(now_s, done), now_s - taken.first_seen_s,
        )  # fmt: skip


def _reason_of(error: KvpackError) -> str:
    """The word of what lies below "the move did not come about"."""
    cause = error.__cause__
    return cause.reason if isinstance(cause, KvpackError) else error.reason
