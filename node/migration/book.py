"""The transfers into one node: a bounded collection, and how each of them ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from kvpack.errors import AuthenticationError, KvpackError
from node import fault_points
from node.errors import JournalError, NodeBusyError, TransferNotFoundError
from node.migration.admission import Target, let_go, spool_name
from node.migration.inbound import Inbound
from node.migration.journal import TransferKey
from node.migration.messages import Offer
from node.migration.table import TARGET_ENDED, TargetEvent, TargetState
from node.migration.versions import PLANES
from node.migration.watch import MoveWatch, Unwatched
from node.sessions import SESSIONS_MAX
from node.transient import Guests

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Transfers that may be under way at once, from all sources.
OPEN_MAX: Final = 4

#: Ended transfers whose answers are kept for repeated questions.
ENDED_MAX: Final = 256


class Book:
    """What is known of every transfer: those under way, and the last that ended.

    Attributes:
        watch: Told of each transfer that has ended.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.watch: MoveWatch = Unwatched()
        self._inbound: dict[TransferKey, Inbound] = {}

    def under_way(self) -> list[Inbound]:
        """Transfers that have not ended."""
        return [one for one in self._inbound.values() if one.state not in TARGET_ENDED]

    def open_offers(self) -> list[Offer]:
        """What every transfer under way was prepared with."""
        return [one.offer for one in self.under_way()]

    @property
    def guests(self) -> Guests:
        """The sessions that remote prefills wait for."""
        return self._target.guests

    def arrived(self, session_id: str) -> Inbound | None:
        """The newest transfer that brings or brought a session of that name."""
        found = [one for one in self._inbound.values() if one.offer.session_id == session_id]
        return found[-1] if found else None

    def _find(self, key: TransferKey) -> Inbound:
        inbound = self._inbound.get(key)
        if inbound is None:
            raise TransferNotFoundError(f"{key}: unknown here, or lost with a restart")
        return inbound

    def _open_count(self) -> int:
        return len(self.under_way())

    def _check_room(self) -> None:
        count = self._open_count()
        if count >= OPEN_MAX:
            raise NodeBusyError(f"{OPEN_MAX} transfers are under way")
        if len(self._target.sessions) + count >= SESSIONS_MAX:
            raise NodeBusyError(f"this node holds {SESSIONS_MAX} sessions, as many as it may")

    def _forget_ended(self) -> None:
        ended = [key for key, one in self._inbound.items() if one.state in TARGET_ENDED]
        for key in ended[: max(0, len(ended) - ENDED_MAX)]:
            del self._inbound[key]

    def received(self, key: TransferKey) -> int:
        """How many objects a transfer under way has taken, by 1.2 and later; else 0."""
        inbound = self._inbound.get(key)
        return 0 if inbound is None or inbound.minor < PLANES else inbound.receiver.objects

    async def _refuse(self, inbound: Inbound, error: KvpackError) -> None:
        async with inbound.lock:
            await self._give_up_piece(inbound, error)

    async def _give_up_piece(self, inbound: Inbound, error: KvpackError) -> None:
        """A piece was refused, and with it the transfer.

        Of a stream that strangers may write on, a wrong tag says nothing about its source: then
        the stream alone ends, nothing of the piece was taken, and the source sends it again.
        """
        if inbound.is_plain and isinstance(error, AuthenticationError):
            inbound.end_stream()
            log.warning("%s: the stream ended: %s", inbound.offer.key, error)
            return
        await self._give_up(inbound, TargetEvent.PIECE_BAD, error)

    async def _give_up(self, inbound: Inbound, event: TargetEvent, error: KvpackError) -> None:
        if not inbound.permits(event):
            return
        inbound.failure = error
        inbound.step(event)
        log.warning("%s: given up: %s", inbound.offer.key, error)
        await self._discard(inbound)

    async def _discard(self, inbound: Inbound) -> None:
        inbound.forget_session()
        await inbound.receiver.drop()
        fault_points.reach("target.discard.dropped")
        await let_go(self._target, inbound.offer, inbound.base)
        await self._record(inbound)

    async def _record(self, inbound: Inbound) -> None:
        self.watch.arrived(inbound)
        try:
            committed = inbound.state is TargetState.COMMITTED
            pack = spool_name(inbound.offer.key) if committed else ""
            await self._target.journal.record(inbound.offer.key, inbound.state, pack)
        except JournalError as error:
            # After a restart the directory's nonce says the same; only the answer comes later.
            log.error("%s: %s", inbound.offer.key, error)


async def to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Await ``work``; where the caller is cancelled, let it end first.

    A caller that hangs up must not leave a chunk half taken or a commit half done.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is not None:
            log.info("after a hang-up: %s", task.exception())
        raise
