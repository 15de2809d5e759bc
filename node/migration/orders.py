"""What a move is asked for, how far it is, and what came of it: values of the giving end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import grpc.aio

from node.binding import PackBinding
from node.config import Address
from node.dataplane.options import Plane
from node.engine_thread import EngineThread
from node.migration.journal import Journal
from node.migration.timeline import Timeline
from node.migration.versions import OURS, Minors, Speaker, here
from node.pb.v1 import migration_pb2 as pb
from node.sessions import Sessions

#: Between two looks at a directory that is away, or two tries to reach a target.
WAIT_FIRST_S: Final = 0.2
WAIT_MOST_S: Final = 5.0


#: How long a target may be out of reach, without any progress, until the move is given up. Less
#: than the lease after which the target forgets the transfer.
RESUME_S: Final = 45.0


@dataclass(frozen=True, slots=True)
class Source:
    """What every move of one node needs.

    ``resume_s``: how long a target may be out of reach; ``speaks``: versions of the protocol;
    ``towards``: data planes that are asked of targets, by name.
    """

    sessions: Sessions
    engine: EngineThread
    binding: PackBinding
    journal: Journal
    connect: Callable[[str, Address], grpc.aio.Channel]
    resume_s: float = RESUME_S
    speaks: Minors = OURS
    towards: Mapping[str, Plane] = field(default_factory=dict)

    def plane_of(self, order: Order) -> Plane:
        """The data plane that a move asks its target for."""
        return order.data_plane or self.towards.get(order.target, Plane.MTLS)

    @property
    def speaker(self) -> Speaker:
        """This end, as refusals name it."""
        return here(self.sessions.node, self.speaks)


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for.

    Attributes:
        target: The node, by the name in its certificate.
        address: Where it listens.
        accept_compatible: A continuation that is not bit-exact will do.
        copy_as: Name of the target's own session; empty for a move.
        compress: Rows are compressed where that saves 3 % or more: for slow links.
        data_plane: Where chunks travel, if the target lets them; None: as the node was set up.
    """

    target: str
    address: Address
    accept_compatible: bool = False
    copy_as: str = ""
    compress: bool = False
    data_plane: Plane | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a move is."""

    step: str
    computed_tokens: int
    total_tokens: int
    sent_payload_bytes: int
    total_payload_bytes: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A move or copy that came about.

    Attributes:
        session_id: The session on this node.
        order: What was asked for.
        position: Tokens of the cut.
        reply: The target's answer to Commit.
        timeline: When what was sent.
        wire_bytes: All serialized messages, both directions.
        objects: Chunks of the cut.
        data_plane: Of the last stream.
        plane_fallback: Why it is not the one that was asked for; empty where it is.
    """

    session_id: str
    order: Order
    position: int
    reply: pb.CommitReply
    timeline: Timeline
    wire_bytes: int
    objects: int
    data_plane: Plane = Plane.MTLS
    plane_fallback: str = ""


class Patience:
    """A bounded time of trying again, and the pauses between the tries."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._rests_since_s: float | None = None
        self.renew()

    def renew(self) -> None:
        """Something has moved: the time begins anew."""
        self._until = time.monotonic() + self._seconds
        self._pause_s = WAIT_FIRST_S

    def left(self) -> bool:
        """Whether to try again."""
        return time.monotonic() < self._until

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Time in the block up to its last :meth:`came_on` does not count.

        What was waited for until then came. What is waited for after it, and until the block ends,
        may be waited for in vain: that counts.
        """
        self._rests_since_s = time.monotonic()
        try:
            yield
        finally:
            self._rests_since_s = None

    def came_on(self) -> None:
        """Something has come that was waited for. Says nothing outside of :meth:`resting`."""
        if self._rests_since_s is not None:
            now = time.monotonic()
            self._until += now - self._rests_since_s
            self._rests_since_s = now

    async def wait(self) -> None:
        """The pause before the next try; each is twice as long as the one before."""
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(WAIT_MOST_S, 2 * self._pause_s)
