"""What happens to an answer in its slot: begin, prefill, decode, keep.

All of it is a sequence of engine calls with waits between. Cancelled at any of them it leaves its
stream at a definite position, with tokens and rows in agreement.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import TornGenerationError
from kvpack.errors import KvpackError
from kvpack.store import HoldKind
from node.errors import SessionStateError, StalledReaderError
from node.pace import Decoder
from node.serving.access import Access, Alone, Owned
from node.serving.calls import EngineCalls
from node.serving.counts import Counts
from node.serving.logprobs import token_logprob
from node.serving.order import (
    Fallback,
    Finished,
    FinishReason,
    MissReason,
    Piece,
    Prefilled,
    Rung,
    RunUsage,
    SessionRef,
    TokenLogprob,
)
from node.serving.reuse import Base, Ladder, NoTrail, Trail
from node.serving.run import Run
from node.serving.slots import Held, Slot, SlotState
from node.stream import Decoded, Stream

if TYPE_CHECKING:
    from node.session import Session
    from node.sessions import Sessions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tools:
    """What every answer needs.

    Attributes:
        call: The engine.
        ladder: Whoever keeps rows.
        sessions: The node's sessions; None: this node has none.
        token_bytes: The bytes that a token stands for in text.
        counts: What is counted.
        stall_s: How long an answer that is not read keeps its slot, in seconds.
        staged: Called when a staging generation is needed no more.
    """

    call: EngineCalls
    ladder: Ladder
    sessions: Sessions | None
    token_bytes: Callable[[int], bytes]
    counts: Counts
    stall_s: float
    staged: Callable[[Run], None]


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


class Course:
    """One answer in one slot."""

    def __init__(self, tools: Tools, run: Run, slot: Slot) -> None:
        self._tools = tools
        self._run = run
        self._order = run.order
        self._slot = slot
        self._start = Start()
        self._trail: Trail = NoTrail()
        self._generated = 0
        self._pinned: Session | None = None

    async def answer(self) -> Finished:
        """Make the answer.

        Raises:
            StalledReaderError: Nobody read it.
            KvpackError: A session's state, or the engine's, ended it.
        """
        order = self._order
        if order.session is None:
            access: Access = Alone(await self._own_stream())
        elif order.session.rebuild:
            access = await self._rebuilt(order.session)
        else:
            access = await self._session(order.session)
        self._slot.state = SlotState.PREFILL
        self._tell_prefilled(self._start.cached_tokens)
        await self._prefill(access)
        self._slot.state = SlotState.DECODE
        return await self._decode(access)

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

    # Where it begins.

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
        self._start = Start(
            held.stream.position, Rung.CURRENT, MissReason.NONE, fallback=self._start.fallback
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
        self._start = Start(base.position, base.rung, base.miss, base.restored_bytes, base.fallback)
        return base

    def _stream_from(self, base: Base) -> Stream:
        order, model = self._order, self._tools.call.engine.model
        return Stream(base.generation, order.token_ids, model.vocab_size, order.decoding)

    def _follow(self, stream: Stream, base: Base | None) -> None:
        """Take cuts of ``stream``, if any are wanted."""
        if not self._order.keep:
            return
        if stream.trail is None:
            stream.trail = self._tools.ladder.trail(self._order.tenant, stream, base)
        self._trail = stream.trail

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
            self._start = Start(session.position, Rung.CURRENT, MissReason.NONE)
        else:
            self._start = Start(session.position, base.rung, base.miss, base.restored_bytes)
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
        if self._start.miss in (MissReason.COLD, MissReason.INPUT_CHANGED):
            self._start = dataclasses.replace(self._start, miss=MissReason.CONTEXT_SHIFTED)
        self._follow(staged, base)
        self._slot.state = SlotState.PREFILL
        with contextlib.ExitStack() as unless_swapped:
            unless_swapped.callback(Held(self._order.tenant, staged).let_go)
            await self._prefill(Alone(staged))
            async with owned.held() as session:
                replaced = session.trail
                await self._tools.call(session.rebuild, staged)
                unless_swapped.pop_all()
        self._slot.stream = session
        if replaced is not None:
            replaced.end()
        self._tools.counts.rebuilds += 1
        self._tools.staged(self._run)
        return owned

    def _sessions(self) -> Sessions:
        if self._tools.sessions is None:
            raise SessionStateError("this node has no sessions")
        return self._tools.sessions

    # Prefill.

    async def _prefill(self, access: Access) -> None:
        """Compute all known tokens but the last."""
        while True:
            async with access.held() as stream:
                if stream.is_worked_off:
                    if self._start.rung is Rung.REMOTE:
                        # Computed elsewhere, up to the end of the prompt: no cut of it is here.
                        await self._trail.cut(HoldKind.PROMPT)
                    return
                size = await self._prefill_call(stream)
                self._tools.counts.prefilled_tokens += size
                if stream.is_worked_off:
                    # The boundary call overwrites a ring's oldest row: this is the last moment.
                    await self._trail.cut(HoldKind.PROMPT)
                elif self._trail.due(stream.position):
                    await self._trail.cut(HoldKind.CADENCE)
                position = stream.position
            self._tell_prefilled(position)

    async def _prefill_call(self, stream: Stream) -> int:
        async with self._tools.call.engine.pace.prefill_turn() as grid_tokens:
            size = stream.backlog_call(grid_tokens)
            await self._tools.call(stream.prefill_next, size)
        return size

    def _tell_prefilled(self, computed: int) -> None:
        self._run.put(Prefilled(computed, len(self._order.token_ids)))

    # Decode.

    async def _decode(self, access: Access) -> Finished:
        """Generate until something ends the answer."""
        with self._tools.call.engine.pace.decoding() as decoder:
            while True:
                await self._read(decoder)
                async with access.held() as stream:
                    decoder.stepped()
                    decoded = await self._tools.call(stream.decode_next)
                    reason = await self._tell(stream, decoded)
                    if reason is not None:
                        return await self._finish(stream, reason)
                    if self._trail.due(stream.position):
                        await self._trail.cut(HoldKind.CADENCE)

    async def _read(self, decoder: Decoder) -> None:
        """Go on only when the reader does; without it, no call is made."""
        if not self._run.is_full:
            return
        decoder.still()
        self._slot.state = SlotState.PAUSED
        try:
            async with asyncio.timeout(self._tools.stall_s):
                await self._run.drained()
        except TimeoutError:
            raise StalledReaderError(
                f"the answer was not read for {self._tools.stall_s:g} s"
            ) from None
        self._slot.state = SlotState.DECODE

    async def _tell(self, stream: Stream, decoded: Decoded) -> FinishReason | None:
        """Give the reader a token; gives why it was the last, or None."""
        run, order, text = self._run, self._order, ""
        self._generated += 1
        self._count(run)
        ends = decoded.token_id in order.end_ids
        if not ends:
            text, after = stream.decoding.text.push(self._tools.token_bytes(decoded.token_id))
            stream.decoding = dataclasses.replace(stream.decoding, text=after)
        stream.told_index = decoded.index + 1
        logprob = await self._logprob(decoded)
        run.put(Piece(decoded.index, decoded.token_id, text, logprob))
        if ends or stream.decoding.text.stopped:
            return FinishReason.STOP
        room = stream.generation.layout.max_context_tokens - stream.next_index
        full = self._generated >= order.max_tokens or room <= 0
        return FinishReason.LENGTH if full else None

    async def _logprob(self, decoded: Decoded) -> TokenLogprob | None:
        top = self._order.top_logprobs
        if top is None or decoded.logits is None:
            return None
        return await asyncio.to_thread(token_logprob, decoded.logits, decoded.token_id, top)

    def _count(self, run: Run) -> None:
        counts, prompt, start = self._tools.counts, len(self._order.token_ids), self._start
        counts.generated_tokens += 1
        if run.first_token_s is None:
            run.first_token_s = time.monotonic()
            counts.prompt_tokens += prompt
            counts.cached_tokens[start.rung] += start.cached_tokens
            counts.evaluated_tokens += prompt - start.cached_tokens
            counts.continuations += start.rung is Rung.CURRENT
            counts.queued_s.add((run.started_s or run.submitted_s) - run.submitted_s)
            counts.first_token_s.add(run.first_token_s - run.submitted_s)

    async def _finish(self, stream: Stream, reason: FinishReason) -> Finished:
        """The last event. The next turn may come as soon as it is out, so the cut comes before."""
        text, after = stream.decoding.text.finish()
        stream.decoding = dataclasses.replace(stream.decoding, text=after)
        await self._trail.cut(HoldKind.TURN)
        return Finished(reason, text, tuple(stream.token_ids), self._usage())

    def _usage(self) -> RunUsage:
        run, start, prompt = self._run, self._start, len(self._order.token_ids)
        first, begun = run.first_token_s or run.submitted_s, run.started_s or run.submitted_s
        return RunUsage(
            prompt_tokens=prompt,
            completion_tokens=self._generated,
            cached_tokens=start.cached_tokens,
            evaluated_tokens=prompt - start.cached_tokens,
            rung=start.rung,
            miss=start.miss,
            restored_bytes=start.restored_bytes,
            fallback=start.fallback,
            queued_s=begun - run.submitted_s,
            first_token_s=first - run.submitted_s,
        )
