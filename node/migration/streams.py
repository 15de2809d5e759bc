"""The pieces of a transfer into one node, from whatever carries them.

One by one on the event loop, or in bursts: then a thread takes what has come, so that neither waits
for the other, and the loop hears of it a few times a second. Either way one piece at a time of one
transfer is taken, and nobody else steps the transfer meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from kvpack.errors import KvpackError
from node.migration.book import Book, to_the_end
from node.migration.inbound import HangUp, Inbound
from node.migration.journal import TransferKey
from node.migration.table import TargetEvent
from node.migration.wire import Piece

#: Takes one piece in a thread; False: it is for the loop to take, and nothing has happened.
Take = Callable[[Piece], bool]

#: Some pieces that have come, and what comes while they are taken; over in a moment. It gives the
#: last of them where that is for the loop to take.
Burst = Callable[[Take], Awaitable[Piece | None]]


class Streams(Book):
    """The transfers into one node, as their streams see them."""

    async def push(
        self, key: TransferKey, pieces: AsyncIterator[Piece], hang_up: HangUp | None = None
    ) -> int:
        """Take the chunks of one stream. Where it ends says nothing: only Seal does.

        Args:
            key: The transfer.
            pieces: What comes, in order.
            hang_up: As in :meth:`Inbound.stream`.

        Returns:
            Chunks held.

        Raises:
            TransferNotFoundError: No such transfer.
            TransferStateError: It is sealed or ended, or another stream is open.
            KvpackError: A chunk was refused; the whole transfer is given up.
        """
        inbound = self._find(key)
        with inbound.stream(hang_up) as number:
            inbound.step(TargetEvent.PIECE)
            async for piece in pieces:
                if not await self._take_at_once(inbound, number, piece):
                    await to_the_end(self._take(inbound, number, piece))
        return inbound.receiver.objects

    async def push_bursts(
        self, key: TransferKey, bursts: AsyncIterator[Burst], hang_up: HangUp
    ) -> int:
        """As :meth:`push`, of a stream whose pieces are taken by a thread.

        Returns:
            Chunks held.

        Raises:
            KvpackError: As :meth:`push`.
        """
        inbound = self._find(key)
        with inbound.stream(hang_up) as number:
            inbound.step(TargetEvent.PIECE)
            async for burst in bursts:
                await to_the_end(self._take_burst(inbound, number, burst))
        return inbound.receiver.objects

    async def _take_at_once(self, inbound: Inbound, number: int, piece: Piece) -> bool:
        """Take a piece that needs no waiting, and so no task that would outlive a hang-up."""
        if inbound.lock.locked():
            return False
        inbound.require_stream(number)
        inbound.step(TargetEvent.PIECE)
        try:
            return inbound.receiver.take_at_once(piece)
        except KvpackError as error:
            await to_the_end(self._refuse(inbound, error))
            raise

    async def _take(self, inbound: Inbound, number: int, piece: Piece) -> None:
        async with inbound.lock:
            inbound.require_stream(number)
            inbound.step(TargetEvent.PIECE)
            try:
                await inbound.receiver.take_piece(piece)
            except KvpackError as error:
                await self._give_up_piece(inbound, error)
                raise

    async def _take_burst(self, inbound: Inbound, number: int, burst: Burst) -> None:
        async with inbound.lock:
            inbound.require_stream(number)
            inbound.step(TargetEvent.PIECE)
            try:
                left = await burst(inbound.receiver.take_in_thread)
                if left is not None:
                    await inbound.receiver.take_piece(left)
            except KvpackError as error:
                await self._give_up_piece(inbound, error)
                raise
