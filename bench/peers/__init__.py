"""What somebody would take instead, on the same bytes. One module each, by the name of the peer.

A module that sends bytes to a process that receives them (:mod:`bench.peers.pair` drives both)::

    VARIANTS = {"name": Variant("title", "what it protects")}
    def receive(link, buffer, variant):
        "Say with ``link.listening(address)`` where it is; return when ``buffer`` is full."
    def send(address, payload, variant):
        "Connect; give the work that is timed: it returns when the receiver has every byte."

A module that writes bytes somewhere and reads them back in one process::

    def store(payload, folder, variant) -> tuple[dict[str, float], buffer]:
        "Seconds of each part by name, and the bytes as they came back."

Both import what they need inside these functions. What cannot be imported is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

NOTHING = "nothing"
ENCRYPTED = "encryption and authentication in transit"
MUTUAL = "encryption and authentication in transit, both ends by certificate"
KEYS = "encryption and authentication in transit, server by key"
SERVER = "encryption and authentication in transit, server by certificate"


@dataclass(frozen=True)
class Variant:
    """One way to use a peer.

    Attributes:
        title: For people.
        protects: What becomes of the bytes.
        environment: For its processes.
        pieces: Into how many transfers the payload is cut.
    """

    title: str
    protects: str
    environment: tuple[tuple[str, str], ...] = ()
    pieces: int = 1
