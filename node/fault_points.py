"""Named places of a move where a test may end, pause or fail this very process.

In a process that serves, :func:`reach` does nothing. It does something only where two things came
together: the hidden option ``kvnode serve --fault-points``, and an order in the environment
(:func:`node.config.fault_order`). Neither one alone arms anything, so no environment that a service
happens to inherit can.

An order is ``POINT[:N]=ACTION``, for the N-th time that the point is reached (the first, if not
said). ``@FILE`` instead reads the order from a file each time a point is reached, so that one
process may be given one order after another; every point reached is then noted in ``FILE.trace``.
"""

from __future__ import annotations

import enum
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.errors import NodeError, UsageError

#: Every point of a move: what the giving end reaches, then what the taking end does.
POINTS: Final = (
    "source.prepare.before",
    "source.prepare.after",
    "source.chunk.sent",
    "source.frozen",
    "source.seal.before",
    "source.seal.after",
    "source.commit.before",
    "source.commit.after",
    "source.owner.before",
    "source.owner.after",
    "source.raise.before",
    "source.raise.after",
    "source.thaw.before",
    "source.abort.before",
    "source.release.before",
    "source.release.after",
    "target.reserve.after",
    "target.claim.after",
    "target.chunk.taken",
    "target.gate.after",
    "target.probe.after",
    "target.spool.flushed",
    "target.link.before",
    "target.link.after",
    "target.cas.before",
    "target.cas.after",
    "target.swap.before",
    "target.record.after",
    "target.discard.dropped",
    "target.settle.recorded",
    "target.reload.begun",
    "target.reload.taken",
    "target.restore.raised",
)

#: Of a session's way into a store, and out of one, where the points of ``target`` are passed, too.
PARK_POINTS: Final = (
    "park.opened.after",
    "park.chunk.added",
    "park.flush.after",
    "park.publish.before",
    "park.publish.after",
    "park.put.before",
    "park.put.after",
    "park.cas.after",
    "park.owner.after",
    "park.release.before",
    "park.release.after",
    "restore.found.after",
    "restore.piece.read",
    "restore.seal.before",
    "restore.commit.before",
    "restore.commit.after",
    "restore.drop.before",
    "restore.drop.after",
)

_ORDER: Final = re.compile(r"([a-z.]+)(?::([1-9][0-9]{0,5}))?=(kill|stop|raise|exit)")

#: What a process that was told to exit at a point exits with.
EXIT_CODE: Final = 70


class FaultError(NodeError):
    """A point was reached at which this process was told to fail."""

    reason = "fault_point"


class FaultAction(enum.Enum):
    """What happens at a point."""

    KILL = "kill"  # SIGKILL: nothing runs after it
    STOP = "stop"  # SIGSTOP, until somebody sends SIGCONT
    RAISE = "raise"  # a FaultError
    EXIT = "exit"  # the process ends without any cleaning up


@dataclass(frozen=True, slots=True)
class FaultOrder:
    """What is to happen where.

    Raises:
        UsageError: There is no such point, or it is never reached so often.
    """

    point: str
    nth: int
    action: FaultAction

    @classmethod
    def parse(cls, text: str) -> FaultOrder:
        """Read ``POINT[:N]=ACTION``.

        Raises:
            UsageError: It is written otherwise, or there is no such point.
        """
        found = _ORDER.fullmatch(text)
        if found is None:
            raise UsageError(f"fault order {text!r}: expected POINT[:N]=kill|stop|raise|exit")
        return cls(found[1], int(found[2] or "1"), FaultAction(found[3]))

    def __post_init__(self) -> None:
        if self.point not in POINTS and self.point not in PARK_POINTS:
            raise UsageError(f"fault point {self.point!r}: there is none of that name")
        if self.nth < 1:
            raise UsageError(f"fault point {self.point}: expected a count of at least 1")

    def __str__(self) -> str:
        return f"{self.point}:{self.nth}={self.action.value}"


class _Once:
    """One order, carried out once."""

    def __init__(self, order: FaultOrder) -> None:
        self._order = order
        self._reached = 0

    def __call__(self, point: str) -> None:
        if point == self._order.point:
            self._reached += 1
            if self._reached == self._order.nth:
                _act(self._order)


class _Followed:
    """The order in a file, as it stands now. Each time the file is written it is a new one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trace = path.with_name(path.name + ".trace")
        self._seen: tuple[int, str] = (0, "")
        self._once: Callable[[str], None] = _nothing

    def __call__(self, point: str) -> None:
        with self._trace.open("a") as trace:
            trace.write(f"{point}\n")
        found = (self._path.stat().st_mtime_ns, self._path.read_text().strip())
        if found != self._seen:
            self._seen = found
            self._once = _Once(FaultOrder.parse(found[1])) if found[1] else _nothing
        self._once(point)


def _act(order: FaultOrder) -> None:
    if order.action is FaultAction.RAISE:
        raise FaultError(f"told to fail at {order.point}")
    if order.action is FaultAction.EXIT:
        os._exit(EXIT_CODE)
    stop = order.action is FaultAction.STOP
    os.kill(os.getpid(), signal.SIGSTOP if stop else signal.SIGKILL)


def _nothing(point: str) -> None:
    """What reaching a point does in a process that serves."""


#: Called at every point with its name. Replaced by :func:`arm` alone.
reach: Callable[[str], None] = _nothing


def arm(order: str) -> None:
    """Carry out ``order`` in this process; an empty one arms nothing.

    Raises:
        UsageError: It is no order, or names no point.
    """
    global reach
    if order.startswith("@"):
        reach = _Followed(Path(order[1:]))
    elif order:
        reach = _Once(FaultOrder.parse(order))
