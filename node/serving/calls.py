"""Engine calls of answers: run to their end whatever happens to who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from node.errors import NodeBusyError

if TYPE_CHECKING:
    from node.engine_thread import EngineThread

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: How often, and after how many seconds each, an answer that runs asks a full engine line again.
BUSY_TRIES: Final = 200
BUSY_PAUSE_S: Final = 0.02


class EngineCalls:
    """The engine as answers use it.

    Attributes:
        engine: The thread.
    """

    def __init__(self, engine: EngineThread) -> None:
        self.engine = engine

    async def __call__(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run ``work`` on the engine thread.

        It has ended when this returns, also where this is cancelled: what it works on is nobody
        else's before.

        Raises:
            NodeBusyError: The engine's line stayed full for seconds.
        """
        for _ in range(BUSY_TRIES):
            try:
                call = self.engine.submit(work, *args, **kwargs)
                break
            except NodeBusyError:
                await asyncio.sleep(BUSY_PAUSE_S)
        else:
            raise NodeBusyError("the engine's line stayed full")
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await _ended(call)
            raise


async def _ended(call: asyncio.Future[Any]) -> None:
    while not call.done():
        try:
            await asyncio.wait({call})
        except asyncio.CancelledError:
            # Cancelled once more. It is cancelled already, and the work is still under way.
            continue
