"""Steps of a plan as calls: what a node has, what it knows of others, and one session moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kvpack.wire import decode_layout
from node.client import NodeClient
from node.config import Address
from node.errors import PeerUnavailableError, UsageError
from node.pb.v1 import session_pb2 as pb
from node.placement.describing import row_bytes
from node.placement.fleet import fleet_value
from node.placement.values import NodeState, SessionLoad, Step
from node.transient import is_transient

#: A move needs a row and a boundary token.
TOKENS_MIN: Final = 2


@dataclass(frozen=True, slots=True)
class Held:
    """The sessions of one node that can move, and those that have nothing to move yet.

    Attributes:
        loads: By id.
        short: Ids of those with fewer than two tokens.
    """

    loads: tuple[SessionLoad, ...]
    short: tuple[str, ...]


async def held_by(client: NodeClient) -> Held:
    """What the client's node has.

    Raises:
        PeerUnavailableError: It does not answer.
        PeerAnswerError: It refuses.
    """
    layout = decode_layout((await client.describe()).layout)
    replies = [one for one in await client.list_sessions() if not is_transient(one.session_id)]
    loads = [
        SessionLoad(one.session_id, row_bytes(layout, one.next_index))
        for one in replies
        if one.next_index >= TOKENS_MIN
    ]
    short = [one.session_id for one in replies if one.next_index < TOKENS_MIN]
    return Held(tuple(loads), tuple(short))


async def fleet_of(client: NodeClient) -> tuple[NodeState, ...]:
    """The nodes that the client's node knows, itself among them.

    Raises:
        PeerUnavailableError: It does not answer.
        PeerAnswerError: It refuses.
    """
    return fleet_value(await client.fleet())


def named(nodes: Iterable[NodeState], name: str) -> NodeState:
    """The node of that name.

    Raises:
        UsageError: It says nothing of itself.
    """
    for one in nodes:
        if one.name == name:
            return one
    raise UsageError(f"node {name}: says nothing of itself; was it started with --grpc?")


async def move_one(
    client: NodeClient,
    step: Step,
    address: Address,
    *,
    accept_compatible: bool,
    compress: bool = False,
    report: Callable[[int], None] = lambda sent_bytes: None,
) -> pb.MigrateResult:
    """Move one session from the client's node.

    Args:
        client: Of the node that has it.
        step: Which one, and where to.
        address: Where the target listens.
        accept_compatible: A continuation that is not bit-exact will do.
        compress: Rows are compressed where that saves 3 % or more.
        report: Told of payload bytes that were sent.

    Raises:
        PeerAnswerError: It did not come about; the session serves where it was, or it is gone.
        PeerUnavailableError: Nobody knows; the move may go on by itself.
    """
    session = await client.get(step.session.session_id)
    request = pb.MigrateRequest(
        session_id=session.session_id,
        token=session.token,
        target_node=step.target,
        target_address=str(address),
        accept_compatible=accept_compatible,
        compress=compress,
    )
    async for event in client.migrate(request):
        if event.WhichOneof("event") == "result":
            return event.result
        report(event.progress.sent_payload_bytes)
    raise PeerUnavailableError(f"node {client.node}: a move ended without a result")
