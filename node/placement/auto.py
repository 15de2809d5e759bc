"""``kvnode migrate --to auto``: the owner of a session is asked where it could go."""

from __future__ import annotations

from kvpack.wire import decode_layout
from node.client import NodeClient
from node.config import Address
from node.errors import SessionStateError
from node.pb.v1 import session_pb2 as pb
from node.placement.choosing import choose
from node.placement.describing import row_bytes
from node.placement.moving import fleet_of, named
from node.placement.values import SessionLoad, Unplaced

#: What stands in the place of a target's address.
AUTO = "auto"


async def auto_target(
    client: NodeClient, session: pb.SessionReply, *, accept_compatible: bool
) -> tuple[str, Address]:
    """Name and address of the node that takes ``session``, which the client's node has.

    Raises:
        SessionStateError: No node can take it; the message says why of all.
        PeerUnavailableError: The node does not answer.
        PeerAnswerError: It refuses.
    """
    layout = decode_layout((await client.describe()).layout)
    load = SessionLoad(session.session_id, row_bytes(layout, session.next_index))
    nodes = await fleet_of(client)
    kind = named(nodes, client.node).kind
    found = choose(load, client.node, kind, nodes, accept_compatible=accept_compatible)
    if isinstance(found, Unplaced):
        raise SessionStateError(found.sentence())
    return found.target, Address.parse(named(nodes, found.target).address)
