"""How fast chunks that are sealed already get into the other node's planes.

One cut is sealed into memory; then the same bytes go once through a bare TLS socket and once
through Prepare and Push, where the target opens and scatters them. The transfer is given up
afterwards: what it would take to seal, commit and read the rows is measured by the move itself.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from kvpack.chunk import seal_tile
from kvpack.snapshot import cut_tile_specs
from kvpack.wire import encode_numerics
from node.bench.peer import Peer
from node.bench.usage import cpu_s
from node.dataplane.lane import Lane
from node.dataplane.options import Plane
from node.errors import UsageError
from node.migration import versions, wire
from node.migration.feed import STREAM_S
from node.pb.v1 import migration_pb2
from node.server import Node
from node.session import Session

_ASK_S = 60.0


@dataclass(frozen=True, slots=True)
class Pushed:
    """One push of sealed chunks, and the yardstick beside it.

    Attributes:
        payload_bytes: Plaintext in the chunks.
        push_s: From the first write to the acknowledgement that all of it is installed.
        baseline_s: The same chunks through a bare TLS 1.3 socket.
        tcp_baseline_s: The same through a plain one.
        source_cpu_s: Processor time of this process during the push.
        target_cpu_s: Processor time of the other one.
        rtt_s: The quickest of some empty calls.
    """

    payload_bytes: int
    push_s: float
    baseline_s: float
    tcp_baseline_s: float
    source_cpu_s: float
    target_cpu_s: float
    rtt_s: float

    @property
    def bytes_per_s(self) -> float:
        """Payload over time."""
        return self.payload_bytes / self.push_s


async def push_sealed(node: Node, peer: Peer, token_ids: list[int], plane: Plane) -> Pushed:
    """Measure both on a session of ``token_ids``, which is closed again.

    Raises:
        KvpackError: The target refused, or went away.
    """
    session = await node.sessions.open(f"bench-push-{secrets.token_hex(8)}")
    async with node.sessions.hold(session.session_id, session.token):
        await node.sessions.append(session, token_ids)
        pieces, payload_bytes = await node.sessions.engine.call(_seal_all, node, session)
        try:
            baselines_s = (await peer.baseline(pieces), await peer.baseline(pieces, plain=True))
            return await _push(node, peer, session, pieces, payload_bytes, baselines_s, plane)
        finally:
            await node.sessions.close(session)


def _seal_all(node: Node, session: Session) -> tuple[list[bytes], int]:
    context, pieces, payload_bytes = node.moves.binding.context, [], 0
    for spec in cut_tile_specs(node.moves.binding.layout, session.position):
        chunk = seal_tile(context, session.generation.read_tile(spec))
        pieces.append(wire.encode_object(chunk.object))
        payload_bytes += chunk.reference.plain_bytes
    return pieces, payload_bytes


async def _push(
    node: Node,
    peer: Peer,
    session: Session,
    pieces: list[bytes],
    payload_bytes: int,
    baselines_s: tuple[float, float],
    plane: Plane,
) -> Pushed:
    transfer, stub = await _prepare(node, peer, session, plane)
    rtt_s = await peer.round_trip_s()
    await peer.begin()
    used_s, start = cpu_s(), time.monotonic()
    call = stub.push(timeout=STREAM_S)
    await call.write(wire.encode_open(transfer))
    for piece in pieces:
        await call.write(piece)
    await call.done_writing()
    await call
    push_s, source_cpu_s = time.monotonic() - start, cpu_s() - used_s
    target_cpu_s = (await peer.end("")).cpu_s
    request = migration_pb2.AbortRequest(transfer=transfer)
    await wire.ask(peer.migration.abort, request, _ASK_S, peer.name)
    return Pushed(payload_bytes, push_s, *baselines_s, source_cpu_s, target_cpu_s, rtt_s)


async def _prepare(
    node: Node, peer: Peer, session: Session, plane: Plane
) -> tuple[migration_pb2.TransferRef, wire.MigrationStub]:
    """A transfer, and what its chunks are pushed by: just as in a move."""
    binding = node.moves.binding
    epoch = binding.key.epoch
    number = await node.moves.source.journal.next_number(peer.name, epoch)
    transfer = wire.transfer_ref(epoch, number)
    request = migration_pb2.PrepareRequest(
        transfer=transfer,
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
    lane.answered(await wire.ask(peer.migration.prepare, request, _ASK_S, peer.name))
    if lane.fallback:
        raise UsageError(f"--data-plane {lane.fallback}")
    return transfer, lane.stub(peer.migration, transfer)
