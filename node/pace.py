"""Who waits for whom at the engine.

The engine's line is first come, first served. An answer that decodes has one step in it and asks
for the next when it has the result, so several of them take turns by themselves. A prefill call is
far longer than a step. So there is at most one of them in the line, whoever asks, and it is a short
one while anybody decodes: a step then waits for one short call at most, and two prefills take
turns.

Calls end on the absolute grid whatever their size. Whoever decodes can only be known by having
said so: an answer nobody reads says nothing, and costs others no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

#: Tokens of a prefill call while nobody decodes: ``engine.PREFILL_CALL_TOKENS``.
CALL_TOKENS: Final = 512

#: Tokens of a prefill call while somebody does.
SHORT_CALL_TOKENS: Final = 64

#: A decoder that made no step for so long is waited for by somebody else than the engine.
STILL_S: Final = 1.0


class Decoder:
    """One that decodes now."""

    __slots__ = ("_clock", "stepped_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.stepped_s = clock()

    def stepped(self) -> None:
        """A step was made, or is asked for."""
        self.stepped_s = self._clock()

    def still(self) -> None:
        """No step is asked for until the next one is: nobody has to hurry for it."""
        self.stepped_s = -math.inf


class Pace:
    """Turns at one engine. Belongs to the event loop.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._decoders: set[Decoder] = set()
        self._turn = asyncio.Lock()

    @contextlib.contextmanager
    def decoding(self) -> Iterator[Decoder]:
        """Decode while the block runs; say so at each step."""
        decoder = Decoder(self._clock)
        self._decoders.add(decoder)
        try:
            yield decoder
        finally:
            self._decoders.discard(decoder)

    @contextlib.asynccontextmanager
    async def prefill_turn(self) -> AsyncIterator[int]:
        """One prefill call's turn: the block makes at most one, on the grid of so many tokens."""
        async with self._turn:
            yield self.grid_tokens()

    @property
    def is_busy(self) -> bool:
        """Whether somebody decodes now."""
        since = self._clock() - STILL_S
        return any(decoder.stepped_s > since for decoder in self._decoders)

    def grid_tokens(self) -> int:
        """The grid on which a prefill call that begins now has to end."""
        return SHORT_CALL_TOKENS if self.is_busy else CALL_TOKENS
