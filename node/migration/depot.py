"""Sessions into stores and out of them, for whoever asks: each one a task of its own.

A client that hangs up stops waiting; what it asked for goes on. An ownership that is half handed
over is not a thing to drop because somebody closed a terminal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from node.directory import OwnershipToken
from node.errors import NodeBusyError
from node.migration.moves import Moves
from node.migration.park import Park, ParkedSession, ParkOrder
from node.migration.restore import Restored, RestoreOrder, Restorer
from node.stores import StoreRoots

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Sessions on their way at once: each holds a window set, or the memory of its rows.
UNDER_WAY_MAX: Final = 4

#: How long a stopping node waits for them to end by themselves.
STOP_S: Final = 10.0


class Depot:
    """What one node gives to stores and takes from them.

    Args:
        moves: The moves of this node: no session leaves twice at once.
        restorer: The way back.
        roots: Where stores may lie.
    """

    def __init__(self, moves: Moves, restorer: Restorer, roots: StoreRoots) -> None:
        self._moves = moves
        self._restorer = restorer
        self._roots = roots
        self._tasks: set[asyncio.Task[Any]] = set()

    async def park(self, session_id: str, token: OwnershipToken, order: ParkOrder) -> ParkedSession:
        """Move or copy a session into a store.

        Raises:
            UsageError: The store may not be opened.
            TransferFailedError: The session stays here; the message says why.
            NodeBusyError: Too many are on their way.
        """
        # Before anything is held: a mistyped path is no reason to make clients wait.
        await asyncio.to_thread(self._roots.find, order.place)
        return await self._to_the_end(self._park(session_id, token, order))

    async def restore(self, order: RestoreOrder) -> Restored:
        """Bring a session out of a store to this node.

        Raises:
            KvpackError: It stays where it lies; see :meth:`Restorer.restore`.
            NodeBusyError: Too many are on their way.
        """
        return await self._to_the_end(self._restorer.restore(order))

    async def close(self) -> None:
        """Wait for what is under way, then stop what would not end."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=STOP_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    async def _park(
        self, session_id: str, token: OwnershipToken, order: ParkOrder
    ) -> ParkedSession:
        source = self._moves.source
        async with source.sessions.hold(session_id, token) as session:
            with self._moves.one_move(session_id):
                await source.sessions.work_off(session)
                return await Park(source, self._roots, session, order).run()

    async def _to_the_end(self, work: Coroutine[Any, Any, _T]) -> _T:
        if len(self._tasks) >= UNDER_WAY_MAX:
            work.close()
            raise NodeBusyError(f"{UNDER_WAY_MAX} sessions are on their way to stores or back")
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.info("to a store or back: %s", task.exception())
