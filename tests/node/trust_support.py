"""A node's gate on a real port with nothing behind it, and callers that are told yes or no."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from node import certificates, trust
from node.config import Address
from node.migration_service import MigrationService
from node.pb.v1 import migration_pb2, migration_pb2_grpc, session_pb2, session_pb2_grpc


@contextlib.asynccontextmanager
async def server(world, name="source", now=certificates.utc_now):
    """The gate of a node with its real services behind it, but nothing that could answer."""
    live = trust.LiveCredentials(world.credentials(name))
    gate = trust.Gate(live, now)
    one = grpc.aio.server(
        interceptors=[trust.GateInterceptor(gate)], options=trust.server_options()
    )
    one.add_generic_rpc_handlers((MigrationService(SimpleNamespace(status=None), gate).handlers(),))
    session_pb2_grpc.add_SessionServicer_to_server(session_pb2_grpc.SessionServicer(), one)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), one)
    port = one.add_secure_port("127.0.0.1:0", trust.server_credentials(live))
    await one.start()
    try:
        yield Address("127.0.0.1", port)
    finally:
        await one.stop(None)


async def code_of(call, request) -> tuple[grpc.StatusCode, str]:
    """Code and details of one unary call."""
    try:
        await call(request, timeout=30)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def channel_of(world, caller, address, peer="source"):
    """A channel of ``caller``, with its credentials of this moment."""
    credentials = trust.load_credentials(world.credentials(caller))
    return trust.open_channel(credentials, credentials.peer(peer), address)


async def ask(channel) -> tuple[grpc.StatusCode, str]:
    """What health says over an open channel."""
    return await code_of(health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest())


async def knock(world, caller, address) -> grpc.StatusCode:
    """What health says over a new channel."""
    async with channel_of(world, caller, address) as channel:
        return (await ask(channel))[0]


async def codes(world, caller, address):
    """What ``caller`` gets from health, Migration and Session."""
    async with channel_of(world, caller, address) as channel:
        return (
            await ask(channel),
            await code_of(
                migration_pb2_grpc.MigrationStub(channel).Status, migration_pb2.StatusRequest()
            ),
            await code_of(
                session_pb2_grpc.SessionStub(channel).Describe, session_pb2.DescribeRequest()
            ),
        )
