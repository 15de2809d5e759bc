"""The course of one measurement, on the source: rate, move, comparison."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from kvpack.chunk import Codec
from kvpack.errors import KvpackError
from node.bench.model import FURTHER_TOKENS, MadeModel, token_ids
from node.bench.order import BenchOrder, Kind, OtherEnd, bench_config
from node.bench.peer import Peer
from node.bench.sealed import Pushed, push_sealed, push_warm
from node.bench.serve import bench_fitting
from node.bench.sockets import SocketBytes
from node.bench.usage import MemoryMark
from node.config import Address
from node.migration.orders import Moved, Order
from node.pb.v1 import bench_pb2
from node.server import Node, running
from node.session import Session

#: Prefill is simulated at so many times the transfer's time.
PREFILL_OVER_TRANSFER: Final = 4.0

#: A live session chooses a token in this time.
DECODE_S: Final = 0.010


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that one run saw.

    Attributes:
        order: What was asked for.
        pushed: The push of sealed chunks and its yardstick; None where it was not asked for.
        moved: The move.
        prefill_asked_s: How long prefill was told to take; none for a live session.
        growth_bytes: Highest resident memory of the source over that before the move; its planes
            were there before. None where the system does not tell.
        ended: What the target says.
        socket_bytes: Of TCP, of the move, both directions. None where the system does not tell.
    """

    order: BenchOrder
    pushed: Pushed | None
    moved: Moved
    prefill_asked_s: float
    growth_bytes: int | None
    ended: bench_pb2.EndReply
    socket_bytes: int | None


async def measure(order: BenchOrder, other: OtherEnd) -> Measured:
    """Run a measurement against a ``kvnode bench serve``.

    Raises:
        KvpackError: An end refused, or went away.
    """
    config = bench_config(
        Address("127.0.0.1", 0),
        other.credentials,
        other.data_dir,
        other.directory_url,
        shares=False,
    )
    model = MadeModel(order.layout_name, order.layout, order.row_source())
    model.made_tokens = order.position
    fitting = bench_fitting(model, config, takes=False)
    async with running(config, fitting) as node, Peer(other) as peer:
        prompt = token_ids(order.tokens)
        pushed = None
        if order.pushes:
            codec = Codec.ZSTD_SPLIT if order.compress else Codec.RAW
            pushed = await push_sealed(node, peer, prompt, order.data_plane, codec)
        else:
            await push_warm(node, peer, prompt, order.data_plane)
        return await _move(node, model, peer, order, prompt, pushed)


async def _move(
    node: Node,
    model: MadeModel,
    peer: Peer,
    order: BenchOrder,
    prompt: list[int],
    pushed: Pushed | None,
) -> Measured:
    session = await node.sessions.open(f"bench-move-{secrets.token_hex(8)}")
    prefill_s = 0.0
    if order.kind is Kind.PROMPT and pushed is not None:
        prefill_s = PREFILL_OVER_TRANSFER * pushed.cut_bytes / pushed.sealed_bytes_per_s
        model.pace.prefill_s_per_token = prefill_s / order.position
    else:
        async with node.sessions.hold(session.session_id, session.token):
            await node.sessions.append(session, prompt)
        model.pace.decode_s = DECODE_S
    await peer.begin(order.stall_s, order.held_tokens)
    async with _decoding(node, session, order):
        mark = MemoryMark.now()
        sent = prompt if order.kind is Kind.PROMPT else []
        sockets = SocketBytes(peer.address.host)
        async with sockets.watching():
            moved = await _moved(node, session, peer, sent, order)
        growth_bytes = mark.peak_growth_bytes()
    ended = await peer.end(session.session_id)
    return Measured(order, pushed, moved, prefill_s, growth_bytes, ended, sockets.total)


async def _moved(
    node: Node, session: Session, peer: Peer, prompt: list[int], order: BenchOrder
) -> Moved:
    plane, compress = order.data_plane, order.compress
    target = Order(peer.name, peer.address, compress=compress, data_plane=plane)
    async for event in node.moves.start(session.session_id, session.token, prompt, target):
        if isinstance(event, Moved):
            return event
    raise RuntimeError("a move that ended without a result")


@contextlib.asynccontextmanager
async def _decoding(node: Node, session: Session, order: BenchOrder) -> AsyncIterator[None]:
    """Somebody who reads token after token, if it is a live session, until it is not here."""

    async def read() -> None:
        most = node.sessions.engine.model.layout.max_context_tokens - session.next_index
        steps = node.sessions.generate(
            session.session_id, session.token, session.next_index, min(most, FURTHER_TOKENS)
        )
        with contextlib.suppress(KvpackError):
            async for _ in steps:
                pass

    reader = asyncio.ensure_future(read()) if order.kind is Kind.SESSION else None
    try:
        yield
    finally:
        if reader is not None:
            reader.cancel()
            await asyncio.wait({reader})
