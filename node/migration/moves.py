"""The moves that this node makes: each one a task of its own, watched by whoever asked for it.

A client that hangs up stops watching; the move goes on. An ownership that is half handed over is
not a thing to drop because somebody closed a terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvpack.chunk import Codec
from kvpack.errors import KvpackError, LimitError
from kvpack.limits import check_range
from node.binding import PackBinding
from node.directory import OwnershipToken
from node.errors import SessionFrozenError, SessionStateError
from node.migration.fan import Fan, SharedFeed
from node.migration.feed import Feed
from node.migration.orders import Moved, Order, Progress, Source
from node.migration.producer import Producer
from node.migration.source import Move
from node.migration.tape import Tape
from node.migration.turns import ProducerInTurn, Turns
from node.migration.watch import MoveWatch, Unwatched, watched
from node.session import Session
from node.transient import PREFIX, is_transient

log = logging.getLogger(__name__)

#: Progress that nobody reads is dropped, not kept.
EVENTS_MAX: Final = 64

#: How long a live session is waited for before more of it is sent instead.
FREEZE_WAIT_S: Final = 5.0

#: How long a move waits for a turn that is being made, which it would undo under a reader's eyes.
#: Half the time after which a target gives a transfer up that does not come on.
TURN_WAIT_S: Final = 30.0

_TURN_LOOK_S: Final = 0.02

#: How long a stopping node waits for its moves to end by themselves.
STOP_S: Final = 10.0


#: Targets of one fan-out. Each may take two chunks out of the window and a third is on its way.
TARGETS_MAX: Final = 8

_E = TypeVar("_E")


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the copies of one session go: one order for each, and a name of its own in each."""

    orders: tuple[Order, ...]

    def __post_init__(self) -> None:
        check_range("targets", len(self.orders), 1, TARGETS_MAX, "targets")
        names = [order.copy_as for order in self.orders]
        if not all(names) or len(set(names)) != len(names):
            raise LimitError("targets.copy_as", "a name of its own for each copy", names)

    @property
    def compress(self) -> bool:
        """Whether rows are compressed: each chunk is sealed once, so for all or for none."""
        return any(order.compress for order in self.orders)


@dataclass(frozen=True, slots=True)
class NotMoved:
    """A copy that did not come about, and why."""

    order: Order
    error: KvpackError


@dataclass(frozen=True, slots=True)
class OfTarget:
    """What happened to one target of several; ``number`` is its place among the orders."""

    number: int
    event: Progress | Moved | NotMoved


class Moves:
    """Starts moves and keeps them until they have ended.

    Attributes:
        watch: Told of each move and copy.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.watch: MoveWatch = Unwatched()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._under_way: dict[str, Move | None] = {}
        self._turns = Turns()

    @property
    def source(self) -> Source:
        """What every move of this node needs."""
        return self._source

    @property
    def binding(self) -> PackBinding:
        """What this node's packs are bound to."""
        return self._source.binding

    @property
    def under_way(self) -> tuple[str, ...]:
        """Sessions that are being moved."""
        return tuple(sorted(self._under_way))

    async def start(
        self,
        session_id: str,
        token: OwnershipToken,
        token_ids: Sequence[int],
        order: Order,
    ) -> AsyncGenerator[Progress | Moved, None]:
        """Append ``token_ids``, move the session, and tell how it goes; the last event is Moved.

        Raises:
            TransferFailedError: The move did not come about; the session serves here.
            SessionStateError: There is nothing to move.
        """
        events: asyncio.Queue[Progress] = asyncio.Queue(EVENTS_MAX)
        task = asyncio.create_task(self._run(session_id, token, token_ids, order, events))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        async for progress in _until_done(task, events):
            yield progress
        yield task.result()

    async def lend(
        self, session_id: str, token_ids: Sequence[int], order: Order
    ) -> AsyncGenerator[Progress | Moved, None]:
        """Compute a prompt in a session that exists for one copy, and send it; last comes Moved.

        Nothing is handed over that could be lost, so whoever stops listening ends it.

        Raises:
            LimitError: A name that is not one of such a session.
            SessionExistsError: The session exists.
            TransferFailedError: The copy did not come about.
        """
        for name in (session_id, order.copy_as):
            if not is_transient(name):
                raise LimitError("session_id", f"a name that begins with {PREFIX}", name)
        events: asyncio.Queue[Progress] = asyncio.Queue(EVENTS_MAX)
        task = asyncio.create_task(self._run_lent(session_id, token_ids, order, events))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            async for progress in _until_done(task, events):
                yield progress
            yield task.result()
        finally:
            task.cancel()

    async def _run_lent(
        self,
        session_id: str,
        token_ids: Sequence[int],
        order: Order,
        events: asyncio.Queue[Progress],
    ) -> Moved:
        sessions = self._source.sessions
        session = await sessions.open(session_id)
        try:
            return await self._run(session_id, session.token, token_ids, order, events)
        finally:
            await sessions.end(session)

    async def fan_out(
        self,
        session_id: str,
        token: OwnershipToken,
        token_ids: Sequence[int],
        targets: Targets,
    ) -> AsyncIterator[OfTarget]:
        """Append ``token_ids`` and copy the session to several targets, each chunk sealed once.

        Every target has its own transfer and its own end. The session is held until the last of
        them has ended. The last events say what became of each, in the order of ``targets``.

        Raises:
            SessionStateError: There is nothing to copy.
        """
        events: asyncio.Queue[OfTarget] = asyncio.Queue(EVENTS_MAX)
        task = asyncio.create_task(self._run_all(session_id, token, token_ids, targets, events))
        self._tasks.add(task)
        task.add_done_callback(self._all_ended)
        async for event in _until_done(task, events):
            yield event
        for number, outcome in enumerate(task.result()):
            yield OfTarget(number, outcome)

    async def close(self) -> None:
        """Wait for the moves under way, then stop those that would not end."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=STOP_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def _run(
        self,
        session_id: str,
        token: OwnershipToken,
        token_ids: Sequence[int],
        order: Order,
        events: asyncio.Queue[Progress],
    ) -> Moved:
        moving = not order.copy_as
        with watched(self.watch, session_id, order) as seen:

            def report(progress: Progress) -> None:
                seen.progressed(progress)
                if not events.full():
                    events.put_nowait(progress)

            async with self._producing(
                session_id, token, token_ids, moving, order.compress
            ) as producer:
                feeding = functools.partial(Feed, producer)
                move = Move(self._source, producer.session, order, feeding, report)
                if moving:
                    self._under_way[session_id] = move
                return seen.ended(await move.run())

    async def _run_all(
        self,
        session_id: str,
        token: OwnershipToken,
        token_ids: Sequence[int],
        targets: Targets,
        events: asyncio.Queue[OfTarget],
    ) -> list[Moved | NotMoved]:
        async with (
            self._producing(session_id, token, token_ids, False, targets.compress) as producer,
            Fan(producer, len(targets.orders)) as fan,
        ):
            copies = [
                asyncio.create_task(self._run_one(producer, fan, number, order, events))
                for number, order in enumerate(targets.orders)
            ]
            try:
                await asyncio.wait(copies)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.wait(copies)
        return [copy.result() for copy in copies]

    async def _run_one(
        self,
        producer: Producer,
        fan: Fan,
        number: int,
        order: Order,
        events: asyncio.Queue[OfTarget],
    ) -> Moved | NotMoved:
        seat = fan.seats[number]
        feeding = functools.partial(SharedFeed, fan, seat, producer)
        try:
            with watched(self.watch, producer.session.session_id, order) as seen:

                def report(progress: Progress) -> None:
                    seen.progressed(progress)
                    if not events.full():
                        events.put_nowait(OfTarget(number, progress))

                move = Move(self._source, producer.session, order, feeding, report)
                return seen.ended(await move.run())
        except KvpackError as error:
            return NotMoved(order, error)
        finally:
            fan.leave(seat)

    @contextlib.asynccontextmanager
    async def _producing(
        self,
        session_id: str,
        token: OwnershipToken,
        token_ids: Sequence[int],
        moving: bool,
        compress: bool,
    ) -> AsyncIterator[Producer]:
        """What makes the chunks of a session: held until the end, or from its freeze on."""
        sessions, engine = self._source.sessions, self._source.engine
        turn_end_s = 0.0
        async with contextlib.AsyncExitStack() as stack:

            async def freeze() -> bool:
                nonlocal turn_end_s
                # From here: what it waited for the wire is not time that an answer had.
                turn_end_s = turn_end_s or time.monotonic() + TURN_WAIT_S
                if moving and not await _turn_made(session, turn_end_s):
                    return False
                try:
                    await stack.enter_async_context(sessions.hold(session_id, token, FREEZE_WAIT_S))
                except SessionFrozenError:
                    return False
                await sessions.work_off(session)
                return True

            session = await sessions.find(session_id)
            live = not token_ids and (session.lock.locked() or session.is_worked_off)
            if live:
                sessions.require_token(session, token)
                stack.enter_context(_pinned(session))
                tape = Tape(self.binding.layout)
            else:
                turn_end_s = time.monotonic() + TURN_WAIT_S
                while moving and not await _turn_made(session, turn_end_s):
                    continue
                await stack.enter_async_context(sessions.hold(session_id, token))
                await engine.call(session.extend, token_ids)
                tape = Tape.known(self.binding.layout, max(1, session.next_index - 1))
            if moving:
                stack.enter_context(self.one_move(session_id))
            if session.next_index < 2:
                raise SessionStateError(
                    f"session {session_id}: {session.next_index} tokens are known; "
                    "a move needs a row and a boundary token"
                )
            codec = Codec.ZSTD_SPLIT if compress else Codec.RAW
            made = (engine, self.binding, session, tape, freeze, codec)
            yield ProducerInTurn(self._turns, *made) if live else Producer(*made)

    def cancel(self, session_id: str, token: OwnershipToken) -> None:
        """End the move of a session that still serves here. Copies end by themselves.

        Raises:
            SessionStateError: No move of it is under way, or its hand-over has begun.
            StaleTokenError: ``token`` is not what this node owns the session by.
        """
        move = self._under_way.get(session_id)
        if move is None:
            raise SessionStateError(f"session {session_id}: no move of it is under way")
        self._source.sessions.require_token(move.session, token)
        move.cancel()

    @contextlib.contextmanager
    def one_move(self, session_id: str) -> Iterator[None]:
        """Be the one move of a session, wherever it goes, while the block runs.

        Raises:
            SessionStateError: Another one is under way.
        """
        if session_id in self._under_way:
            raise SessionStateError(f"session {session_id}: a move of it is under way")
        self._under_way[session_id] = None
        try:
            yield
        finally:
            del self._under_way[session_id]

    def _ended(self, task: asyncio.Task[Moved]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        if task.exception() is not None:
            log.info("a move ended: %s", task.exception())
            return
        _log_moved(task.result())

    def _all_ended(self, task: asyncio.Task[list[Moved | NotMoved]]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        if task.exception() is not None:
            log.info("copies ended: %s", task.exception())
            return
        for outcome in task.result():
            if isinstance(outcome, Moved):
                _log_moved(outcome)
            else:
                log.info("a copy ended: node %s: %s", outcome.order.target, outcome.error)


async def _turn_made(session: Session, end_s: float) -> bool:
    """Wait for a turn that is being made, for as long as a freeze waits; whether it is over.

    After ``end_s`` nobody waits for it any more: its request fails, and has changed nothing.
    """
    look_end_s = time.monotonic() + FREEZE_WAIT_S
    while session.writers and time.monotonic() < end_s:
        if time.monotonic() >= look_end_s:
            return False
        await asyncio.sleep(_TURN_LOOK_S)
    return True


@contextlib.contextmanager
def _pinned(session: Session) -> Iterator[None]:
    """Keep the rows of a session here that is read without being held."""
    session.pinned += 1
    try:
        yield
    finally:
        session.pinned -= 1


async def _until_done(task: asyncio.Task[Any], events: asyncio.Queue[_E]) -> AsyncIterator[_E]:
    """Events until ``task`` has ended and no more are left."""
    while not task.done() or not events.empty():
        waiting = asyncio.ensure_future(events.get())
        try:
            await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                yield waiting.result()
        finally:
            waiting.cancel()


def _log_moved(moved: Moved) -> None:
    times = moved.timeline
    log.info(
        "session %s: on %s, %d tokens, %d B of payload, %d B held there, hidden %.4f, "
        "exposed %.4f s, opened again %d times",
        moved.session_id, moved.order.target, moved.position, times.payload_bytes,
        times.held_bytes, times.hidden_fraction, times.exposed_handover_s, times.resumed,
    )  # fmt: skip
