"""The plain data planes of one node: bound at its start, open once it serves, if there are any.

What they are made of is imported where there are some: another node starts sooner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.dataplane.options import Plane, PlaneAddress, PlaneOptions

if TYPE_CHECKING:
    from node.credentials import CredentialsSource
    from node.dataplane.grpc_server import GrpcPlane
    from node.dataplane.intake import Intake
    from node.dataplane.socket_server import SocketPlane
    from node.migration.target import Transfers


class PlaneListeners:
    """What listens without TLS; nothing, unless somebody asked for it. The ports are taken here.

    Attributes:
        intake: Who is let in; None before it is started, and where there is no plain plane.

    Raises:
        ListenError: An address cannot be bound.
    """

    def __init__(self, options: PlaneOptions | None) -> None:
        self.intake: Intake | None = None
        self._options = options
        self._listening = [] if options is None else [_bind(one) for one in options.listens]

    async def start(self, transfers: Transfers, live: CredentialsSource) -> Intake | None:
        """Let streams in; None: there is no plain plane here."""
        if self._options is None or not self._listening:
            return None
        from node.dataplane.intake import Intake
        from node.trust import Gate

        self.intake = Intake(self._options, transfers, Gate(live))
        for one in self._listening:
            await one.start(self.intake)
        return self.intake

    async def close(self) -> None:
        """Close the ports and every stream."""
        for one in self._listening:
            await one.close()


def _bind(one: PlaneAddress) -> SocketPlane | GrpcPlane:
    if one.plane is Plane.SOCKET:
        from node.dataplane.socket_server import SocketPlane

        return SocketPlane(one.address)
    from node.dataplane.grpc_server import GrpcPlane

    return GrpcPlane(one.address)
