"""What a target answered a Prepare about a plain data plane: one ticket, checked."""

from __future__ import annotations

from dataclasses import dataclass

from kvpack import limits
from kvpack.errors import FormatError, KvpackError
from node.config import Address
from node.dataplane.frames import KEY_BYTES, TOKEN_BYTES, Hello
from node.dataplane.options import Plane, plane_value
from node.pb.v1 import migration_pb2 as pb


@dataclass(frozen=True, slots=True, repr=False)
class Offered:
    """The right to open one stream, as its source has it. Its repr shows neither token nor key."""

    plane: Plane
    node: str
    address: Address
    number: int
    token: bytes
    frame_key: bytes

    def __post_init__(self) -> None:
        limits.check_range("plane.token", len(self.token), TOKEN_BYTES, TOKEN_BYTES, "bytes")
        limits.check_range("plane.frame_key", len(self.frame_key), KEY_BYTES, KEY_BYTES, "bytes")

    def __repr__(self) -> str:
        return f"Offered({self.where})"

    @property
    def where(self) -> str:
        """For messages."""
        return f"node {self.node}: {self.plane.value} at {self.address}"

    def hello(self) -> bytes:
        """What the stream begins with."""
        return Hello(self.number, self.token).encode()


def read_ticket(ticket: pb.PlaneTicket, wished: Plane, node: str) -> Offered:
    """The ticket of an answer.

    Raises:
        KvpackError: It is for another plane, or malformed.
    """
    if plane_value(ticket.plane) is not wished:
        raise FormatError("prepare_reply.plane.plane", wished.value, ticket.plane)
    try:
        address = Address.parse(ticket.address)
    except KvpackError as error:
        raise FormatError("prepare_reply.plane.address", "HOST:PORT", "another") from error
    return Offered(wished, node, address, ticket.number, ticket.token, ticket.frame_key)
