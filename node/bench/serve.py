"""A node of made rows: both ends of a measurement are one."""

from __future__ import annotations

from pathlib import Path

import grpc.aio

from node.bench.model import MadeModel, start_engine
from node.bench.service import BenchService
from node.config import ServeConfig
from node.engine_thread import EngineThread
from node.pb.v1 import bench_pb2_grpc
from node.server import Fitting, Node
from node.trust import Gate, load_credentials


def bench_fitting(model: MadeModel, config: ServeConfig, *, takes: bool) -> Fitting:
    """What makes a node one of made rows, whose transfers leave nothing on disk.

    Args:
        model: The rows.
        config: Of the node; its model folder is not looked at.
        takes: Whether it is the other end: then it has the Bench service.
    """

    async def load(_: Path) -> EngineThread:
        return await start_engine(model)

    def serve(server: grpc.aio.Server, node: Node) -> None:
        gate = Gate(load_credentials(config.credentials_dir))
        service = BenchService(
            model, node.sessions, gate, config.credentials_dir, node.address.host
        )
        bench_pb2_grpc.add_BenchServicer_to_server(service, server)

    return Fitting(load=load, spools=False, services=serve if takes else None)
