"""Who waits for whom at the engine.

The engine's line is first come, first served. An answer that decodes has one step in it and asks
for the next when it has the result, so several of them take turns by themselves. A prefill call is
far longer than a step. So there is at most one of them in the line, whoever asks, and it is a short
one while anybody decodes, and it is put there only when all that decode have their next step in the
line: a step then waits for one short call at most, and two prefills take turns.

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


#: A prefill call lets those go first who are between two steps, but not longer than so: a token
#: is made into text in far less, and a session may wait for its directory.
GRACE_S: Final = 0.05


class Decoder:
    """One that decodes now.

    Attributes:
        stepped_s: When it last had a step in the line; infinity while one is there.
        asked: Whether it asked since the last prefill call was put into the line.
    """

    __slots__ = ("_pace", "asked", "stepped_s")

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.asked = False
        self.stepped_s = pace.clock()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step is put into the line now, and is in it while the block runs.

        However long that takes: it waits for the engine then, perhaps for a slow prefill call, and
        the next one may be no longer for that.
        """
        self.stepped_s, self.asked = math.inf, True
        self._pace.stir()
        try:
            yield
        finally:
            self.stepped_s = self._pace.clock()

    def still(self) -> None:
        """No step is asked for until the next one is: nobody has to hurry for it, or wait."""
        self.stepped_s = -math.inf
        self._pace.stir()


class Pace:
    """Turns at one engine. Belongs to the event loop.

    Attributes:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._decoders: set[Decoder] = set()
        self._turn = asyncio.Lock()
        self._stirred = asyncio.Event()

    @contextlib.contextmanager
    def decoding(self) -> Iterator[Decoder]:
        """Decode while the block runs; say so at each step."""
        decoder = Decoder(self)
        self._decoders.add(decoder)
        try:
            yield decoder
        finally:
            self._decoders.discard(decoder)
            self.stir()

    def stir(self) -> None:
        """Somebody decodes otherwise than before: whoever waits for that looks again."""
        self._stirred.set()

    @contextlib.asynccontextmanager
    async def prefill_turn(self) -> AsyncIterator[int]:
        """One prefill call's turn: the block makes at most one, on the grid of so many tokens."""
        async with self._turn:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._all_asked()
            for decoder in self._decoders:
                decoder.asked = False
            yield self.grid_tokens()

    async def _all_asked(self) -> None:
        while any(not decoder.asked for decoder in self._busy()):
            self._stirred.clear()
            await self._stirred.wait()

    @property
    def is_busy(self) -> bool:
        """Whether somebody decodes now."""
        return bool(self._busy())

    def grid_tokens(self) -> int:
        """The grid on which a prefill call that begins now has to end."""
        return SHORT_CALL_TOKENS if self._busy() else CALL_TOKENS

    def _busy(self) -> list[Decoder]:
        since = self.clock() - STILL_S
        return [decoder for decoder in self._decoders if decoder.stepped_s > since]
