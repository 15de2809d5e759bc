"""How hard the background works: a small share of the time, unless somebody waits for it.

Each token of an answer needs the engine's thread and Python's lock. So after each piece of work the
background rests for a multiple of what the piece took: of all tokens only few then meet a piece of
it, and the median does not move.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

if TYPE_CHECKING:
    from node.engine_thread import EngineThread

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Rest for each second of work: the background then has a twentieth of the time.
REST: Final = 19.0

#: No single rest is longer, however long a slow disk took.
REST_S_MAX: Final = 0.5


class Pace:
    """Runs the pieces, and rests after each.

    Args:
        engine: The thread that tokens need.
        busy: Whether answers are being made; where they are not there is no need to rest.
    """

    def __init__(self, engine: EngineThread, busy: Callable[[], bool]) -> None:
        self._engine = engine
        self._busy = busy
        self._hurried = 0
        self._woken = asyncio.Event()

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """Nobody rests while the block runs: somebody waits for what the background does."""
        self._hurried += 1
        self._woken.set()
        try:
            yield
        finally:
            self._hurried -= 1

    async def on_engine(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a piece on the engine's thread, then rest."""
        began = time.monotonic()
        result = await self._engine.call(work, *args, **kwargs)
        await self._rest(time.monotonic() - began)
        return result

    async def off_loop(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a piece on a worker thread, then rest."""
        began = time.monotonic()
        result = await asyncio.to_thread(work, *args, **kwargs)
        await self._rest(time.monotonic() - began)
        return result

    async def _rest(self, worked_s: float) -> None:
        if self._hurried or not self._busy():
            return
        self._woken.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(REST_S_MAX, REST * worked_s)):
                await self._woken.wait()
