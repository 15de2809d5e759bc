"""How fast chunks get into the other node's planes: sealed before, and sealed meanwhile.

One cut is sealed into memory; a first part of it is pushed, so that both processes have the memory
that streams use. The rest goes once through a bare TLS socket, once through a plain one, and once
as the rest of the push, where the target opens and scatters it. Then the whole cut is read, sealed
and pushed by the product's own stream. All of it happens some times, every second time the other
way round, since neither a socket nor a machine is equally quick twice. Transfers are given up
afterwards: what it would take to commit and to read the rows is measured by the move itself.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from kvpack.chunk import Codec, seal_tile
from kvpack.snapshot import cut_tile_specs
from kvpack.wire import encode_numerics
from node.bench.peer import Peer
from node.bench.usage import cpu_s
from node.dataplane.lane import Lane
from node.dataplane.options import Plane
from node.errors import UsageError
from node.migration import versions, wire
from node.migration.feed import STREAM_S, Feed, Holding
from node.migration.producer import Producer
from node.migration.tape import Tape
from node.migration.timeline import Timeline
from node.pb.v1 import migration_pb2
from node.server import Node
from node.session import Session

_ASK_S: Final = 60.0

#: How often each is measured. Odd: a median is one of them.
ROUNDS: Final = 3

#: Pushed before the clock starts: at most so much, and an eighth of the cut.
_WARM_BYTES: Final = 64 << 20
_WARM_SHARE: Final = 8


@dataclass(slots=True)
class Cost:
    """What one way of sending took.

    Attributes:
        payload_bytes: Plaintext that it carried.
        seconds: From the first write to the word that all of it has arrived.
        source_cpu_s: Processor time of this process meanwhile.
        target_cpu_s: Processor time of the other one.
    """

    payload_bytes: int
    seconds: float = 0.0
    source_cpu_s: float = 0.0
    target_cpu_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Payload over time."""
        return self.payload_bytes / self.seconds

    @property
    def cpu_s_per_byte(self) -> float:
        """Processor time of both ends."""
        return (self.source_cpu_s + self.target_cpu_s) / self.payload_bytes


@dataclass(frozen=True, slots=True)
class Round:
    """Pushes and the yardsticks beside them, within some seconds of one another.

    Attributes:
        sealed: Chunks that were sealed before, until all are installed.
        sealing: The whole cut, read and sealed meanwhile.
        tls: The chunks of ``sealed`` through a bare TLS 1.3 socket.
        tcp: The same through a plain one.
    """

    sealed: Cost
    sealing: Cost
    tls: Cost
    tcp: Cost


@dataclass(frozen=True, slots=True)
class Pushed:
    """What was measured in ``ROUNDS`` rounds.

    Attributes:
        rounds: Each of them.
        rtt_s: The quickest of some empty calls.
    """

    rounds: tuple[Round, ...]
    rtt_s: float

    def median(self, number: Callable[[Round], float]) -> float:
        """The middle one of a round's number."""
        return statistics.median(number(one) for one in self.rounds)

    @property
    def sealed_bytes_per_s(self) -> float:
        """At what rate sealed chunks are installed."""
        return self.median(lambda one: one.sealed.bytes_per_s)

    @property
    def cut_bytes(self) -> int:
        """Plaintext of the whole cut."""
        return self.rounds[0].sealing.payload_bytes


async def push_sealed(
    node: Node, peer: Peer, token_ids: list[int], plane: Plane, codec: Codec
) -> Pushed:
    """Measure all of it on sessions of ``token_ids``, which are closed again. Rows by ``codec``.

    Raises:
        KvpackError: The target refused, or went away.
    """
    rounds = [
        await _round(node, peer, token_ids, plane, codec, push_first=number % 2 == 1)
        for number in range(ROUNDS)
    ]
    return Pushed(tuple(rounds), await peer.round_trip_s())


async def _round(
    node: Node,
    peer: Peer,
    token_ids: list[int],
    plane: Plane,
    codec: Codec,
    *,
    push_first: bool,
) -> Round:
    """One round, on a session of its own: it ends with a boundary call, which leaves it longer."""
    async with _prefilled(node, token_ids) as session:
        pieces, sizes = await node.sessions.engine.call(_seal_all, node, session, codec)
        sealed, tls, tcp = await _push_sealed(
            node, peer, session, plane, pieces, sizes, push_first=push_first
        )
        pieces.clear()
        sealing = await _push_sealing(node, peer, session, plane, codec, sum(sizes))
        return Round(sealed, sealing, tls, tcp)


async def push_warm(node: Node, peer: Peer, token_ids: list[int], plane: Plane) -> None:
    """Push a first part alone, so that both processes have the memory that streams use.

    Raises:
        KvpackError: The target refused, or went away.
    """
    async with _prefilled(node, token_ids) as session:
        pieces, _ = await node.sessions.engine.call(
            _seal_all, node, session, Codec.RAW, only_warm=True
        )
        transfer = await _Transfer.begin(node, peer, session, plane)
        await _write_all(await transfer.stub(), transfer, pieces)
        await transfer.abort()


@asynccontextmanager
async def _prefilled(node: Node, token_ids: list[int]) -> AsyncIterator[Session]:
    session = await node.sessions.open(f"bench-push-{secrets.token_hex(8)}")
    async with node.sessions.hold(session.session_id, session.token):
        await node.sessions.append(session, token_ids)
        try:
            yield session
        finally:
            await node.sessions.close(session)


def _seal_all(
    node: Node, session: Session, codec: Codec, *, only_warm: bool = False
) -> tuple[list[bytes], list[int]]:
    """All chunks, or the warm ones, and their plaintexts' sizes."""
    binding = node.moves.binding
    width = binding.layout.encoding.element_bytes
    specs = cut_tile_specs(binding.layout, session.position)
    if only_warm:
        specs = specs[: _warm_pieces([spec.data_bytes(binding.layout) for spec in specs])]
    pieces, sizes = [], []
    for spec in specs:
        tile = session.generation.read_tile(spec)
        chunk = seal_tile(binding.context, tile, codec, element_bytes=width)
        pieces.append(wire.encode_object(chunk.object))
        sizes.append(chunk.reference.plain_bytes)
    return pieces, sizes


async def _push_sealed(
    node: Node,
    peer: Peer,
    session: Session,
    plane: Plane,
    pieces: list[bytes],
    sizes: list[int],
    *,
    push_first: bool,
) -> tuple[Cost, Cost, Cost]:
    transfer = await _Transfer.begin(node, peer, session, plane)
    warm, payload_bytes = _warm_pieces(sizes), sum(sizes)
    await _write_all(await transfer.stub(), transfer, pieces[:warm])
    rest, rest_bytes = pieces[warm:], payload_bytes - sum(sizes[:warm])
    sealed, tls, tcp = Cost(rest_bytes), Cost(rest_bytes), Cost(rest_bytes)

    async def push() -> None:
        stub = await transfer.stub()
        async with _spending(peer, sealed):
            start = time.monotonic()
            await _write_all(stub, transfer, rest)
            sealed.seconds = time.monotonic() - start

    if push_first:
        await push()
    async with _spending(peer, tcp):
        tcp.seconds = await peer.baseline(rest, plain=True)
    async with _spending(peer, tls):
        tls.seconds = await peer.baseline(rest)
    if not push_first:
        await push()
    await transfer.abort()
    return sealed, tls, tcp


async def _push_sealing(
    node: Node, peer: Peer, session: Session, plane: Plane, codec: Codec, payload_bytes: int
) -> Cost:
    moves, cost = node.moves, Cost(payload_bytes)
    tape = Tape.known(moves.binding.layout, session.position)
    producer = Producer(node.sessions.engine, moves.binding, session, tape, _never, codec)
    transfer = await _Transfer.begin(node, peer, session, plane)
    stub = await transfer.stub()
    async with _spending(peer, cost):
        timeline = Timeline(time.monotonic())
        feed = Feed(producer, timeline, lambda: None)
        await feed.run(stub, transfer.ref, peer.name, Holding())
        cost.seconds = timeline.pushed_s - timeline.start_s
    await transfer.abort()
    return cost


def _warm_pieces(sizes: Sequence[int]) -> int:
    """How many of the chunks, of so many bytes each, are pushed before the clock starts."""
    warm, most = 0, min(_WARM_BYTES, sum(sizes) // _WARM_SHARE)
    while most >= sizes[warm]:
        most -= sizes[warm]
        warm += 1
    return warm


async def _write_all(
    stub: wire.MigrationStub, transfer: _Transfer, pieces: Sequence[bytes]
) -> None:
    call = stub.push(timeout=STREAM_S)
    await call.write(wire.encode_open(transfer.ref))
    for piece in pieces:
        await call.write(piece)
    await call.done_writing()
    await call


@asynccontextmanager
async def _spending(peer: Peer, cost: Cost) -> AsyncIterator[None]:
    """Fill in the processor time that both ends take until the block ends."""
    theirs, ours = (await peer.end("")).cpu_s, cpu_s()
    yield
    cost.source_cpu_s = cpu_s() - ours
    cost.target_cpu_s = (await peer.end("")).cpu_s - theirs


async def _never() -> bool:
    raise RuntimeError("a session that is held already")


class _Transfer:
    """A transfer that is prepared for each of its streams, and given up in the end."""

    def __init__(self, peer: Peer, request: migration_pb2.PrepareRequest, lane: Lane) -> None:
        self._peer = peer
        self._request = request
        self._lane = lane

    @classmethod
    async def begin(cls, node: Node, peer: Peer, session: Session, plane: Plane) -> _Transfer:
        """What will be asked for, just as a move asks."""
        binding = node.moves.binding
        epoch = binding.key.epoch
        number = await node.moves.source.journal.next_number(peer.name, epoch)
        request = migration_pb2.PrepareRequest(
            transfer=wire.transfer_ref(epoch, number),
            session_id=session.session_id,
            mode=migration_pb2.MODE_MOVE,
            token=wire.token_message(session.token),
            pack_header=binding.header_bytes,
            numerics=encode_numerics(binding.numerics),
            position=session.position,
        )
        speaker, lane = node.moves.source.speaker, Lane(plane, peer.name, wire.Meter())
        versions.state(request, speaker)
        lane.wish(request, speaker.minors)
        return cls(peer, request, lane)

    @property
    def ref(self) -> migration_pb2.TransferRef:
        """Its name."""
        return self._request.transfer

    async def stub(self) -> wire.MigrationStub:
        """What its next stream is pushed by. The first one takes the target's memory.

        Raises:
            UsageError: The plane is not to be had.
        """
        answer = wire.ask(self._peer.migration.prepare, self._request, _ASK_S, self._peer.name)
        self._lane.answered(await answer)
        if self._lane.fallback:
            raise UsageError(f"--data-plane {self._lane.fallback}")
        return self._lane.stub(self._peer.migration, self.ref)

    async def abort(self) -> None:
        """Give it up."""
        request = migration_pb2.AbortRequest(transfer=self.ref)
        await wire.ask(self._peer.migration.abort, request, _ASK_S, self._peer.name)
