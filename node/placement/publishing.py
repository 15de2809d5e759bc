"""The node's side of placement: it keeps its notice in the directory, and reads those of others.

A notice is written once at the start, and again where it says something else: at most once in a
third of a lease, as often as the lease itself is renewed. Free memory that changed by less than
one part in 64 of what the node gives is no news. So an idle fleet writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable
from typing import Final

from kvpack.errors import KvpackError
from node.directory import NONCE_BYTES, Directory, Ownership, OwnershipToken, transfer_settled
from node.errors import DirectoryError, SessionExistsError, StaleTokenError
from node.lease import RENEWALS
from node.placement.notice import decode_notice, encode_notice, notice_name
from node.placement.values import NodeState

log = logging.getLogger(__name__)

#: Notices that are asked for at once.
_AT_ONCE: Final = 16

#: How long one node's notice may take to be read.
_READ_S: Final = 5.0

#: Change of free memory, as one part in so many of what the node gives, that is news.
_NEWS: Final = 64

#: How long a node that stops waits for its notice to go.
_RELEASE_S: Final = 2.0


class Publisher:
    """Keeps one node's notice.

    Args:
        directory: Where.
        describe: What the node is at the moment.
        ttl_s: Its lease.
    """

    def __init__(
        self, directory: Directory, describe: Callable[[], NodeState], ttl_s: float
    ) -> None:
        self._directory = directory
        self._describe = describe
        self._pause_s = ttl_s / RENEWALS
        self._token: OwnershipToken | None = None
        self._said: NodeState | None = None
        self._changed = asyncio.Event()
        #: Writes to the directory so far.
        self.writes = 0

    def poke(self) -> None:
        """Something changed that is not to wait."""
        self._changed.set()

    async def run(self) -> None:
        """Write what is new, until cancelled. A directory that is away costs placement alone."""
        while True:
            self._changed.clear()
            try:
                await self.publish()
            except KvpackError as error:
                log.warning("what this node says of itself was not written: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self._changed.wait()

    async def publish(self) -> None:
        """Write the notice if it is news.

        Raises:
            KvpackError: It was not written.
        """
        now = self._describe()
        if self._said is not None and not is_news(self._said, now):
            return
        try:
            token = self._token or await self._claim(now.name)
            await self._directory.put(notice_name(now.name), token, encode_notice(now))
        except StaleTokenError:
            # An adoption, or a process of this name that began later: whose it is, is asked anew.
            self._token = self._said = None
            raise
        self.writes += 1
        self._token, self._said = token, now

    async def close(self) -> None:
        """Take the notice away: nothing is placed here any more."""
        if self._token is None or self._said is None:
            return
        with contextlib.suppress(KvpackError, TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                await self._directory.release(notice_name(self._said.name), self._token)

    async def _claim(self, node: str) -> OwnershipToken:
        """Own the entry. The one of a process before is taken over: it can write no more."""
        name, nonce = notice_name(node), secrets.token_bytes(NONCE_BYTES)
        self.writes += 1
        entry = await self._directory.owner(name)
        if not isinstance(entry, Ownership):
            return await self._directory.claim(name, node, nonce)
        if entry.node != node:
            raise SessionExistsError(f"notice of node {node}: kept by node {entry.node}")
        return await transfer_settled(self._directory, name, entry.token, node, nonce)


def is_news(before: NodeState, now: NodeState) -> bool:
    """Whether ``now`` is to be written where ``before`` stands."""
    if abs(now.free_bytes - before.free_bytes) * _NEWS > now.capacity_bytes:
        return True
    full = now.sessions >= now.sessions_max, before.sessions >= before.sessions_max
    return full[0] != full[1] or _lasting(before) != _lasting(now)


def _lasting(state: NodeState) -> tuple[object, ...]:
    return (
        state.name, state.kind, state.capacity_bytes, state.sessions_max, state.leaving,
        state.address, state.http,
    )  # fmt: skip


async def read_fleet(directory: Directory, names: Iterable[str]) -> tuple[NodeState, ...]:
    """What the nodes of those names say of themselves, by name. Who says nothing is left out.

    Three reads for each node, :data:`_AT_ONCE` nodes at a time.

    Raises:
        DirectoryError: Nothing at all could be read.
    """
    places = asyncio.Semaphore(_AT_ONCE)
    trouble: list[Exception] = []

    async def one(node: str) -> NodeState | None:
        async with places:
            try:
                async with asyncio.timeout(_READ_S):
                    return await read_node(directory, node)
            except (KvpackError, TimeoutError) as error:
                log.info("node %s: what it says of itself was not read: %s", node, error)
                trouble.append(error)
                return None

    wanted = sorted(set(names))
    found = await asyncio.gather(*(one(name) for name in wanted))
    if trouble and len(trouble) == len(wanted):
        raise DirectoryError(f"directory: nothing can be read of any node: {trouble[0]}")
    return tuple(state for state in found if state is not None)


async def read_node(directory: Directory, node: str) -> NodeState | None:
    """What ``node`` says of itself; None: nothing, or nobody can tell that it was the node.

    Raises:
        KvpackError: It cannot be read, or is no notice.
    """
    name = notice_name(node)
    entry = await directory.owner(name)
    if not isinstance(entry, Ownership) or entry.node != node:
        return None
    said = await directory.published(name)
    if said is None or said.token.revision != entry.token.revision:
        return None
    lease = await directory.lease(node)
    return decode_notice(node, said.value, 0.0 if lease is None else lease.left_s)
