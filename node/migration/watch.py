"""Who wants to know of moves: told what goes on, and asked nothing. Serving hangs on no watcher."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from kvpack.errors import KvpackError
from node.migration.inbound import Inbound
from node.migration.orders import Moved, Order, Progress


class MoveWatch(Protocol):
    """What is told of every move and copy of a node. Called on the loop; must be quick."""

    def begun(self, session_id: str, order: Order) -> int:
        """A move given away has begun. Gives the number by which it is told of further."""
        ...

    def progressed(self, number: int, progress: Progress) -> None:
        """It came so far."""
        ...

    def ended(self, number: int, outcome: Moved | KvpackError | None) -> None:
        """It came about, or why not; None: this node stopped."""
        ...

    def arrived(self, inbound: Inbound) -> None:
        """A transfer into this node has ended, well or not."""
        ...


class Unwatched:
    """Nobody wants to know."""

    def begun(self, session_id: str, order: Order) -> int:
        """Nothing is kept."""
        return 0

    def progressed(self, number: int, progress: Progress) -> None:
        """Nothing is kept."""

    def ended(self, number: int, outcome: Moved | KvpackError | None) -> None:
        """Nothing is kept."""

    def arrived(self, inbound: Inbound) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class Seen:
    """One move as its watcher sees it. ``outcome`` stays None where this node stopped it."""

    watch: MoveWatch
    number: int
    outcome: Moved | KvpackError | None = None

    def progressed(self, progress: Progress) -> None:
        """It came so far."""
        self.watch.progressed(self.number, progress)

    def ended(self, moved: Moved) -> Moved:
        """It came about. Gives ``moved`` back."""
        self.outcome = moved
        return moved


@contextlib.contextmanager
def watched(watch: MoveWatch, session_id: str, order: Order) -> Iterator[Seen]:
    """Tell ``watch`` of one move: that it began, how far it is, and what came of it."""
    seen = Seen(watch, watch.begun(session_id, order))
    try:
        yield seen
    except KvpackError as error:
        seen.outcome = error
        raise
    finally:
        watch.ended(seen.number, seen.outcome)
