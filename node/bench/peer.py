"""The other end of a measurement, as this end calls it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from node.bench.baseline import send_baseline
from node.bench.order import OtherEnd
from node.config import Address
from node.migration import wire
from node.pb.v1 import bench_pb2, bench_pb2_grpc
from node.trust import Role, load_credentials, open_channel

#: The longest call compares every row of a session of a million tokens.
_ASK_S: Final = 600.0

_ROUND_TRIPS: Final = 5


class Peer:
    """A ``kvnode bench serve`` behind one channel of its own.

    Raises:
        CredentialsError: The folder is not usable, or the node is not pinned in it.
    """

    def __init__(self, other: OtherEnd) -> None:
        credentials = load_credentials(other.credentials)
        self._other = other
        self._pinned = credentials.peer(other.node, Role.NODE)
        self.address = Address.parse(other.address)
        self._channel = open_channel(credentials, self._pinned, self.address)
        self.migration = wire.MigrationStub(self._channel, wire.Meter())
        self._bench = bench_pb2_grpc.BenchStub(self._channel)

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close()

    @property
    def name(self) -> str:
        """The node's name."""
        return self._pinned.name

    async def begin(self, stall_s: float = 0.0, held_tokens: int = 0) -> None:
        """Let the other end forget what it used so far, and hold a prefix."""
        request = bench_pb2.BeginRequest(stall_s=stall_s, held_tokens=held_tokens)
        await self._ask(self._bench.Begin, request)

    async def end(self, session_id: str) -> bench_pb2.EndReply:
        """What the other end used since; and what became of the session, if one is named."""
        request = bench_pb2.EndRequest(session_id=session_id)
        reply: bench_pb2.EndReply = await self._ask(self._bench.End, request)
        return reply

    async def round_trip_s(self) -> float:
        """The quickest of some empty calls."""
        times = []
        for _ in range(_ROUND_TRIPS):
            start = time.monotonic()
            await self.end("")
            times.append(time.monotonic() - start)
        return min(times)

    async def baseline(self, pieces: Sequence[bytes], *, plain: bool = False) -> float:
        """Seconds that ``pieces`` take through a bare TLS 1.3 socket, or through a plain one.

        Raises:
            PeerUnavailableError: The socket broke.
        """
        total_bytes = sum(len(piece) for piece in pieces)
        request = bench_pb2.BaselineRequest(total_bytes=total_bytes, plain=plain)
        port = (await self._ask(self._bench.Baseline, request)).port
        address = Address(self.address.host, port)
        credentials = None if plain else self._other.credentials
        return await asyncio.to_thread(send_baseline, credentials, self._pinned, address, pieces)

    async def _ask(self, call: Any, request: Any) -> Any:  # noqa: ANN401 - any call of the service
        return await wire.ask(call, request, _ASK_S, self.name)
