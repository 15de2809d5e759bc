"""The target's end of a measurement: forget, take bare bytes, say what was used and compared."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc.aio

from kvpack.errors import KvpackError
from node.bench.baseline import BaselineSink
from node.bench.held import MadeTier
from node.bench.model import MadeGeneration, MadeModel
from node.bench.usage import MemoryMark, cpu_s
from node.pb.v1 import bench_pb2 as pb
from node.pb.v1 import bench_pb2_grpc
from node.session import Session
from node.sessions import Sessions
from node.status import refuse
from node.trust import Gate

_Context = grpc.aio.ServicerContext[Any, Any]

SERVICE: Final = "node.v1.Bench"


@dataclass(frozen=True, slots=True)
class Here:
    """Who this end is, and at which address the yardstick listens."""

    credentials: Path
    host: str


class BenchService(bench_pb2_grpc.BenchServicer):
    """Serves one measurement at a time."""

    def __init__(
        self, model: MadeModel, held: MadeTier, sessions: Sessions, gate: Gate, here: Here
    ) -> None:
        self._model = model
        self._held = held
        self._sessions = sessions
        self._gate = gate
        self._here = here
        self._mark = MemoryMark.now()
        self._cpu_s = cpu_s()

    async def Begin(self, request: pb.BeginRequest, context: _Context) -> pb.BeginReply:
        try:
            await asyncio.to_thread(self._held.hold, request.held_tokens)
        except KvpackError as error:
            await refuse(context, error)
        self._model.pace.stall_s = request.stall_s
        self._mark, self._cpu_s = MemoryMark.now(), cpu_s()
        return pb.BeginReply()

    async def Baseline(self, request: pb.BaselineRequest, context: _Context) -> pb.BaselineReply:
        peer = self._gate.admit(f"/{SERVICE}/", context)
        credentials = None if request.plain else self._here.credentials
        sink = BaselineSink(credentials, self._here.host, peer, request.total_bytes)
        return pb.BaselineReply(port=sink.port)

    async def End(self, request: pb.EndRequest, context: _Context) -> pb.EndReply:
        used_s, growth = cpu_s() - self._cpu_s, self._mark.peak_growth_bytes()
        reply = pb.EndReply(cpu_s=used_s, planes_bytes=self._model.planes_bytes)
        if growth is not None:
            reply.growth_bytes = growth
        if request.session_id:
            try:
                session = await self._sessions.find(request.session_id)
                reply.rows_compared, reply.rows_equal = await self._compare(session)
                async with self._sessions.hold(session.session_id, session.token):
                    await self._sessions.close(session)
            except KvpackError as error:
                await refuse(context, error)
        return reply

    async def _compare(self, session: Session) -> tuple[int, int]:
        generation: object = session.generation
        if not isinstance(generation, MadeGeneration):
            raise TypeError("a session of another model than the bench's")
        planes, position = generation.planes, generation.position
        return await self._sessions.engine.call(planes.count_equal, self._model.rows, position)
