"""The gRPC side of a node: where it listens, which services it has, how it stops."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from node.config import Address
from node.errors import ListenError
from node.migration import wire
from node.migration_service import MigrationService
from node.pb.v1 import session_pb2_grpc
from node.placement.fleet import Fleet
from node.session_service import SERVICE as SESSION_SERVICE
from node.session_service import SessionService
from node.trust import (
    Gate,
    GateInterceptor,
    LiveCredentials,
    Role,
    open_channel,
    server_credentials,
    server_options,
)

if TYPE_CHECKING:
    from node.dataplane.intake import Intake
    from node.server import Node

log = logging.getLogger(__name__)

#: How long running calls may go on when the node stops.
GRACE_S: Final = 5.0


def connector(live: LiveCredentials) -> Callable[[str, Address], grpc.aio.Channel]:
    """What opens channels to other nodes, with the credentials of that moment."""

    def connect(peer: str, address: Address) -> grpc.aio.Channel:
        credentials = live.current()
        return open_channel(credentials, credentials.peer(peer, Role.NODE), address)

    return connect


def bind(address: Address, live: LiveCredentials) -> tuple[grpc.aio.Server, Address]:
    """A server that has its port, and does not answer yet.

    Raises:
        ListenError: The address cannot be bound.
    """
    server = grpc.aio.server(interceptors=[GateInterceptor(Gate(live))], options=server_options())
    try:
        port = server.add_secure_port(str(address), server_credentials(live))
    except RuntimeError as error:
        raise ListenError(f"{address}: cannot listen there (in use, or not ours)") from error
    if port == 0:
        raise ListenError(f"{address}: cannot listen there (in use, or not ours)")
    return server, Address(address.host, port)


def add_services(
    server: grpc.aio.Server,
    live: LiveCredentials,
    node: Node,
    packs_dir: Path,
    fleet: Fleet,
    intake: Intake | None = None,
) -> health.aio.HealthServicer:
    """Give the server what every node has; returns the one that says whether it answers."""
    gate = Gate(live)
    server.add_generic_rpc_handlers((MigrationService(node.transfers, gate, intake).handlers(),))
    session_pb2_grpc.add_SessionServicer_to_server(
        SessionService(node.sessions, node.moves, packs_dir, node.depot, node.tier, fleet), server
    )
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    names = (wire.SERVICE, SESSION_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return health_service
