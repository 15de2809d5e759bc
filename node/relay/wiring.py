"""Both ends of passing on in a running node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from node.grpc_side import connector
from node.relay.passing import Relay
from node.relay.service import RelayService
from node.trust import Gate, LiveCredentials

if TYPE_CHECKING:
    from node.server import Node
    from node.web_side import Entrance


def relaying(entrance: Entrance, node: Node, live: LiveCredentials) -> grpc.GenericRpcHandler:
    """Let the door pass requests on; gives the handlers of the service that answers others.

    Both speak for the one tenant whose key lies in the credentials.
    """
    tenant = node.moves.binding.key.tenant
    directory = node.sessions.directory
    entrance.door.relay = Relay(node.name, directory, connector(live), tenant)
    return RelayService(entrance.app, Gate(live), tenant).handlers()
