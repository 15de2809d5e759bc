"""The target's half of plain data planes: gives tickets, and lets streams that show one in."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Final, TypeVar

from kvpack.errors import KvpackError
from node.config import Address
from node.credentials import PinnedPeer
from node.dataplane.frames import DisturbedError, decode_hello
from node.dataplane.options import Plane, PlaneOptions, plane_message, plane_value
from node.dataplane.tickets import TICKET_S, Ticket, Tickets
from node.errors import InventoryError
from node.migration.book import OPEN_MAX
from node.migration.inbound import HangUp
from node.migration.journal import TransferKey
from node.migration.streams import Burst
from node.migration.target import Transfers
from node.migration.versions import PLANES
from node.migration.wire import SMALL_BYTES_MAX, Piece, decode_piece
from node.pb.v1 import migration_pb2 as pb
from node.trust import STREAM_AGE_S, Gate

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Streams at once, over all plain planes: one of each transfer, and one that is just being closed.
STREAMS_MAX: Final = 2 * OPEN_MAX

#: Strangers who knock are told of in the log this often, with their number.
_TOLD_EVERY_S: Final = 10.0


class Intake:
    """Who may open which stream, and what becomes of it.

    Args:
        options: Which planes there are, and for whom.
        transfers: What streams go into.
        gate: Knows who is pinned.

    Attributes:
        streams: How many are open.
    """

    def __init__(self, options: PlaneOptions, transfers: Transfers, gate: Gate) -> None:
        self._options = options
        self._transfers = transfers
        self._gate = gate
        self.tickets = Tickets()
        self.addresses: dict[Plane, Address] = {}
        self.streams = 0
        self._refused = 0
        self._told_s = -_TOLD_EVERY_S

    def offer(
        self, peer: PinnedPeer, key: TransferKey, minor: int, wish: int
    ) -> pb.PlaneTicket | None:
        """What the answer to a Prepare says of the next stream; None: it is Push, as ever.

        A stream that was open was ended by that Prepare: whoever prepares again begins anew.
        """
        self.tickets.revoke(key)
        plane = plane_value(wish)
        address = None if plane is None else self.addresses.get(plane)
        if plane is None or address is None or minor < PLANES:
            return None
        if peer.name not in self._options.senders:
            return None
        ticket = self.tickets.issue(plane, key, peer)
        return pb.PlaneTicket(
            plane=plane_message(plane),
            address=str(address),
            number=ticket.number,
            token=ticket.token,
            frame_key=ticket.frame_key,
            valid_ms=round(1000 * TICKET_S),
        )

    def admit(self, plane: Plane, hello: bytes) -> Ticket | None:
        """The ticket that a connection shows, if it may open a stream now."""
        full = self.streams >= STREAMS_MAX
        ticket = None if full else self.tickets.redeem(plane, decode_hello(hello))
        if ticket is None or not self._gate.holds(ticket.peer):
            self.refused()
            return None
        return ticket

    def refused(self) -> None:
        """Somebody was turned away. Strangers must not fill the log: it says so now and then."""
        self._refused += 1
        now = time.monotonic()
        if now - self._told_s >= _TOLD_EVERY_S:
            log.warning("data plane: %d connections without a valid token", self._refused)
            self._refused, self._told_s = 0, now

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """Be one of the open streams, from a valid token until the connection is closed."""
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1

    async def take(
        self, ticket: Ticket, messages: AsyncIterator[memoryview], hang_up: HangUp
    ) -> bool:
        """Take the pieces of one stream, the very way that those of Push go.

        Args:
            ticket: What it showed.
            messages: Its frames.
            hang_up: Ends them. Called when the transfer ends, or another stream of it is to begin.

        Returns:
            Whether all of them were taken; if not, the stream is to be closed without a word. What
            is wrong with the transfer the source learns over mTLS.
        """
        pieces = self._pieces(ticket, messages)
        return await self._ended_well(ticket, self._transfers.push(ticket.key, pieces, hang_up))

    async def take_bursts(
        self, ticket: Ticket, bursts: AsyncIterator[Burst], hang_up: HangUp
    ) -> bool:
        """As :meth:`take`, of pieces that a thread takes."""
        bursts = self._pinned(ticket, bursts)
        pushed = self._transfers.push_bursts(ticket.key, bursts, hang_up)
        return await self._ended_well(ticket, pushed)

    async def _ended_well(self, ticket: Ticket, pushed: Coroutine[Any, Any, int]) -> bool:
        try:
            await pushed
        except DisturbedError as error:
            log.warning("%s: its %s stream ended: %s", ticket.key, ticket.plane.value, error)
        except KvpackError as error:
            log.warning("%s: its %s stream was refused: %s", ticket.key, ticket.plane.value, error)
        else:
            return True
        return False

    async def _pieces(
        self, ticket: Ticket, messages: AsyncIterator[memoryview]
    ) -> AsyncIterator[Piece]:
        async for message in self._pinned(ticket, messages):
            yield read_piece(message)

    async def _pinned(self, ticket: Ticket, items: AsyncIterator[_T]) -> AsyncIterator[_T]:
        """``items``, for as long as their source is pinned."""
        looked_s = time.monotonic()
        async for item in items:
            if time.monotonic() - looked_s >= STREAM_AGE_S:
                self.require_pinned(ticket)
                looked_s = time.monotonic()
            yield item

    def require_pinned(self, ticket: Ticket) -> None:
        """Whoever got the ticket must still be pinned: for plain streams, too, once a second.

        Raises:
            DisturbedError: It is not.
        """
        if not self._gate.holds(ticket.peer, STREAM_AGE_S):
            raise DisturbedError("its source is not pinned any more")


def read_piece(message: memoryview) -> Piece:
    """The piece of one frame; of a chunk object, a view of it inside ``message``.

    Raises:
        FormatError: It is none.
        InventoryError: The name of a transfer: here the ticket names it.
    """
    small = len(message) <= SMALL_BYTES_MAX
    piece = decode_piece(bytes(message) if small else message)
    if not isinstance(piece, memoryview) and isinstance(piece, pb.TransferRef):
        raise InventoryError("the ticket names the transfer")
    return piece
