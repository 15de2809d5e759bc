"""Which other nodes there are and what they own, as the directory tells it: looked at now and then.

The page must not wait for a directory on another machine, so it shows what was seen last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from kvpack.errors import KvpackError
from node.directory import Directory
from node.metrics.views import NODES_SHOWN, SESSIONS_SHOWN, NodeView, SessionView, Standing
from node.transient import is_transient

log = logging.getLogger(__name__)

#: Between two looks, and for how long one node is waited for.
LOOK_S: Final = 3.0
ANSWER_S: Final = 2.0


class Peers:
    """The other nodes.

    Args:
        directory: Where ownership is written.
        names: Which nodes to ask for; asked each time, since pins change.
    """

    def __init__(self, directory: Directory, names: Callable[[], Iterable[str]]) -> None:
        self._directory = directory
        self._names = names
        self.nodes: tuple[NodeView, ...] = ()
        self.sessions: tuple[SessionView, ...] = ()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """See every node once. One that the directory says nothing of keeps its place."""
        nodes: list[NodeView] = []
        sessions: list[SessionView] = []
        try:
            # Files, perhaps on a slow volume.
            names = await asyncio.to_thread(self._names)
        except KvpackError as error:
            log.info("other nodes are not known: %s", error)
            return
        for name in sorted(set(names))[:NODES_SHOWN]:
            view, owned = await self._ask(name)
            nodes.append(view)
            sessions.extend(owned)
        self.nodes, self.sessions = tuple(nodes), tuple(sessions[:SESSIONS_SHOWN])

    async def _ask(self, name: str) -> tuple[NodeView, list[SessionView]]:
        try:
            async with asyncio.timeout(ANSWER_S):
                lease = await self._directory.lease(name)
                owned = await self._directory.owned_by(name)
        except (KvpackError, TimeoutError) as error:
            log.info("the directory says nothing of node %s: %s", name, error)
            return NodeView(name, is_self=False), []
        left_s = 0.0 if lease is None else lease.left_s
        sessions = [
            SessionView(entry.session_id, name, Standing.ELSEWHERE)
            for entry in owned
            if not is_transient(entry.session_id)
        ]
        return NodeView(name, False, left_s, len(sessions)), sessions
