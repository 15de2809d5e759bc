"""Which data plane the streams of one move take, and why it is another than was asked for.

A plain plane is a wish. Where the target does not grant it, or streams over it break three times,
the move goes on over mTLS: the log and the result say so. Each stream takes a ticket of its own,
which came with the answer to the Prepare before it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, cast

from kvpack.errors import KvpackError
from node.dataplane.offered import Offered, read_ticket
from node.dataplane.options import Plane, plane_message
from node.migration import wire
from node.migration.versions import PLANES, Minors, named
from node.pb.v1 import migration_pb2 as pb

if TYPE_CHECKING:
    from node.dataplane.grpc_call import GrpcCall
    from node.dataplane.socket_call import SocketCall

log = logging.getLogger(__name__)

#: Streams over a plain plane that may break; the next one is mTLS.
BREAKS_MAX: Final = 3

_STATUS_S: Final = 5.0


class Lane:
    """The plane of one move's streams.

    Args:
        wished: What was asked for.
        node: The target.
        meter: Counts the bytes.

    Attributes:
        used: The plane of the last stream.
        fallback: Why it is not the one that was asked for; empty while it may be.
    """

    def __init__(self, wished: Plane, node: str, meter: wire.Meter) -> None:
        self._wished = wished
        self._node = node
        self._meter = meter
        self._offered: Offered | None = None
        self._call: SocketCall | GrpcCall | None = None
        self._breaks = 0
        self.used = Plane.MTLS
        self.fallback = ""

    def wish(self, request: pb.PrepareRequest, speaks: Minors) -> None:
        """Write into ``request`` what is asked for. It stays there: a Prepare is repeated as is."""
        if self._wished.is_plain and speaks.highest >= PLANES:
            request.data_plane = plane_message(self._wished)
        elif self._wished.is_plain:
            self._fall_back(f"this node speaks {named(speaks.highest)}, which has no data planes")

    def answered(self, reply: pb.PrepareReply) -> None:
        """Take what the target says about the next stream."""
        self._offered = None
        if not self._wished.is_plain or self.fallback:
            return
        if reply.protocol_minor < PLANES:
            self._fall_back(f"it speaks {named(reply.protocol_minor)}, which has no data planes")
        elif not reply.HasField("plane"):
            self._fall_back(f"it does not offer {self._wished.value} to this node")
        else:
            try:
                self._offered = read_ticket(reply.plane, self._wished, self._node)
            except KvpackError as error:
                self._fall_back(str(error))

    def stub(self, mtls: wire.MigrationStub, transfer: pb.TransferRef) -> wire.MigrationStub:
        """What the next stream is pushed by. The ticket is used up by that."""
        offered, self._offered = self._offered, None
        self._call = None
        if offered is None:
            self.used = Plane.MTLS
            return mtls

        async def taken() -> int:
            request = pb.StatusRequest(transfer=transfer)
            status = await wire.ask(mtls.status, request, _STATUS_S, self._node)
            received: int = status.received_objects
            return received

        def push(timeout: float) -> SocketCall | GrpcCall:
            self._call = _call(offered, taken, self._meter, timeout)
            return self._call

        self.used = offered.plane
        log.info("node %s: chunks over %s at %s", self._node, offered.plane.value, offered.address)
        return cast("wire.MigrationStub", _PushAlone(push))

    def broke(self) -> None:
        """The last stream broke."""
        if self._call is None:
            return
        self._breaks += 1
        if not self._call.reached:
            self._fall_back("nobody answers at its address")
        elif self._breaks >= BREAKS_MAX:
            self._fall_back(f"{self._breaks} streams broke")

    def _fall_back(self, why: str) -> None:
        self.fallback = f"{self._wished.value}: node {self._node}: {why}"
        log.warning("%s; chunks go over mTLS", self.fallback)


def _call(
    offered: Offered, taken: Callable[[], Awaitable[int]], meter: wire.Meter, timeout_s: float
) -> SocketCall | GrpcCall:
    # Not at the top: most moves are over mTLS.
    if offered.plane is Plane.SOCKET:
        from node.dataplane.socket_call import SocketCall

        return SocketCall(offered, taken, meter)
    from node.dataplane.grpc_call import GrpcCall

    return GrpcCall(offered, taken, meter, timeout_s)


class _PushAlone:
    """All of a stub that a stream asks for."""

    def __init__(self, push: object) -> None:
        self.push = push
