"""The data planes by name, and what a node is told about them."""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from node.config import Address
from node.errors import UsageError
from node.http.options import is_loopback
from node.pb.v1 import protocol_pb2 as pb


class Plane(enum.Enum):
    """Where the pieces of a stream travel. All else of a move is mTLS, whatever this is."""

    MTLS = "mtls"
    GRPC_PLAIN = "grpc-plain"
    SOCKET = "socket"

    @property
    def is_plain(self) -> bool:
        """Whether what it carries is protected by nothing but its own seals."""
        return self is not Plane.MTLS


#: What ``--data-plane`` of a command takes.
NAMES: Final = tuple(plane.value for plane in Plane)

PLAIN: Final = tuple(plane for plane in Plane if plane.is_plain)

_MESSAGES: Final = {
    Plane.MTLS: pb.DATA_PLANE_MTLS,
    Plane.GRPC_PLAIN: pb.DATA_PLANE_GRPC_PLAIN,
    Plane.SOCKET: pb.DATA_PLANE_SOCKET,
}


def plane_message(plane: Plane | None) -> pb.DataPlane.ValueType:
    """``plane`` as a message has it; None: nobody named one."""
    return pb.DATA_PLANE_UNSPECIFIED if plane is None else _MESSAGES[plane]


def plane_value(message: int) -> Plane | None:
    """The plane that a message names; None: it names none, or one that is not known here."""
    return next((plane for plane, value in _MESSAGES.items() if value == message), None)


@dataclass(frozen=True, slots=True)
class PlaneAddress:
    """Where a plain data plane listens. Port 0 lets the system choose."""

    plane: Plane
    address: Address

    @classmethod
    def parse(cls, text: str) -> PlaneAddress:
        """Read ``PLANE=HOST:PORT``.

        Raises:
            UsageError: It is written otherwise, or is no plane that has a listener of its own.
        """
        name, equals, address = text.partition("=")
        known = [plane.value for plane in PLAIN]
        if not equals or name not in known:
            raise UsageError(
                f"--data-plane {text}: expected {' or '.join(f'{one}=HOST:PORT' for one in known)}"
            )
        return cls(Plane(name), Address.parse(address))


def parse_towards(texts: Iterable[str]) -> dict[str, Plane]:
    """Read ``NODE=PLANE`` of each.

    Raises:
        UsageError: It is written otherwise, or a node is named twice.
    """
    found: dict[str, Plane] = {}
    for text in texts:
        node, equals, name = text.partition("=")
        if not node or not equals or name not in NAMES:
            raise UsageError(f"--data-plane-to {text}: expected NODE={'|'.join(NAMES)}")
        if node in found:
            raise UsageError(f"--data-plane-to {text}: node {node} is named twice")
        found[node] = Plane(name)
    return found


@dataclass(frozen=True, slots=True)
class PlaneOptions:
    """What a node is told about data planes. Without a word of it nothing but mTLS is there.

    Attributes:
        listens: Where plain planes listen.
        senders: Pinned nodes that may send over them.
        without_tls: Somebody said that other machines may reach a listener that has no TLS.
        towards: The plane that moves to a node ask for, where the move itself names none.

    Raises:
        UsageError: They do not go together, or a listener would be opened that nobody asked for.
    """

    listens: tuple[PlaneAddress, ...] = ()
    senders: frozenset[str] = frozenset()
    without_tls: bool = False
    towards: Mapping[str, Plane] = field(default_factory=dict)

    def __post_init__(self) -> None:
        planes = [one.plane for one in self.listens]
        if len(set(planes)) != len(planes):
            raise UsageError("--data-plane: each plane once")
        if bool(self.listens) != bool(self.senders):
            raise UsageError("--data-plane and --data-plane-from: expected both or neither")
        for one in self.listens:
            self._check(one)

    def _check(self, one: PlaneAddress) -> None:
        where = f"--data-plane {one.plane.value}={one.address}"
        if _is_any(one.address.host):
            raise UsageError(f"{where}: expected an address that the other nodes connect to")
        if not self.without_tls and not is_loopback(one.address.host):
            raise UsageError(
                f"{where}: other machines could reach it, and it has no TLS: sizes are seen and "
                "streams can be broken there; say --data-plane-without-tls if that is meant"
            )


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
