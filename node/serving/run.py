"""One answer as its reader sees it: events that arrive, and a way to stop it."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from kvpack.errors import KvpackError
from node.serving.order import Finished, Prefilled, RunEvent, RunOrder

#: Events that may wait for their reader. One more is the last one, which needs no reader's pace.
EVENTS_MAX: Final = 64

#: A run that paused goes on when no more than so many wait: not at each event that is read.
EVENTS_RESUME: Final = EVENTS_MAX // 2


class RunState(enum.Enum):
    """Where an answer is."""

    WAITING = "waiting"  # for a slot
    RUNNING = "running"
    ENDED = "ended"


class Run:
    """One answer, from its submission to its end. Belongs to the event loop.

    An asynchronous iterator of :data:`~node.serving.order.RunEvent`, for one reader; the last event
    of a whole answer is :class:`~node.serving.order.Finished`. An answer that ended otherwise gives
    what came before, then raises. As a context manager it is cancelled when the block is left, and
    has left its slot when that returns.

    Attributes:
        order: What was asked.
        state: Where it is.
        submitted_s: When it was submitted, by ``time.monotonic``.
        started_s: When it got a slot; None before.
        first_token_s: When its first token was there; None before.
        error: What ended it; None for a whole answer, and before the end.
    """

    def __init__(self, order: RunOrder, stop: Callable[[Run], None]) -> None:
        self.order = order
        self.state = RunState.WAITING
        self.submitted_s = time.monotonic()
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.error: KvpackError | None = None
        self._stop = stop
        self._events: deque[RunEvent] = deque()
        self._arrived = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._left = asyncio.Event()

    def __repr__(self) -> str:
        return f"Run({self.order!r}, {self.state.value})"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RunEvent:
        """The next event.

        Raises:
            KvpackError: The answer ended otherwise than whole; each call from then on says so.
        """
        while not self._events:
            if self.state is RunState.ENDED:
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if len(self._events) <= EVENTS_RESUME:
            self._drained.set()
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
        # An engine call that is under way is not waited for longer than it takes.
        await self._left.wait()

    def cancel(self) -> None:
        """Stop it, wherever it is. It makes no further call; one under way runs to its end."""
        self._stop(self)

    # What follows is for whoever makes the answer.

    @property
    def is_full(self) -> bool:
        """Whether its reader has to read before it may go on."""
        return len(self._events) >= EVENTS_MAX

    def put(self, event: RunEvent) -> None:
        """Give the reader an event. Of prefill only the newest news waits."""
        newest = self._events[-1] if self._events else None
        if isinstance(event, Prefilled) and isinstance(newest, Prefilled):
            self._events.pop()
        self._events.append(event)
        if self.is_full:
            self._drained.clear()
        self._arrived.set()

    async def drained(self) -> None:
        """Wait until the reader has read so much that it is worth going on.

        A reader that takes one event now and then does not count as one that reads: it would keep
        a slot for ever.
        """
        await self._drained.wait()

    def end(self, finished: Finished | None, error: KvpackError | None = None) -> None:
        """The answer has left its slot: whole, or ended by ``error``. Once."""
        if finished is not None:
            self._events.append(finished)
        self.error = error
        self.state = RunState.ENDED
        self._arrived.set()
        self._left.set()
