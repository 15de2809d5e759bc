"""What happens to an answer in its slot: begin, prefill, decode, keep.

All of it is a sequence of engine calls with waits between. Cancelled at any of them it leaves its
stream at a definite position, with tokens and rows in agreement.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

from kvpack.store import HoldKind
from node.errors import StalledReaderError
from node.pace import Decoder
from node.serving.access import Access
from node.serving.logprobs import token_logprob
from node.serving.opening import Opening
from node.serving.order import Finished, FinishReason, Piece, Rung, RunUsage, TokenLogprob
from node.serving.run import Run
from node.serving.slots import Held, Slot, SlotState
from node.serving.tools import Tools
from node.stream import Decoded, Stream


class Course:
    """One answer in one slot."""

    def __init__(self, tools: Tools, run: Run, slot: Slot) -> None:
        self._tools = tools
        self._run = run
        self._order = run.order
        self._slot = slot
        self._opening = Opening(tools, run, slot)
        self._generated = 0

    async def answer(self) -> Finished:
        """Make the answer.

        Raises:
            StalledReaderError: Nobody read it.
            KvpackError: A session's state, or the engine's, ended it.
        """
        access = await self._opening.begin()
        self._slot.state = SlotState.PREFILL
        await self._opening.prefill(access)
        self._slot.state = SlotState.DECODE
        return await self._decode(access)

    def leave(self) -> Held | None:
        """The answer is over, however it ended. Gives what its slot may hold; None: nothing."""
        self._opening.unpin()
        return self._opening.left()

    async def _decode(self, access: Access) -> Finished:
        """Generate until something ends the answer."""
        with self._tools.call.engine.pace.decoding() as decoder:
            while True:
                await self._read(decoder)
                async with access.held() as stream:
                    with decoder.step():
                        decoded = await self._tools.call(stream.decode_next)
                    access.require()
                    reason = await self._tell(stream, decoded)
                    if reason is not None:
                        return await self._finish(stream, reason)
                    if self._opening.trail.due(stream.position):
                        await self._opening.trail.cut(HoldKind.CADENCE)

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
        counts, prompt, start = self._tools.counts, len(self._order.token_ids), self._opening.start
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
        await self._opening.trail.cut(HoldKind.TURN)
        return Finished(reason, text, tuple(stream.token_ids), self._usage())

    def _usage(self) -> RunUsage:
        run, start, prompt = self._run, self._opening.start, len(self._order.token_ids)
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
