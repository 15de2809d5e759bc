"""The course of one measurement, on the source: rate, move, comparison."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from node.bench.model import MadeModel, token_ids
from node.bench.order import BenchOrder, Kind, OtherEnd
from node.bench.peer import Peer
from node.bench.sealed import Pushed, push_sealed
from node.bench.serve import bench_fitting
from node.bench.usage import MemoryMark
from node.config import Address, ServeConfig
from node.errors import UsageError
from node.migration.source import Moved, Order
from node.pb.v1 import bench_pb2
from node.server import Node, running

#: Prefill is simulated at so many times the transfer's time.
PREFILL_OVER_TRANSFER: Final = 4.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that one run saw.

    Attributes:
        order: What was asked for.
        pushed: The push of sealed chunks and its yardstick.
        moved: The move.
        prefill_asked_s: How long prefill was told to take.
        growth_bytes: Highest resident memory of the source over that before the move; its planes
            were there before. None where the system does not tell.
        ended: What the target says.
    """

    order: BenchOrder
    pushed: Pushed
    moved: Moved
    prefill_asked_s: float
    growth_bytes: int | None
    ended: bench_pb2.EndReply


async def measure(order: BenchOrder, other: OtherEnd) -> Measured:
    """Run a measurement against a ``kvnode bench serve``.

    Raises:
        KvpackError: An end refused, or went away.
    """
    config = ServeConfig(
        Address("127.0.0.1", 0),
        other.data_dir,
        other.data_dir,
        other.credentials,
        other.directory_url,
    )
    model = MadeModel(order.layout_name, order.layout)
    model.made_tokens = order.position
    fitting = bench_fitting(model, config, takes=False)
    async with running(config, fitting) as node, Peer(other) as peer:
        prompt = token_ids(order.tokens)
        pushed = await push_sealed(node, peer, prompt)
        return await _move(node, model, peer, order, prompt, pushed)


async def _move(
    node: Node,
    model: MadeModel,
    peer: Peer,
    order: BenchOrder,
    prompt: list[int],
    pushed: Pushed,
) -> Measured:
    if order.kind is not Kind.PROMPT or order.held_tokens:
        raise UsageError("only --kind prompt, and nothing held, is measured yet")
    prefill_s = PREFILL_OVER_TRANSFER * pushed.push_s
    session = await node.sessions.open(f"bench-move-{secrets.token_hex(8)}")
    model.pace.prefill_s_per_token = prefill_s / order.position
    await peer.begin(order.stall_s)
    mark = MemoryMark.now()
    target = Order(peer.name, peer.address)
    moved = None
    async for event in node.moves.start(session.session_id, session.token, prompt, target):
        if isinstance(event, Moved):
            moved = event
    growth_bytes = mark.peak_growth_bytes()
    if moved is None:
        raise RuntimeError("a move that ended without a result")
    ended = await peer.end(session.session_id)
    return Measured(order, pushed, moved, prefill_s, growth_bytes, ended)
