"""The nodes that one node knows: itself, and those it has pinned, so that it may send there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvpack.errors import KvpackError
from node.credentials import CredentialsSource, Role
from node.directory import Directory
from node.pb.v1 import session_pb2 as pb
from node.placement.notice import decode_notice, encode_notice
from node.placement.publishing import Publisher, read_fleet
from node.placement.values import NodeState


class Fleet:
    """What can be known of the nodes around.

    Args:
        directory: Where their notices are.
        live: Whose pins say who may be sent to.
        describe: What this node is at the moment.
        publisher: Keeps that in the directory.
    """

    def __init__(
        self,
        directory: Directory,
        live: CredentialsSource,
        describe: Callable[[], NodeState],
        publisher: Publisher,
    ) -> None:
        self._directory = directory
        self._live = live
        self._describe = describe
        self._publisher = publisher

    def poke(self) -> None:
        """This node changed: others are to know soon."""
        self._publisher.poke()

    async def look(self) -> tuple[NodeState, ...]:
        """All of them, by name; this one as it is now.

        Raises:
            CredentialsError: The pins cannot be read.
            DirectoryError: Nothing can be read of the others.
        """
        own = self._describe()
        credentials = await asyncio.to_thread(self._live.current)
        names = {peer.name for peer in credentials.peers if peer.role is Role.NODE} - {own.name}
        others = await read_fleet(self._directory, names)
        return tuple(sorted((own, *others), key=lambda one: one.name))


def fleet_message(nodes: Iterable[NodeState]) -> pb.FleetReply:
    """``nodes`` as a message."""
    return pb.FleetReply(
        nodes=[
            pb.FleetNode(
                node=one.name,
                notice=encode_notice(one),
                # Rounded up: a lease that still runs is not told as over.
                lease_left_ms=int(-(-one.lease_left_s * 1000 // 1)),
            )
            for one in nodes
        ]
    )


def fleet_value(message: pb.FleetReply) -> tuple[NodeState, ...]:
    """The nodes that ``message`` tells of; one whose notice cannot be read is left out."""
    found = []
    for one in message.nodes:
        try:
            found.append(decode_notice(one.node, one.notice, one.lease_left_ms / 1000))
        except KvpackError:
            # Of a later version perhaps: what is not understood is no target.
            continue
    return tuple(found)
