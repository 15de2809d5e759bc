"""The floor: takes orders, gives each a slot, and loses none of either.

An order waits in line until a slot is free. In the slot its course runs as one task; when that
task is over, however it ended, one function frees the slot, says so to the reader, counts, and
lets the next order in. No other place does any of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from engine.errors import ContextLimitError
from kvpack.errors import KvpackError, LimitError
from kvpack.limits import check_range
from node.errors import (
    DrainingError,
    NodeError,
    OverloadedError,
    RunCancelledError,
    SessionFrozenError,
    SessionStateError,
    StagingBusyError,
    StalledReaderError,
)
from node.serving.calls import EngineCalls
from node.serving.counts import Counts
from node.serving.course import Course
from node.serving.health import Health, HealthState, leaves_uncertain
from node.serving.order import Finished, RunOrder
from node.serving.reuse import Ladder
from node.serving.run import Run, RunState
from node.serving.slots import Held, Slot, Slots, SlotState
from node.serving.tools import Tools
from node.serving.view import FloorView, SlotView
from node.serving.waiting import WaitingLine
from node.unexpected import unexpected

if TYPE_CHECKING:
    from node.engine_thread import EngineThread
    from node.sessions import Sessions

log = logging.getLogger(__name__)

#: Slots of a node that was told nothing else.
SLOTS_DEFAULT: Final = 2

#: Orders without a slot, beyond which more are sent away.
WAITING_MAX: Final = 64

#: How long an answer that nobody reads keeps its slot, in seconds.
STALL_S: Final = 10.0

#: What the first answer is taken to last, for whoever is sent away before one ended, in seconds.
_FIRST_GUESS_S: Final = 2.0

#: What somebody who is sent away may be told to wait, in seconds.
_RETRY_AFTER_S: Final = (1.0, 60.0)


class Floor:
    """All slots of a node. Belongs to the event loop.

    Args:
        engine: Where calls run.
        ladder: Whoever keeps rows; ``NoReuse`` for nobody.
        sessions: The node's sessions; None where it has none.
        slots: Answers made at once, 1 to 4.
        waiting: Orders without a slot, at most.
        stall_s: How long an answer that nobody reads keeps its slot.
        health: The node's; one of its own by default.

    Attributes:
        health: The node's word.
        counts: What was done so far.

    Raises:
        LimitError: A number is outside its range.
        ModelFolderError: The model's tokens do not stand for bytes of text.
    """

    def __init__(
        self,
        engine: EngineThread,
        ladder: Ladder,
        sessions: Sessions | None = None,
        *,
        slots: int = SLOTS_DEFAULT,
        waiting: int = WAITING_MAX,
        stall_s: float = STALL_S,
        health: Health | None = None,
    ) -> None:
        check_range("waiting", waiting, 1, 1024)
        self.health = health or Health()
        self.counts = Counts()
        self._engine = engine
        self._slots = Slots(slots)
        self._line = WaitingLine(waiting)
        self._tools = Tools(
            EngineCalls(engine), ladder, sessions,
            engine.model.token_bytes(), self.counts, stall_s, self._staged,
        )  # fmt: skip
        self._tasks: dict[Run, asyncio.Task[Finished]] = {}
        self._staging: Run | None = None
        self._in_session: dict[str, Run] = {}
        self._why: dict[Run, KvpackError] = {}
        self._typical_s = _FIRST_GUESS_S
        self._quiet = asyncio.Event()
        self._quiet.set()
        # Of every call: a context that is torn by somebody else says as much about the engine.
        engine.failed = self._call_failed

    def start(self) -> None:
        """Take orders from here on."""
        self.health.ready()

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more orders, let those taken end within ``drain_s`` seconds, end the rest."""
        self.health.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._quiet.wait()
        self._end_all(DrainingError("this node stops"))
        # What is left are engine calls under way, each of a bounded length.
        await self._quiet.wait()
        for slot in self._slots.all:
            slot.hold(None)

    def submit(self, order: RunOrder) -> Run:
        """Take an order on. It waits for a slot, or has one at once.

        Raises:
            LimitError: A token id is outside the vocabulary.
            ContextLimitError: The context has no room for a token more.
            OverloadedError: Too many wait already. Says after how long to come again.
            StagingBusyError: Another context is rebuilt.
            SessionFrozenError: Another answer is made in that session.
            SessionStateError: This node has no sessions.
            DrainingError: The node is about to stop, or has not begun.
            UnhealthyError: An engine call left it in an uncertain state.
        """
        try:
            self.health.require()
            self._require_sound(order)
            self._require_room(order)
        except KvpackError:
            self.counts.refused += 1
            raise
        run = Run(order, self._cancel)
        self.counts.submitted += 1
        self._quiet.clear()
        if order.session is not None:
            self._in_session[order.session.session_id] = run
            if order.session.rebuild:
                self._staging = run
        self._line.push(run)
        self._let_in()
        return run

    def status(self) -> FloorView:
        """What the slots look like now."""
        now_s = time.monotonic()
        return FloorView(
            self.health.state,
            self.health.why,
            tuple(SlotView.of(slot, now_s) for slot in self._slots.all),
            len(self._line),
            self._line.bound,
            self._staging is not None,
        )

    @contextlib.asynccontextmanager
    async def lend(self, index: int) -> AsyncIterator[Slot]:
        """A slot that makes no answer, while the block runs: to save, restore or erase its context.

        ``slot.held`` is that context; ``slot.hold(...)`` puts another, or none, in its place.

        Raises:
            LimitError: There is no such slot.
            OverloadedError: An answer is made in it, or it is lent already.
        """
        check_range("slot", index, 0, len(self._slots.all) - 1)
        slot = self._slots.all[index]
        if not slot.is_free:
            raise OverloadedError(f"slot {index} is in use: {slot.state.value}", 1.0)
        slot.state = SlotState.LENT
        try:
            yield slot
        finally:
            slot.state = SlotState.IDLE
            self._let_in()

    # Who may come in.

    def _require_sound(self, order: RunOrder) -> None:
        model = self._engine.model
        sampler = order.decoding.sampler
        biased = [token for token, _ in sampler.parameters.logit_bias]
        ids = (*order.token_ids, *sampler.history, *biased)
        if max(ids) >= model.vocab_size or min(ids) < 0:
            limit = model.vocab_size - 1
            raise LimitError("token_ids", f"ids of 0 to {limit}", "an id outside")
        limit = model.layout.max_context_tokens
        if len(order.token_ids) >= limit:
            raise ContextLimitError(limit, len(order.token_ids) + 1)

    def _require_room(self, order: RunOrder) -> None:
        ref = order.session
        if ref is not None:
            if self._tools.sessions is None:
                raise SessionStateError("this node has no sessions")
            if ref.session_id in self._in_session:
                raise SessionFrozenError(f"session {ref.session_id}: an answer is made in it")
            if ref.rebuild and self._staging is not None:
                raise StagingBusyError("another context is rebuilt", self._retry_after_s())
        if self._line.is_full:
            raise OverloadedError(
                f"{len(self._line)} answers wait, as many as may", self._retry_after_s()
            )

    def _retry_after_s(self) -> float:
        """When, if answers last as long as they did, about one of the waiting has left the line."""
        least, most = _RETRY_AFTER_S
        guess = self._typical_s * max(1, len(self._line)) / len(self._slots.all)
        return float(math.ceil(min(max(guess, least), most)))

    def _let_in(self) -> None:
        """Give free slots to those who wait longest."""
        while (run := self._line.first) is not None:
            order = run.order
            slot = (
                self._slots.choose(order.tenant, order.token_ids)
                if order.session is None
                else self._slots.choose_any()
            )
            if slot is None:
                return
            self._line.pop()
            self._begin(run, slot)

    def _begin(self, run: Run, slot: Slot) -> None:
        run.state, run.started_s = RunState.RUNNING, time.monotonic()
        slot.run, slot.state = run, SlotState.BEGIN
        course = Course(self._tools, run, slot)
        task = asyncio.create_task(course.answer(), name="answer")
        self._tasks[run] = task
        task.add_done_callback(lambda done: self._over(run, slot, course, done))

    # Who goes out.

    def _over(self, run: Run, slot: Slot, course: Course, task: asyncio.Task[Finished]) -> None:
        """The task of ``run`` has ended. The one place where a slot becomes free."""
        del self._tasks[run]
        finished, error = self._outcome(run, task)
        try:
            self._keep(slot, course.leave())
        finally:
            slot.run, slot.stream, slot.state = None, None, SlotState.IDLE
            self._end(run, finished, error)
            self._let_in()

    def _keep(self, slot: Slot, left: Held | None) -> None:
        """Let the slot hold what its answer left, unless nobody knows what that is."""
        if self.health.state is HealthState.UNHEALTHY:
            if left is not None:
                left.let_go()
            slot.hold(None)
        elif left is not None:
            slot.hold(left)

    def _call_failed(self, error: BaseException) -> None:
        """An engine call ended with ``error``, this floor's or another's."""
        if not leaves_uncertain(error):
            return
        self.health.latch(error)
        self._end_all(self.health.unhealthy())
        for slot in self._slots.all:
            if slot.is_free:
                slot.hold(None)

    def _outcome(
        self, run: Run, task: asyncio.Task[Finished]
    ) -> tuple[Finished | None, KvpackError | None]:
        """What ``run`` came to."""
        if task.cancelled():
            return None, self._why.get(run) or RunCancelledError("the answer was cancelled")
        error = task.exception()
        if error is None:
            return task.result(), None
        if self.health.state is HealthState.UNHEALTHY:
            return None, self.health.unhealthy()
        if isinstance(error, KvpackError):
            return None, error
        # No engine call ended with it. The slot's context is as sound as before.
        log.error("an answer ended with an error of this program: %s", unexpected(error))
        return None, NodeError(f"the answer ended with {type(error).__name__}")

    def _end(self, run: Run, finished: Finished | None, error: KvpackError | None) -> None:
        """Let the reader know, and count. Also for a run that never had a slot."""
        if run.started_s is not None:
            self._typical_s += 0.2 * (time.monotonic() - run.started_s - self._typical_s)
        self._staged(run)
        self._why.pop(run, None)
        if run.order.session is not None:
            self._in_session.pop(run.order.session.session_id, None)
        self._count(error)
        if not self._tasks and not len(self._line):
            self._quiet.set()
        run.end(finished, error)

    def _count(self, error: KvpackError | None) -> None:
        if error is None:
            self.counts.finished += 1
        elif isinstance(error, StalledReaderError):
            self.counts.stalled += 1
        elif isinstance(error, RunCancelledError | DrainingError):
            self.counts.cancelled += 1
        else:
            self.counts.failed += 1

    def _staged(self, run: Run) -> None:
        """``run`` needs the staging generation no more."""
        if self._staging is run:
            self._staging = None

    def _cancel(self, run: Run, why: KvpackError | None = None) -> None:
        """Stop ``run`` wherever it is. One that has ended stays as it ended."""
        task = self._tasks.get(run)
        if task is not None:
            if why is not None:
                self._why.setdefault(run, why)
            task.cancel()
        elif self._line.remove(run):
            self._end(run, None, why or RunCancelledError("the answer was cancelled"))

    def _end_all(self, why: KvpackError) -> None:
        while len(self._line):
            self._end(self._line.pop(), None, why)
        for run in list(self._tasks):
            self._cancel(run, why)
