"""Live moves of one node take turns at the wire.

A session that is moved live is without an owner from its freeze until its commit. Two streams at
once would each take half of processors and link, so both sessions were without one for twice as
long, and nothing would be done sooner. So of the live moves of a node one streams at a time. The
others are prepared meanwhile: channel, ledger, memory at the target; their sessions serve on. A
turn ends when the last rows were read, so while what is left of a stream, Seal and Commit of one
session are under way, the next one's rows are on theirs.

A turn is a courtesy, not a lock that anything depends on: after a bounded time nobody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

from node.migration.producer import Producer
from node.migration.sealing import Loaded

#: How long a stream that is open waits for its turn: less than the time after which a target gives
#: such a stream up.
TURN_S: Final = 300.0


class Turns:
    """The turns of one node's live moves, first come, first served."""

    def __init__(self, patience_s: float = TURN_S) -> None:
        self._lock = asyncio.Lock()
        self._patience_s = patience_s

    @contextlib.asynccontextmanager
    async def turn(self, consumer: asyncio.Future[Any]) -> AsyncIterator[None]:
        """Have the turn while the block runs; without it where it takes too long to come.

        Whatever ends ``consumer`` meanwhile ends the waiting, too.
        """
        asked = asyncio.ensure_future(self._lock.acquire())
        try:
            await asyncio.wait(
                {asked, consumer}, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            if consumer.done():
                consumer.result()
            yield
        finally:
            if not asked.done():
                asked.cancel()
                await asyncio.wait({asked})
            # A lock that was given in the very moment of giving up is given back, too.
            if not asked.cancelled():
                self._lock.release()


class ProducerInTurn(Producer):
    """A producer whose items are made in its node's turn; its session serves until then."""

    def __init__(self, turns: Turns, *made: Any) -> None:  # noqa: ANN401 - Producer's own
        super().__init__(*made)
        self._turns = turns

    async def fill(
        self, index: int, queue: asyncio.Queue[Loaded | None], consumer: asyncio.Task[None]
    ) -> None:
        """As :meth:`Producer.fill`, when it is its turn; at once where nobody serves meanwhile."""
        if self.tape.cut is not None:
            # Its stream broke after the freeze: until this one ends the session is nobody's.
            await super().fill(index, queue, consumer)
            return
        async with self._turns.turn(consumer):
            await super().fill(index, queue, consumer)
