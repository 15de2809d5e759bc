"""How a node tells the service manager that started it how far it is (sd_notify(3)).

One datagram for each message, to the socket that systemd names. Where there is none, nothing is
sent. A manager that does not listen any more costs a line in the log and nothing else.
"""

from __future__ import annotations

import logging
import socket
from typing import Final

log = logging.getLogger(__name__)

#: The node accepts calls.
READY: Final = "READY=1"

#: The node was told to stop, and lets answers end.
STOPPING: Final = "STOPPING=1"

#: What a send may take: the manager's queue may be full, and a node does not wait for that.
_SEND_S: Final = 1.0


def notify(place: str, state: str) -> bool:
    """Send ``state`` to the socket at ``place``; returns whether it was sent.

    Args:
        place: What ``NOTIFY_SOCKET`` says: a path, or ``@`` and an abstract name. Empty: nobody
            wants to know.
        state: :data:`READY` or :data:`STOPPING`.
    """
    if not place:
        return False
    # An abstract name begins with a zero byte, which no environment can hold.
    address = f"\0{place[1:]}" if place.startswith("@") else place
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(_SEND_S)
            sender.sendto(state.encode(), address)
    except OSError as error:
        log.warning("the service manager was not told %s: %s", state, error)
        return False
    return True
