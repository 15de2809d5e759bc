"""One-time tickets: what lets one stream of one transfer in, once, for some seconds."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from node.credentials import PinnedPeer
from node.dataplane.frames import KEY_BYTES, TOKEN_BYTES, Hello
from node.dataplane.options import Plane
from node.migration.journal import TransferKey

#: How long a source may take from the answer to its Prepare to its hello.
TICKET_S: Final = 10.0

#: Transfers under way are fewer; what is beyond is an attempt that nobody waits for any more.
TICKETS_MAX: Final = 16


@dataclass(frozen=True, slots=True, repr=False)
class Ticket:
    """The right to open one stream. Its repr shows neither token nor key.

    Attributes:
        number: By which it is found; not a secret.
        plane: The only plane that it is good for.
        key: The transfer that the stream is of.
        peer: To whom it was given, over mTLS.
        token: Shown in the hello.
        frame_key: Never shown.
        until_s: On the monotonic clock.
    """

    number: int
    plane: Plane
    key: TransferKey
    peer: PinnedPeer
    token: bytes
    frame_key: bytes
    until_s: float

    def __repr__(self) -> str:
        return f"Ticket({self.plane.value}, {self.key})"


class Tickets:
    """The tickets that were given out and not yet used: at most one for each transfer."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._tickets: dict[int, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def issue(self, plane: Plane, key: TransferKey, peer: PinnedPeer) -> Ticket:
        """A new ticket of a transfer; one that it had before is worth nothing from now on."""
        self.revoke(key)
        self._forget_late()
        ticket = Ticket(
            secrets.randbits(64), plane, key, peer, secrets.token_bytes(TOKEN_BYTES),
            secrets.token_bytes(KEY_BYTES), self._now() + TICKET_S,
        )  # fmt: skip
        self._tickets[ticket.number] = ticket
        return ticket

    def redeem(self, plane: Plane, hello: Hello | None) -> Ticket | None:
        """The ticket that ``hello`` shows, which is used up by that; None: it is none of ours.

        A wrong token uses nothing up: else a number alone would be enough to spoil a stream.
        """
        ticket = None if hello is None else self._tickets.get(hello.number)
        # The same work whether or not there is such a ticket.
        expected = bytes(TOKEN_BYTES) if ticket is None else ticket.token
        shown = bytes(TOKEN_BYTES) if hello is None else hello.token
        same = hmac.compare_digest(expected, shown)
        if ticket is None or not same or ticket.plane is not plane:
            return None
        del self._tickets[ticket.number]
        return ticket if self._now() < ticket.until_s else None

    def revoke(self, key: TransferKey) -> None:
        """Let no stream of that transfer in by a ticket from before."""
        for number in [n for n, one in self._tickets.items() if one.key == key]:
            del self._tickets[number]

    def _forget_late(self) -> None:
        now = self._now()
        for number in [n for n, one in self._tickets.items() if one.until_s <= now]:
            del self._tickets[number]
        while len(self._tickets) >= TICKETS_MAX:
            del self._tickets[next(iter(self._tickets))]
