"""A client that streams one session wherever it is, and takes each token once."""

from __future__ import annotations

import asyncio

from kvpack.errors import KvpackError
from node.directory import OwnershipToken
from node.errors import PeerAnswerError
from node.migration.wire import token_value

from .lab import NodeProcess
from .twin import Twin

#: Tokens that one call asks for, and the pause between two calls.
STEP_TOKENS = 3
PAUSE_S = 0.03


class WrongBits(AssertionError):
    """A token or logits other than those of the twin."""


class Conversation:
    """What one client saw of a session.

    Attributes:
        next: The index of the first token that the client does not have.
        token: The newest ownership token that it saw; what comes under an older one is dropped.
        resent: Events for tokens that it had: compared, not taken.
        dropped: Events under an older token.
    """

    def __init__(self, session_id: str, twin: Twin) -> None:
        self.session_id = session_id
        self.twin = twin
        self.next = twin.given
        self.token: OwnershipToken | None = None
        self.older: set[OwnershipToken] = set()
        self.resent = 0
        self.dropped = 0

    async def follow(self, nodes: list[NodeProcess]) -> None:
        """Ask whoever serves for more, without end; a refusal sends it to the next node."""
        place = 0
        while True:
            try:
                await self.take(nodes[place], STEP_TOKENS)
            except KvpackError:
                place = (place + 1) % len(nodes)
            await asyncio.sleep(PAUSE_S)

    async def take(self, node: NodeProcess, count: int) -> int:
        """Take ``count`` further tokens from ``node``; gives how many had their logits with them.

        Raises:
            KvpackError: It does not serve the session.
            WrongBits: It does, with other bits than the twin's.
        """
        compared = 0
        async with node.client() as client:
            session = await client.get(self.session_id)
            self.see(token_value(session.token))
            start = min(self.next, session.next_index)
            async for event in client.generate(session, start, self.next - start + count):
                compared += self._take(event)
        return compared

    def see(self, token: OwnershipToken) -> bool:
        """Note ``token``; whether it is the newest one seen."""
        if self.token is not None and self.token.newer_than(token):
            return False
        if self.token is not None and token != self.token:
            self.older.add(self.token)
        self.token = token
        return True

    def _take(self, event) -> bool:
        if not self.see(token_value(event.token)):
            self.dropped += 1
            return False
        token_id, logits = self.twin.at(event.index)
        if event.token_id != token_id or (event.logits and event.logits != logits):
            raise WrongBits(f"{self.session_id}: index {event.index} is not what the twin says")
        if event.index > self.next:
            raise WrongBits(f"{self.session_id}: index {event.index}, expected {self.next}")
        if event.index < self.next:
            self.resent += 1
            return False
        self.next += 1
        return bool(event.logits)

    async def refused(self, node: NodeProcess, token: OwnershipToken) -> str:
        """The word by which ``node`` refuses a call under ``token``; empty if it serves it."""
        from node.migration.wire import token_message
        from node.pb.v1 import session_pb2 as pb

        claim = pb.SessionReply(session_id=self.session_id, token=token_message(token))
        async with node.client() as client:
            try:
                async for _ in client.generate(claim, 1, 1):
                    return ""
            except PeerAnswerError as error:
                return error.peer_reason
        return "nothing"
