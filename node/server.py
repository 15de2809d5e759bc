"""One node process: everything wired together, started, and stopped again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvpack.errors import KvpackError
from kvpack.keys import load_key_file
from node.binding import PackBinding
from node.config import Address, ServeConfig
from node.directory_member import member
from node.directory_service import DirectoryService
from node.engine_thread import EngineThread
from node.enroll import TENANT_KEY
from node.errors import ListenError
from node.files import make_private_folder
from node.migration import wire
from node.migration.admission import Target
from node.migration.depot import Depot
from node.migration.journal import Journal
from node.migration.moves import Moves
from node.migration.orders import Source
from node.migration.restore import Restorer
from node.migration.target import Transfers
from node.migration_service import MigrationService
from node.pb.v1 import session_pb2_grpc
from node.recover import recover
from node.session_service import SERVICE as SESSION_SERVICE
from node.session_service import SessionService
from node.sessions import Sessions
from node.stores import StoreRoots
from node.tier import Tier
from node.trust import (
    Gate,
    GateInterceptor,
    LiveCredentials,
    Role,
    open_channel,
    server_credentials,
    server_options,
)
from node.volume import VolumeBound, probe_volume

log = logging.getLogger(__name__)

#: Inside a data folder: packs of moves, and packs that clients asked for.
SPOOL: Final = "spool"
STORE: Final = "store"
PACKS: Final = "packs"

#: The part of a transfer's lease for which a source tries to reach its target again.
RESUME_SHARE: Final = 0.75

#: How long running calls may go on when the node stops.
GRACE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Node:
    """A running node.

    Attributes:
        name: From its certificate.
        address: Where it listens, with the port that it got.
        sessions: What it owns.
        transfers: What comes in.
        moves: What goes out.
        depot: What goes into stores and comes back.
        tier: The store of cuts; None where nothing is kept.
    """

    name: str
    address: Address
    sessions: Sessions
    transfers: Transfers
    moves: Moves
    depot: Depot
    tier: Tier | None


def _open_tier(config: ServeConfig, binding: PackBinding) -> Tier:
    return Tier.open(config.data_dir / STORE, binding, config.store)


@dataclass(frozen=True, slots=True)
class Fitting:
    """What a measurement puts in the place of a node's parts; a served node has the defaults.

    Attributes:
        load: Loads the model of ``config.model_dir`` on a thread of its own.
        spools: Whether what arrives is written to disk before it is owned.
        tier: Opens the store of cuts; None: nothing is kept.
        services: Adds services of its own to the server.
    """

    load: Callable[[Path], Awaitable[EngineThread]] = EngineThread.load
    spools: bool = True
    tier: Callable[[ServeConfig, PackBinding], Tier | None] = _open_tier
    services: Callable[[grpc.aio.Server, Node], None] | None = None


SERVED: Final = Fitting()


@contextlib.asynccontextmanager
async def running(config: ServeConfig, fitting: Fitting = SERVED) -> AsyncIterator[Node]:
    """A node that serves until the block ends; then it finishes what runs and lets go of all.

    Raises:
        CredentialsError: The credentials folder is not usable.
        KeyFileError: The tenant's key is not usable.
        VolumeError: The data folder's volume is too slow, or refuses writes.
        ModelFolderError: The model folder lacks something.
        DirectoryError: The directory cannot be read.
        ListenError: The address cannot be bound.
    """
    live = LiveCredentials(config.credentials_dir)
    name = live.current().name
    key = load_key_file(config.credentials_dir / TENANT_KEY)
    for folder in (config.data_dir, config.data_dir / SPOOL, config.data_dir / PACKS):
        make_private_folder(folder)
    # Off the loop: a slow volume must not look like a hung process.
    bound = VolumeBound(worst_s=config.volume_worst_s)
    worst_s = await asyncio.to_thread(probe_volume, config.data_dir, bound)
    # Before anything is written: a wrong option must not leave a trace.
    roots = StoreRoots(config.store_roots, config.store)
    async with contextlib.AsyncExitStack() as stack:
        # The port first: a taken one is found before the model is loaded.
        server, address = _bind(config.address, live)
        stack.push_async_callback(server.stop, None)
        ours = await stack.enter_async_context(member(config, live, name))
        journal = Journal(config.data_dir / "journal.sqlite")
        stack.push_async_callback(journal.close)
        engine = await fitting.load(config.model_dir)
        stack.callback(engine.close)
        sessions = Sessions(name, engine, ours.directory, journal, ours.lease)
        binding = PackBinding.of(engine.model, key)
        resume_s = RESUME_SHARE * config.transfer_lease_s
        source = Source(sessions, engine, binding, journal, _connector(live), resume_s)
        spool = config.data_dir / SPOOL
        tier = fitting.tier(config, binding)
        target = Target(
            sessions, engine, binding, journal, spool, config.transfer_lease_s, fitting.spools, tier
        )
        transfers = Transfers(target)
        recovered = await recover(target, transfers, roots)
        log.info("volume: worst of %d durable writes %.1f ms", bound.reserves, 1000 * worst_s)
        log.info("restored %d sessions, %d lost", len(recovered.restored), len(recovered.lost))
        moves = Moves(source)
        depot = Depot(moves, Restorer(target, transfers, roots), roots)
        node = Node(name, address, sessions, transfers, moves, depot, tier)
        if tier is not None:
            tier.start()
            stack.push_async_callback(tier.close)
        leases = asyncio.create_task(node.transfers.watch_leases())
        stack.push_async_callback(_cancel, leases)
        health_service = _add_services(server, live, node, config.data_dir / PACKS)
        if ours.shared is not None:
            service = DirectoryService(ours.shared, Gate(live))
            server.add_generic_rpc_handlers((service.handlers(),))
        if fitting.services is not None:
            fitting.services(server, node)
        await server.start()
        stack.push_async_callback(_stop, server, node, health_service)
        yield node


def _connector(live: LiveCredentials) -> Callable[[str, Address], grpc.aio.Channel]:
    def connect(peer: str, address: Address) -> grpc.aio.Channel:
        credentials = live.current()
        return open_channel(credentials, credentials.peer(peer, Role.NODE), address)

    return connect


def _bind(address: Address, live: LiveCredentials) -> tuple[grpc.aio.Server, Address]:
    server = grpc.aio.server(interceptors=[GateInterceptor(Gate(live))], options=server_options())
    try:
        port = server.add_secure_port(str(address), server_credentials(live))
    except RuntimeError as error:
        raise ListenError(f"{address}: cannot listen there (in use, or not ours)") from error
    if port == 0:
        raise ListenError(f"{address}: cannot listen there (in use, or not ours)")
    return server, Address(address.host, port)


def _add_services(
    server: grpc.aio.Server, live: LiveCredentials, node: Node, packs_dir: Path
) -> health.aio.HealthServicer:
    gate = Gate(live)
    server.add_generic_rpc_handlers((MigrationService(node.transfers, gate).handlers(),))
    session_pb2_grpc.add_SessionServicer_to_server(
        SessionService(node.sessions, node.moves, packs_dir, node.depot, node.tier), server
    )
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    names = (wire.SERVICE, SESSION_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return health_service


async def _stop(
    server: grpc.aio.Server, node: Node, health_service: health.aio.HealthServicer
) -> None:
    await health_service.enter_graceful_shutdown()
    await node.moves.close()
    await node.depot.close()
    await server.stop(GRACE_S)
    await node.transfers.close()
    log.info("stopped")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, KvpackError):
        await task
