"""Long prompts computed by a producer node, their rows installed here while it still computes.

The producer opens a session for this prompt alone, computes it and copies it here by the ordinary
path of a copy: gate, probe, claim, publish. What arrives is a transient session, whose rows are
taken and which is released at once. Nothing is handed over that could be lost, so every failure
ends the same way: the prompt is computed here, the reason is counted, and both ends forget it. The
producer does so as soon as this end hangs up, by itself or by its crash.

Asking for it is consent to ``compatible`` rows (``design.md`` section 4).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpack.errors import IdentityMismatchError, KvpackError, LayoutMismatchError
from kvpack.layout import LayerKind
from node.client import NodeClient
from node.errors import NodeBusyError, PeerAnswerError, PeerUnavailableError
from node.migration.table import TARGET_ENDED
from node.migration.tape import Tape
from node.migration.target import Transfers
from node.pb.v1 import session_pb2 as pb
from node.serving.order import Fallback
from node.serving.producer import Arrival, Failure, ProducerOrder, RemoteCounts
from node.sessions import Sessions
from node.transient import transient_name

log = logging.getLogger(__name__)

#: Prompts that are with a producer at once. A target takes four transfers, moves included.
AT_ONCE: Final = 2

#: The longest time that a producer which failed again and again is not asked.
REST_MOST_S: Final = 60.0

#: Pauses before the tries to clear a prompt up: an unanswered directory is the only reason for two.
CLEAR_PAUSES_S: Final = (0.0, 1.0, 5.0, 15.0, 60.0)

#: How long a stopping node waits for what is being cleared.
CLOSE_S: Final = 5.0


class RemotePrefill:
    """Asks one producer for the rows of prompts.

    Args:
        order: Which, and how long.
        connect: Makes a client of it, with the credentials of that moment.
        transfers: What comes into this node.
        sessions: Where what came appears.

    Attributes:
        order: The same.
        counts: What it came to.
        last_failure: The last prompt's that was computed here instead; None before one.
    """

    def __init__(
        self,
        order: ProducerOrder,
        connect: Callable[[], NodeClient],
        transfers: Transfers,
        sessions: Sessions,
    ) -> None:
        self.order = order
        self.counts = RemoteCounts()
        self.last_failure: Failure | None = None
        self._connect = connect
        self._transfers = transfers
        self._sessions = sessions
        self._under_way = 0
        self._failures = 0
        self._rest_until_s = 0.0
        self._clearing: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> int:
        """Prompts that the producer has."""
        return self._under_way

    def resting_s(self) -> float:
        """For how long it is not asked yet."""
        return max(0.0, self._rest_until_s - time.monotonic())

    async def prefill(self, token_ids: Sequence[int]) -> Arrival | Failure:
        """The rows of ``token_ids[:-1]``, or why they have to be computed here.

        A caller who is cancelled ends it on both ends.
        """
        failure = self._reason_not_to_ask()
        if failure is None:
            self._under_way += 1
            self.counts.asked += 1
            try:
                outcome = await self._ask(token_ids)
            finally:
                self._under_way -= 1
            if isinstance(outcome, Arrival):
                self._note_arrival(outcome, len(token_ids) - 1)
                return outcome
            failure = outcome
            self._rest()
        self.counts.fallbacks[failure.kind] += 1
        self.last_failure = failure
        log.warning(
            "remote prefill of %d tokens by %s: %s (%s); computed here",
            len(token_ids), self.order.node, failure.kind.value, failure.detail,
        )  # fmt: skip
        return failure

    async def close(self) -> None:
        """Wait a little for what is being cleared."""
        if self._clearing:
            await asyncio.wait(self._clearing, timeout=CLOSE_S)
        for task in self._clearing:
            task.cancel()

    def _reason_not_to_ask(self) -> Failure | None:
        if self._under_way >= AT_ONCE:
            return Failure(Fallback.BUSY, f"{self._under_way} prompts are there already")
        rest_s = self.resting_s()
        if rest_s:
            return Failure(Fallback.RESTING, f"asked again in {rest_s:.0f} s")
        return None

    def _note_arrival(self, arrival: Arrival, tokens: int) -> None:
        self._failures = 0
        self.counts.arrived += 1
        self.counts.tokens += tokens
        self.counts.row_bytes += arrival.row_bytes

    def _rest(self) -> None:
        """Not every prompt pays for finding out that nobody is there."""
        rest_s = min(REST_MOST_S, self.order.rest_s * 2 ** min(self._failures, 10))
        self._failures += 1
        self._rest_until_s = time.monotonic() + rest_s

    async def _ask(self, token_ids: Sequence[int]) -> Arrival | Failure:
        name = transient_name()
        guests = self._transfers.guests
        try:
            with guests.awaiting(name):
                heard = _Heard()
                try:
                    await self._listen(name, token_ids, heard)
                except (KvpackError, TimeoutError) as error:
                    return _failure(error, guests.refusal(name), heard)
            return await self._take(name, token_ids)
        finally:
            # Whatever happened, also a cancelled caller: nothing of it stays, and nobody waits.
            task = asyncio.create_task(self._clear(name))
            self._clearing.add(task)
            task.add_done_callback(self._clearing.discard)

    async def _listen(self, name: str, token_ids: Sequence[int], heard: _Heard) -> None:
        """Have it computed and sent. Leaving it, however, hangs up."""
        order = self.order
        request = pb.MigrateRequest(
            session_id=transient_name(),
            copy_as=name,
            token_ids=token_ids,
            target_node=self._sessions.node,
            target_address=str(order.own_address),
            accept_compatible=True,
            transient=True,
        )
        async with asyncio.timeout(order.total_s), self._connect() as client:
            events = client.migrate(request)
            async with contextlib.aclosing(events):
                await _last(events, heard, order)

    async def _take(self, name: str, token_ids: Sequence[int]) -> Arrival | Failure:
        """The rows of the session that arrived. What it is, this end says, not the producer."""
        arrived, rows = self._transfers.arrived(name), len(token_ids) - 1
        if name not in self._sessions or arrived is None:
            return Failure(Fallback.BROKEN, "it says that all was sent; that did not arrive")
        session = await self._sessions.find(name)
        if tuple(session.token_ids[:rows]) != tuple(token_ids[:rows]) or session.position != rows:
            return Failure(Fallback.BROKEN, "it sent the rows of another prompt")
        tape = Tape.known(session.generation.layout, rows)
        row_bytes = sum(tape.state_bytes(kind) for kind in (LayerKind.FULL, LayerKind.SWA))
        return Arrival(session.generation, arrived.exact, row_bytes)

    async def _clear(self, name: str) -> None:
        """Give up what of a prompt is here: a transfer, or a session whose rows were taken."""
        for pause_s in CLEAR_PAUSES_S:
            await asyncio.sleep(pause_s)
            await self._transfers.dismiss(name)
            if name in self._sessions:
                await self._sessions.end(await self._sessions.find(name))
            arrived = self._transfers.arrived(name)
            if arrived is None or arrived.state in TARGET_ENDED:
                return
        # A directory that does not answer may yet say that it is ours. A start releases it.
        log.warning("session %s: nobody knows yet whether it is this node's", name)


@dataclass(slots=True)
class _Heard:
    """How far a producer came, for telling how it failed."""

    anything: bool = False
    sent_bytes: int = 0


async def _last(
    events: AsyncGenerator[pb.MigrateEvent, None], heard: _Heard, order: ProducerOrder
) -> None:
    """Listen until the result comes.

    Raises:
        TimeoutError: Nothing more is said, or nothing new.
        PeerUnavailableError: The stream broke, or ended without a result.
    """
    loop = asyncio.get_running_loop()
    newest = (0, 0)
    async with asyncio.timeout(order.answer_s) as patience:
        async for event in events:
            if event.WhichOneof("event") == "result":
                return
            now = (event.progress.computed_tokens, event.progress.sent_payload_bytes)
            if not heard.anything or now > newest:
                patience.reschedule(loop.time() + order.stall_s)
            heard.anything, heard.sent_bytes, newest = True, now[1], max(now, newest)
    raise PeerUnavailableError(f"node {order.node}: ended the stream early")


def _failure(
    error: KvpackError | TimeoutError, refusal: KvpackError | None, heard: _Heard
) -> Failure:
    """What kind of failure it was. What this node refused itself is known best."""
    detail = str(refusal or error) or "no progress in time"
    if isinstance(refusal, IdentityMismatchError | LayoutMismatchError):
        return Failure(Fallback.MODEL, detail)
    if refusal is not None:
        kind = Fallback.BUSY if isinstance(refusal, NodeBusyError) else Fallback.REFUSED
    elif isinstance(error, TimeoutError):
        kind = Fallback.SLOW if heard.anything else Fallback.AWAY
    elif isinstance(error, PeerUnavailableError):
        kind = Fallback.BROKEN if heard.anything else Fallback.AWAY
    elif isinstance(error, PeerAnswerError) and error.peer_reason == NodeBusyError.reason:
        kind = Fallback.BUSY
    else:
        kind = Fallback.BROKEN if heard.sent_bytes else Fallback.REFUSED
    return Failure(kind, detail)
