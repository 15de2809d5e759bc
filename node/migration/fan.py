"""One producer, several targets: every chunk is read and sealed once and sent to each of them.

A short window of sealed chunks lies between the producer and the streams. A stream that has never
broken holds the window: nothing is made that would push a chunk out which it has not taken. So the
slowest target sets the pace, for as long as its writes return at all; then its stream ends.

A stream that was opened again holds nobody up. It takes from the window what is there, and has
made once more what is not; the same bytes come of it. Only where no other stream is left does the
producer make what such a stream waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from node.migration.feed import STREAM_S, Feed
from node.migration.producer import QUEUE_TILES, Producer
from node.migration.sealing import Loaded, Sealed
from node.migration.timeline import Timeline
from node.migration.wire import MigrationStub
from node.pb.v1 import migration_pb2 as pb

#: Sealed chunks that wait for the slowest target, about 2 MiB each.
WINDOW_CHUNKS: Final = 4

#: How long the first target to answer waits for the others to. One that comes later is sent what
#: it missed like one whose link broke.
START_S: Final = 2.0


@dataclass(slots=True, eq=False)
class Seat:
    """One target's place at the window.

    Attributes:
        expected: Its stream has not begun, and nobody knows yet that it will not.
        holds: Its stream never broke: the window waits for it.
        open: A stream of it is open.
        next: Item that it takes next.
        left: Items that have left for it.
    """

    expected: bool = True
    holds: bool = True
    open: bool = False
    next: int = 0
    left: int = 0


class Fan:
    """The window between one producer and the streams of its targets.

    Used as a context manager: at its end nothing is produced any more, so its streams end before.

    Args:
        producer: Makes what is sent, once.
        seats: How many targets there are; none of them is left behind at the start.
    """

    def __init__(self, producer: Producer, seats: int) -> None:
        self._producer = producer
        self._window: deque[Sealed] = deque()
        self._made = 0
        self._whole = False
        self._queue: asyncio.Queue[Loaded | None] = asyncio.Queue(QUEUE_TILES)
        self._left = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.seats = tuple(Seat() for _ in range(seats))

    async def __aenter__(self) -> Fan:
        self._task = asyncio.create_task(self._produce())
        self._task.add_done_callback(lambda _: self._changed.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            # What ended it was raised in every stream that asked.
            self._failure()

    def leave(self, seat: Seat) -> None:
        """No stream of ``seat`` will be opened any more: nobody waits for it."""
        seat.expected = seat.holds = False
        self._note_left()
        self._changed.set()

    @contextlib.contextmanager
    def stream(self, seat: Seat, index: int) -> Iterator[None]:
        """A stream of ``seat`` from item ``index`` on."""
        seat.expected, seat.open, seat.next, seat.left = False, True, index, index
        self._changed.set()
        try:
            yield
        finally:
            # A second stream of the same target is one that broke.
            seat.holds = seat.open = False
            self._note_left()
            self._changed.set()

    def left(self, seat: Seat) -> None:
        """What ``seat`` took next has left for its target."""
        seat.left += 1
        self._note_left()

    def _note_left(self) -> None:
        """Tell the producer what has left for every target whose stream never broke."""
        left = min((seat.left for seat in self.seats if seat.holds), default=self._made)
        for _ in range(self._left, min(left, self._made)):
            self._left += 1
            self._queue.task_done()

    async def take(self, seat: Seat) -> Sealed | None:
        """The next chunk for ``seat``; None after the last one.

        Raises:
            KvpackError: What ended the producer.
        """
        index = seat.next
        await self._until(lambda: index < self._made or self._whole)
        if index >= self._made:
            return None
        first = self._made - len(self._window)
        inside = index >= first
        sealed = self._window[index - first] if inside else await self._producer.sealed_again(index)
        seat.next = index + 1
        self._changed.set()
        return sealed

    async def finished(self) -> None:
        """Wait for the boundary call.

        Raises:
            KvpackError: What ended the producer.
        """
        await self._until(lambda: self._task is not None and self._task.done())

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(STREAM_S):
            while not holds():
                failure = self._failure()
                if failure is not None:
                    raise failure
                self._changed.clear()
                await self._changed.wait()
        failure = self._failure()
        if failure is not None:
            raise failure

    def _failure(self) -> BaseException | None:
        task = self._task
        if task is None or not task.done() or task.cancelled():
            return None
        return task.exception()

    async def _produce(self) -> None:
        await self._start()
        publisher = asyncio.ensure_future(self._publish())
        try:
            await self._producer.fill(0, self._queue, publisher)
            await publisher
        finally:
            publisher.cancel()
            await asyncio.wait({publisher})

    async def _start(self) -> None:
        """Wait until it is known who takes part; what is made before would be made twice."""

        def all_known() -> bool:
            return not any(seat.expected for seat in self.seats)

        await self._until(lambda: any(seat.open for seat in self.seats))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._until(all_known)
        for seat in self.seats:
            if seat.expected:
                seat.expected = seat.holds = False

    async def _publish(self) -> None:
        sealing = self._producer.sealing(self._queue)
        while (sealed := await sealing.take()) is not None:
            await self._until(lambda: self._wanted(self._made))
            self._window.append(sealed)
            if len(self._window) > WINDOW_CHUNKS:
                self._window.popleft()
            self._made += 1
            self._note_left()
            self._changed.set()
        self._whole = True
        self._changed.set()

    def _wanted(self, index: int) -> bool:
        """Whether item ``index`` may push the oldest one out of the window."""
        holding = [seat for seat in self.seats if seat.holds]
        if holding:
            return all(seat.next > index - WINDOW_CHUNKS for seat in holding)
        return any(seat.open and seat.next == index for seat in self.seats)


class SharedFeed(Feed):
    """The stream to one target of several.

    Args:
        fan: Where its chunks come from.
        seat: Its place there.
        producer: The fan's.
        timeline: Told when what was sent to this target.
        report: Called when something has changed that a watcher may want to see.
    """

    def __init__(
        self,
        fan: Fan,
        seat: Seat,
        producer: Producer,
        timeline: Timeline,
        report: Callable[[], None],
    ) -> None:
        super().__init__(producer, timeline, report)
        self._fan = fan
        self._seat = seat

    async def _stream(self, stub: MigrationStub, transfer: pb.TransferRef, peer: str) -> None:
        self._left = functools.partial(self._fan.left, self._seat)
        with self._fan.stream(self._seat, len(self._references)):

            async def take() -> Sealed | None:
                return await self._fan.take(self._seat)

            await self._push(stub, transfer, take, peer)
        await self._fan.finished()
