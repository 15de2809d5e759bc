"""This node's lease in the directory, and the fence that falls when it is over.

While the lease runs nobody takes this node's sessions over; once it is over somebody may. So the
node must stop serving before the directory would let another begin, and it must find that out by
itself, without a message: it may have been paused, or the directory may be away. Its own end of
the lease therefore counts from when a renewal was *sent*, on a clock that runs during sleep, and
lies a tenth of the lease earlier than the directory's.

A lease that was over and is renewed again is another one (``mark``): what was computed under the
one before may be stale, since in between somebody else may have owned the session and given it
back. So an operation carries the mark it began under to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import Final

from kvpack.errors import KvpackError
from node.clock import Clock
from node.config import LEASE_S
from node.directory import INCARNATION_BYTES, Directory, DirectoryState
from node.errors import DirectoryError, FencedError, LeaseLostError

log = logging.getLogger(__name__)

#: Renewals in one lease: two may fail, and the third still comes in time.
RENEWALS: Final = 3

#: After one that failed the next is tried no sooner than in this part of the time between two.
_RETRY: Final = 0.2

#: The part of a lease that is not used. It pays for clocks that run unequally fast and for the
#: way from the last look at the lease to the socket.
UNUSED: Final = 0.1

#: How long a node that stops waits for the directory to note it.
EXPIRE_S: Final = 2.0


class NodeLease:
    """The lease of one process. ``require`` costs one look at a clock.

    Args:
        directory: Where it is held.
        node: Whose.
        clock: Runs during sleep; not the wall clock.
        ttl_s: How long it runs without a renewal.
    """

    def __init__(
        self, directory: Directory, node: str, clock: Clock, ttl_s: float = LEASE_S
    ) -> None:
        self._directory = directory
        self._node = node
        self._clock = clock
        self._ttl_s = ttl_s
        self._incarnation = secrets.token_bytes(INCARNATION_BYTES)
        self._end_s = float("-inf")
        self._sent_s = float("-inf")
        self._failed = False
        self._mark = 0
        self._lost: LeaseLostError | None = None
        self._asking: asyncio.Task[None] | None = None
        self._refused = 0

    @property
    def ttl_s(self) -> float:
        """How long it runs without a renewal, in seconds."""
        return self._ttl_s

    @property
    def refused(self) -> int:
        """How often :meth:`require` refused."""
        return self._refused

    def left_s(self) -> float:
        """Seconds until the fence falls; 0 where it has."""
        if self._lost is not None:
            return 0.0
        return max(0.0, self._end_s - self._clock.now_s())

    def require(self, mark: int | None = None) -> int:
        """The present lease's mark. With ``mark``: only if it is still that lease.

        Raises:
            FencedError: The lease is over, was over in between, or another process has it.
        """
        if self._lost is not None:
            raise self._fenced(str(self._lost))
        if self._clock.now_s() >= self._end_s:
            raise self._fenced(f"the lease of node {self._node} is over")
        if mark is not None and mark != self._mark:
            raise self._fenced(f"the lease of node {self._node} was over in between")
        return self._mark

    def _fenced(self, why: str) -> FencedError:
        self._refused += 1
        return FencedError(f"fenced: {why}")

    async def start(self) -> None:
        """Register. Ends the lease of an earlier process of this name.

        Raises:
            DirectoryError: It cannot be reached.
        """
        sent_s = self._sent_s = self._clock.now_s()
        await self._directory.register(self._node, self._incarnation, self._ttl_s)
        self._granted(sent_s)

    async def run(self) -> None:
        """Renew until cancelled, or until another process has the lease."""
        while self._lost is None:
            await asyncio.sleep(self._pause_s())
            await self.renew()

    def _pause_s(self) -> float:
        """Until the next renewal, counted as the lease is: from when the last one was sent.

        One that the directory answered late leaves little of a lease. Counted from its answer the
        next one would come when that is over, though the directory is there again.
        """
        period_s = self._ttl_s / RENEWALS
        due_s = self._sent_s + period_s - self._clock.now_s()
        return min(period_s, max(due_s, period_s * _RETRY if self._failed else 0.0))

    async def renew(self) -> None:
        """Ask for a renewal and wait for it for a third of a lease; never two at once."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait({self._asking}, timeout=self._ttl_s / RENEWALS)

    async def close(self) -> None:
        """End the lease: what this node owns may be taken over at once."""
        self._end_s = float("-inf")
        if self._asking is not None:
            self._asking.cancel()
        with contextlib.suppress(DirectoryError, TimeoutError):
            async with asyncio.timeout(EXPIRE_S):
                await self._directory.expire(self._node, self._incarnation)

    async def _ask(self) -> None:
        sent_s = self._sent_s = self._clock.now_s()
        self._failed = True
        try:
            await self._renew()
        except LeaseLostError as error:
            log.error("node %s serves no session any more: %s", self._node, error)
            self._lost = error
        except KvpackError as error:
            # Whatever it was, the lease is not renewed: the fence falls by itself.
            left_s = max(0.0, self._end_s - self._clock.now_s())
            log.warning("lease not renewed, %.1f s left: %s", left_s, error)
        else:
            self._failed = False
            self._granted(sent_s)

    async def _renew(self) -> DirectoryState:
        return await self._directory.renew(self._node, self._incarnation, self._ttl_s)

    def _granted(self, sent_s: float) -> None:
        if self._clock.now_s() >= self._end_s:
            # Nobody fences the first one; every later one that comes too late was a gap.
            if self._mark:
                log.warning("node %s was fenced; its lease runs again", self._node)
            self._mark += 1
        self._end_s = max(self._end_s, sent_s + self._ttl_s * (1 - UNUSED))
