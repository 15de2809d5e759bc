"""Where an answer begins: in the slot's context, in a session's, in kept rows, or in none.

And how it gets from there to its boundary token, call by call.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import TornGenerationError
from kvpack.errors import KvpackError
from kvpack.store import HoldKind
from node.economics.values import Prefill
from node.errors import SessionStateError
from node.serving.access import Access, Alone, Owned
from node.serving.order import Fallback, MissReason, Prefilled, Rung, SessionRef
from node.serving.reuse import Base, NoTrail, Trail
from node.serving.run import Run
from node.serving.slots import Held, Slot, SlotState
from node.serving.tools import Tools
from node.stream import Stream

if TYPE_CHECKING:
    from node.session import Session
    from node.sessions import Sessions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """What an answer began from.

    Attributes:
        cached_tokens: Rows that were there.
        rung: Where.
        miss: Why not more.
        restored_bytes: Plaintext brought back for it.
        fallback: Why no producer computed it, where one should have.
    """

    cached_tokens: int = 0
    rung: Rung = Rung.NONE
    miss: MissReason = MissReason.COLD
    restored_bytes: int = 0
    fallback: Fallback = Fallback.NONE


class _Clock:
    """How long the prefill of one stream has taken."""

    __slots__ = ("prefill",)

    def __init__(self) -> None:
        self.prefill: Prefill | None = None

    def note(self, first: int, tokens: int, wall_s: float, engine_s: float) -> None:
        """One call. One that does not go on where the last one ended begins anew."""
        so_far = self.prefill
        if so_far is not None and so_far.first + so_far.computed_tokens == first:
            first, tokens = so_far.first, so_far.computed_tokens + tokens
            wall_s, engine_s = so_far.wall_s + wall_s, so_far.engine_s + engine_s
        self.prefill = Prefill(first, tokens, wall_s, engine_s)


def _timed(stream: Stream, call_tokens: int) -> float:
    """One prefill call; the seconds that it took. Runs on the engine's thread."""
    began = time.perf_counter()
    stream.prefill_next(call_tokens)
    return time.perf_counter() - began


class Opening:
    """The beginning of one answer in one slot.

    Attributes:
        start: What it began from.
        trail: Who takes the cuts of its stream.
    """

    def __init__(self, tools: Tools, run: Run, slot: Slot) -> None:
        self.start = Start()
        self.trail: Trail = NoTrail()
        self._tools = tools
        self._run = run
        self._order = run.order
        self._slot = slot
        self._pinned: Session | None = None
        self._clock = _Clock()

    async def begin(self) -> Access:
        """Find the stream that the answer is made in; it knows the whole context on return.

        Raises:
            KvpackError: It is a session's, and this node does not own that, or it does not fit.
        """
        ref = self._order.session
        if ref is None:
            access: Access = Alone(await self._own_stream())
        elif ref.rebuild:
            access = await self._rebuilt(ref)
        else:
            access = await self._session(ref)
        self._tell(self.start.cached_tokens)
        return access

    def left(self) -> Held | None:
        """What the slot may hold when the answer is over, however it ended; None: nothing."""
        stream, order = self._slot.stream, self._order
        if stream is None or order.session is not None:
            return None
        held = Held(order.tenant, stream)
        if order.keep and 0 < stream.position < stream.next_index:
            return held
        held.let_go()
        return None

    async def prefill(self, access: Access) -> None:
        """Compute all known tokens but the last."""
        while True:
            async with access.held() as stream:
                if stream.is_worked_off:
                    if self.start.rung is Rung.REMOTE:
                        # Computed elsewhere, up to the end of the prompt: no cut of it is here.
                        await self.trail.cut(HoldKind.PROMPT)
                    return
                size = await self._prefill_call(stream)
                self._tools.counts.prefilled_tokens += size
                spent = self._clock.prefill
                if stream.is_worked_off:
                    # The boundary call overwrites a ring's oldest row: this is the last moment.
                    await self.trail.cut(HoldKind.PROMPT, spent)
                elif self.trail.due(stream.position):
                    await self.trail.cut(HoldKind.CADENCE, spent)
                position = stream.position
            self._tell(position)

    async def _prefill_call(self, stream: Stream) -> int:
        first, began = stream.position, time.perf_counter()
        async with self._tools.call.engine.pace.prefill_turn() as grid_tokens:
            size = stream.backlog_call(grid_tokens)
            engine_s = await self._tools.call(_timed, stream, size)
        self._clock.note(first, size, time.perf_counter() - began, engine_s)
        return size

    def _tell(self, computed: int) -> None:
        self._run.put(Prefilled(computed, len(self._order.token_ids)))

    async def _own_stream(self) -> Stream:
        """The slot's own context, where nothing deeper is kept; else what is."""
        order, slot = self._order, self._slot
        if slot.held is not None and not (
            order.reuse and slot.held.fits(order.tenant, order.token_ids)
        ):
            # Let go before rows are brought back: a slot is the memory of one context.
            slot.hold(None)
        at = 0 if slot.held is None else slot.held.stream.position
        if slot.held is not None and at == len(order.token_ids) - 1:
            # Nothing can be deeper.
            return self._go_on(slot.held)
        base = await self._base(at)
        if slot.held is not None and base.position <= at:
            return self._go_on(slot.held)
        slot.hold(None)
        slot.stream = self._stream_from(base)
        self._follow(slot.stream, base)
        return slot.stream

    def _go_on(self, held: Held) -> Stream:
        """In the context that the slot holds."""
        self._slot.take_held()
        self.start = Start(
            held.stream.position, Rung.CURRENT, MissReason.NONE, fallback=self.start.fallback
        )
        self._slot.stream = held.stream
        held.stream.turn_to(self._order.token_ids, self._order.decoding)
        self._follow(held.stream, None)
        return held.stream

    async def _base(self, above: int) -> Base:
        """The deepest kept state, counted. Whatever is wrong with what is kept is a miss."""
        order, tools = self._order, self._tools
        try:
            base = await tools.ladder.begin(
                order.tenant, order.token_ids, reuse=order.reuse, above=above
            )
        except TornGenerationError:
            raise
        except KvpackError as error:
            log.warning("kept rows were not brought back: %s", error.reason)
            model = tools.call.engine.model
            base = Base(await tools.call(model.new_generation), miss=MissReason.DAMAGED)
        tools.counts.restored_bytes += base.restored_bytes
        self.start = Start(
            base.position, base.rung, self._why(base.miss), base.restored_bytes, base.fallback
        )
        return base

    def _why(self, miss: MissReason) -> MissReason:
        """The reason of a miss: the ladder sees ids alone, not what became of the text."""
        if miss not in (MissReason.COLD, MissReason.INPUT_CHANGED):
            return miss
        if self._order.shifted:
            return MissReason.CONTEXT_SHIFTED
        ref = self._order.session
        # A session that is rebuilt knew another text.
        return miss if ref is None or not ref.rebuild else MissReason.INPUT_CHANGED

    def _stream_from(self, base: Base) -> Stream:
        order, model = self._order, self._tools.call.engine.model
        return Stream(base.generation, order.token_ids, model.vocab_size, order.decoding)

    def _follow(self, stream: Stream, base: Base | None) -> None:
        """Take cuts of ``stream``, if any are wanted."""
        if not self._order.keep:
            return
        if stream.trail is None:
            stream.trail = self._tools.ladder.trail(self._order.tenant, stream, base)
        self.trail = stream.trail

    async def _session(self, ref: SessionRef) -> Access:
        """A session that goes on; a new one begins from what is kept."""
        owned, order = Owned(self._sessions(), ref), self._order
        async with owned.held() as session:
            self._pin(session)
            is_new = session.next_index == 0
        base = await self._base(0) if is_new else None
        async with owned.held() as session:
            call = self._tools.call
            if base is not None and base.position:
                await call(session.begin_from, base.generation, order.token_ids[: base.position])
            base = base or self._woken(session)
            await call(session.go_on, order.token_ids)
            session.decoding = order.decoding
            self._follow(session, base)
        self._slot.stream = session
        return owned

    def _woken(self, session: Session) -> Base | None:
        """What the session was brought back from for this answer; None: it was live."""
        base, session.woken = session.woken, None
        if base is None:
            self.start = Start(session.position, Rung.CURRENT, MissReason.NONE)
        else:
            self.start = Start(session.position, base.rung, base.miss, base.restored_bytes)
        return base

    def _pin(self, session: Session) -> None:
        """Keep its rows in memory until the answer is over."""
        session.pinned += 1
        self._pinned = session

    def unpin(self) -> None:
        """The answer is over."""
        if self._pinned is not None:
            self._pinned.pinned -= 1
            self._pinned = None

    async def _rebuilt(self, ref: SessionRef) -> Access:
        """A session in a context that is computed beside it and then swapped in."""
        owned = Owned(self._sessions(), ref)
        # Who does not own it may not make this node compute anything.
        async with owned.held() as session:
            self._pin(session)
        base = await self._base(0)
        staged = self._stream_from(base)
        self._follow(staged, base)
        self._slot.state = SlotState.PREFILL
        with contextlib.ExitStack() as unless_swapped:
            unless_swapped.callback(Held(self._order.tenant, staged).let_go)
            await self.prefill(Alone(staged))
            async with owned.held() as session:
                replaced = session.trail
                try:
                    await self._tools.call(session.rebuild, staged)
                finally:
                    # Whoever asked may have gone meanwhile: what was swapped in stays.
                    if session.generation is staged.generation:
                        unless_swapped.pop_all()
                        self._swapped(replaced)
        self._slot.stream = session
        return owned

    def _swapped(self, replaced: Trail | None) -> None:
        """The session stands in its new context."""
        if replaced is not None:
            replaced.end()
        self._tools.counts.rebuilds += 1
        self._tools.staged(self._run)

    def _sessions(self) -> Sessions:
        if self._tools.sessions is None:
            raise SessionStateError("this node has no sessions")
        return self._tools.sessions
