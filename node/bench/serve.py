"""A node of made rows: both ends of a measurement are one."""

from __future__ import annotations

from typing import cast

import grpc.aio

from node.bench.held import MadeTier
from node.bench.model import MadeModel, start_engine
from node.bench.service import BenchService, Here
from node.binding import PackBinding
from node.config import ServeConfig
from node.engine_thread import EngineThread
from node.errors import UsageError
from node.pb.v1 import bench_pb2_grpc
from node.server import Fitting, Node
from node.tier import Tier
from node.trust import Gate, LiveCredentials


def bench_fitting(
    model: MadeModel, config: ServeConfig, *, takes: bool, spools: bool = False
) -> Fitting:
    """What makes a node one of made rows. Its transfers leave nothing on disk unless it spools.

    Args:
        model: The rows.
        config: Of the node; its model folder is not looked at.
        takes: Whether it is the other end: then it has the Bench service.
        spools: Whether what arrives is on disk, durably, before it is owned.

    Raises:
        UsageError: The node would have no gRPC.
    """
    if config.credentials_dir is None or config.address is None:
        raise UsageError("bench: needs gRPC and credentials")
    credentials_dir, host = config.credentials_dir, config.address.host
    held: list[MadeTier] = []

    async def load(_: ServeConfig) -> EngineThread:
        return await start_engine(model)

    def tier(_: ServeConfig, binding: PackBinding) -> Tier | None:
        held.append(MadeTier(model, binding))
        return cast("Tier", held[0]) if takes else None

    def serve(server: grpc.aio.Server, node: Node) -> None:
        gate = Gate(LiveCredentials(credentials_dir))
        here = Here(credentials_dir, host)
        service = BenchService(model, held[0], node.sessions, gate, here)
        bench_pb2_grpc.add_BenchServicer_to_server(service, server)

    return Fitting(load=load, spools=spools, tier=tier, services=serve if takes else None)
