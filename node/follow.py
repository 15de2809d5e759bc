"""A client that follows its session: where it moves, how long it is held, what was said already.

Tokens come once and in order, whatever happens between the nodes: each has an index, a stream is
opened again from the first index that has not come, and what an older owner still says is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Final

from node.client import NodeClient
from node.config import Address
from node.directory import OwnershipToken
from node.errors import PeerAnswerError, PeerUnavailableError
from node.migration.wire import OWNER_ADDRESS_KEY, OWNER_KEY, RETRY_AFTER_KEY, token_value
from node.pb.v1 import session_pb2 as pb

#: How long a session may be out of reach or held, without a token, until the client gives up.
PATIENCE_S: Final = 60.0

#: Tries in a row without a token: a bound on sessions that are passed round in a circle.
TRIES_MAX: Final = 200

#: Between two tries where the node said nothing about it.
PAUSE_S: Final = 0.5

#: Reasons after which the same call may succeed a moment later.
_PASSING: Final = frozenset({"session_frozen", "busy", "stale_token", "directory_unavailable"})


class FollowingClient:
    """The Session service of whichever node owns the session.

    Args:
        credentials_dir: The client's; every node that may come to own the session is pinned there.
        node: The node to begin with.
        address: Where it listens.
    """

    def __init__(self, credentials_dir: Path, node: str, address: Address) -> None:
        self._credentials_dir = credentials_dir
        self._place = (node, address)
        self._client = NodeClient(credentials_dir, node, address)
        self._reached = False

    @property
    def node(self) -> str:
        """The node that is spoken to now."""
        return self._client.node

    @property
    def client(self) -> NodeClient:
        """Its client."""
        return self._client

    async def __aenter__(self) -> FollowingClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()

    async def generate(
        self, session_id: str, resume_index: int, count: int
    ) -> AsyncIterator[pb.GenerateEvent]:
        """``count`` tokens from ``resume_index`` on, each once, through any number of moves.

        Raises:
            PeerUnavailableError: The session is out of reach for longer than a client waits.
            PeerAnswerError: It is refused for good.
        """
        index, end = resume_index, resume_index + count
        newest: OwnershipToken | None = None
        trouble = _Trouble()
        while index < end:
            try:
                session = await self._client.get(session_id)
                self._reached = True
                async for event in self._client.generate(session, index, end - index):
                    token = token_value(event.token)
                    if event.index != index or (newest is not None and newest.newer_than(token)):
                        continue
                    newest, index = token, index + 1
                    trouble = _Trouble()
                    yield event
            except (PeerAnswerError, PeerUnavailableError) as error:
                await self._overcome(error, trouble)

    async def find(self, session_id: str) -> pb.SessionReply:
        """The session, at its owner.

        Raises:
            PeerUnavailableError: Out of reach for longer than a client waits.
            PeerAnswerError: It is refused for good.
        """
        trouble = _Trouble()
        while True:
            try:
                found = await self._client.get(session_id)
                self._reached = True
                return found
            except (PeerAnswerError, PeerUnavailableError) as error:
                await self._overcome(error, trouble)

    async def _overcome(
        self, error: PeerAnswerError | PeerUnavailableError, trouble: _Trouble
    ) -> None:
        """Go where the session went, or wait; raise ``error`` where neither is of use."""
        if not trouble.permits():
            raise error
        if isinstance(error, PeerUnavailableError):
            if not self._reached:
                # Nobody was ever there: a wrong address is not waited for.
                raise error
            await asyncio.sleep(PAUSE_S)
            return
        owner, address = error.hints.get(OWNER_KEY), error.hints.get(OWNER_ADDRESS_KEY)
        if error.peer_reason == "session_moved" and owner and address:
            await self._go(owner, Address.parse(address))
        elif error.peer_reason in _PASSING:
            await asyncio.sleep(_pause(error.hints.get(RETRY_AFTER_KEY, "")))
        else:
            raise error

    async def _go(self, node: str, address: Address) -> None:
        if (node, address) == self._place:
            await asyncio.sleep(PAUSE_S)
            return
        client = NodeClient(self._credentials_dir, node, address)
        await self._client.close()
        self._client, self._place = client, (node, address)


class _Trouble:
    """What a client puts up with between two tokens."""

    def __init__(self) -> None:
        self._until = time.monotonic() + PATIENCE_S
        self._left = TRIES_MAX

    def permits(self) -> bool:
        self._left -= 1
        return time.monotonic() < self._until and self._left >= 0


def _pause(hint_ms: str) -> float:
    wanted = int(hint_ms) / 1000 if hint_ms.isascii() and hint_ms.isdigit() else PAUSE_S
    return min(max(wanted, 0.01), 10.0)
