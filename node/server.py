"""One node process: everything wired together, started, and stopped again."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpack.errors import KvpackError
from kvpack.keys import EpochKey, load_key_file
from node.binding import PackBinding
from node.config import Address, ServeConfig, widen_heap
from node.dataplane.listeners import PlaneListeners
from node.directory_member import member
from node.engine_thread import EngineThread, import_engine
from node.errors import CredentialsError
from node.files import make_private_folder
from node.migration.admission import Target
from node.migration.depot import Depot
from node.migration.journal import Journal
from node.migration.moves import Moves
from node.migration.orders import Source
from node.migration.restore import Restorer
from node.migration.target import Transfers
from node.migration.versions import OURS, Minors
from node.recover import recover
from node.sessions import Sessions
from node.stores import StoreRoots
from node.tenants import KEYS, TenantKeys, Tenants
from node.tier import Tier
from node.volume import RESERVES, held_alone, probe_volume, volume_bound

# What only one of the ports needs is imported where that port is opened: a node without it starts
# sooner.
if TYPE_CHECKING:
    import grpc.aio

    from node.behind import Remembering
    from node.credentials import LiveCredentials
    from node.directory_sqlite import SqliteDirectory
    from node.web_side import Entrance

log = logging.getLogger(__name__)

#: Inside a data folder: packs of moves, and packs that clients asked for.
SPOOL: Final = "spool"
STORE: Final = "store"
PACKS: Final = "packs"

#: The part of a transfer's lease for which a source tries to reach its target again.
RESUME_SHARE: Final = 0.75

#: The name of a node that was not enrolled: no other node ever hears it.
LOCAL_NODE: Final = "local"


@dataclass(frozen=True, slots=True)
class Node:
    """A running node.

    Attributes:
        name: From its certificate.
        address: Where it listens for gRPC, with the port that it got; None: nowhere.
        sessions: What it owns.
        transfers: What comes in.
        moves: What goes out.
        depot: What goes into stores and comes back.
        tier: The store of cuts; None where nothing is kept.
        entrance: Its HTTP port; None: it has none.
        planes: Its data planes without TLS.
    """

    name: str
    address: Address | None
    sessions: Sessions
    transfers: Transfers
    moves: Moves
    depot: Depot
    tier: Tier | None
    entrance: Entrance | None = None
    planes: PlaneListeners | None = None


def _open_tier(config: ServeConfig, binding: PackBinding) -> Tier:
    return Tier.open(config.data_dir / STORE, binding, config.store)


async def _load(config: ServeConfig) -> EngineThread:
    return await EngineThread.load(config.model_dir, config.serving.chat_template, config.device)


@dataclass(frozen=True, slots=True)
class Fitting:
    """What a measurement puts in the place of a node's parts; a served node has the defaults.

    Attributes:
        load: Loads the model of ``config`` on a thread of its own.
        spools: Whether what arrives is written to disk before it is owned.
        tier: Opens the store of cuts; None: nothing is kept.
        services: Adds services of its own to the server.
        speaks: Versions of the protocol; other ones stand for another release.
    """

    load: Callable[[ServeConfig], Awaitable[EngineThread]] = _load
    spools: bool = True
    tier: Callable[[ServeConfig, PackBinding], Tier | None] = _open_tier
    services: Callable[[grpc.aio.Server, Node], None] | None = None
    speaks: Minors = OURS


SERVED: Final = Fitting()


@contextlib.asynccontextmanager
async def running(config: ServeConfig, fitting: Fitting = SERVED) -> AsyncIterator[Node]:
    """A node that serves until the block ends; then it finishes what runs and lets go of all.

    Raises:
        CredentialsError: The credentials folder is not usable.
        KeyFileError: The tenant's key is not usable.
        VolumeError: The data folder's volume is too slow, or refuses writes.
        FolderInUseError: Another process serves from the data folder.
        ModelFolderError: The model folder lacks something.
        DirectoryError: The directory cannot be read.
        ListenError: The address cannot be bound.
    """
    widen_heap()
    live = _credentials(config)
    name = LOCAL_NODE if live is None else live.current().name
    keys, roots, worst_s = await _prepare(config)
    async with contextlib.AsyncExitStack() as stack:
        # A second process would take this one's lease, and both would write the same files.
        stack.enter_context(held_alone(config.data_dir))
        # The ports first: a taken one is found before the model is loaded, and whoever calls in
        # the meantime is told that it is being loaded.
        entrance = await _open_entrance(stack, config, keys, name)
        server, address = _bind(stack, config, live)
        listeners = PlaneListeners(config.planes)
        stack.push_async_callback(listeners.close)
        imported = asyncio.create_task(_import_early(fitting))
        ours = await stack.enter_async_context(member(config, live, name))
        journal = Journal(config.data_dir / "journal.sqlite")
        stack.push_async_callback(journal.close)
        await imported
        engine = await fitting.load(config)
        stack.callback(engine.close)
        sessions = Sessions(name, engine, ours.directory, journal, ours.lease)
        tenants = Tenants(engine.model, keys)
        target = _target(config, fitting, sessions, tenants.binding(tenants.default), journal)
        transfers = Transfers(target)
        remembered = await _remember(stack, config, entrance, sessions, tenants)
        await _recover(target, transfers, roots, remembered)
        _say_how_quick(config, worst_s)
        moves = Moves(_source(config, target, live))
        depot = Depot(moves, Restorer(target, transfers, roots), roots)
        node = Node(
            name, address, sessions, transfers, moves, depot, target.tier, entrance, listeners
        )
        _keep_transfers(stack, node)
        if server is not None and live is not None:
            await _serve(stack, config, fitting, node, server, live, ours.shared, listeners)
        else:
            stack.push_async_callback(_stop, node)
        if entrance is not None and remembered is not None:
            await stack.enter_async_context(entrance.serving(node, engine, tenants, remembered))
        yield node
        log.info("stopping")
    log.info("stopped")


async def _import_early(fitting: Fitting) -> None:
    """Import what loads a model while databases are opened: those wait for the disk."""
    if fitting.load is _load:
        await asyncio.to_thread(import_engine)


def _credentials(config: ServeConfig) -> LiveCredentials | None:
    if config.credentials_dir is None:
        return None
    from node.credentials import LiveCredentials

    return LiveCredentials(config.credentials_dir)


async def _prepare(config: ServeConfig) -> tuple[TenantKeys, StoreRoots, float]:
    """Keys, where stores may lie, and the worst write in s. Nothing of it asks for the model."""
    given = _enrolled_key(config)
    for folder in (config.data_dir, config.data_dir / SPOOL, config.data_dir / PACKS):
        make_private_folder(folder)
    # Off the loop: a slow volume must not look like a hung process.
    probe = asyncio.to_thread(probe_volume, config.data_dir, volume_bound(config))
    probing = asyncio.create_task(probe)
    if config.http is not None:
        # What the port needs anyway takes as long to import as the volume to be probed.
        await asyncio.sleep(0)
        importlib.import_module("node.web_side")
    worst_s = await probing
    keys = TenantKeys(config.data_dir / KEYS, given)
    # Before anything is written: a wrong option must not leave a trace.
    roots = StoreRoots(config.store_roots, config.store)
    await asyncio.to_thread(roots.require_safe)
    return keys, roots, worst_s


def _say_how_quick(config: ServeConfig, worst_s: float) -> None:
    """Once the node runs: whoever is refused for another reason reads that one alone."""
    log.info("volume: worst of %d durable writes %.1f ms", RESERVES, 1000 * worst_s)
    if worst_s > config.volume_worst_s:
        slow_ms = 1000 * config.volume_worst_s
        log.warning("volume: slow; with --grpc it would be refused beyond %.0f ms", slow_ms)


async def _open_entrance(
    stack: contextlib.AsyncExitStack, config: ServeConfig, keys: TenantKeys, name: str
) -> Entrance | None:
    """The HTTP port, if there is to be one: until the stack ends."""
    if config.http is None:
        return None
    from node.web_side import Entrance

    return await stack.enter_async_context(Entrance.open(config, keys, name))


def _bind(
    stack: contextlib.AsyncExitStack, config: ServeConfig, live: LiveCredentials | None
) -> tuple[grpc.aio.Server | None, Address | None]:
    """The gRPC port, if there is to be one: taken, and not served yet."""
    if config.address is None or live is None:
        return None, None
    from node import grpc_side

    server, address = grpc_side.bind(config.address, live)
    stack.push_async_callback(server.stop, None)
    return server, address


def _target(
    config: ServeConfig,
    fitting: Fitting,
    sessions: Sessions,
    binding: PackBinding,
    journal: Journal,
) -> Target:
    """What sessions come into."""
    return Target(
        sessions, sessions.engine, binding, journal, config.data_dir / SPOOL,
        config.transfer_lease_s, fitting.spools, fitting.tier(config, binding),
        speaks=fitting.speaks,
    )  # fmt: skip


def _source(config: ServeConfig, target: Target, live: LiveCredentials | None) -> Source:
    """What sessions go out of."""
    resume_s = RESUME_SHARE * config.transfer_lease_s
    connect: Callable[[str, Address], grpc.aio.Channel] = _no_peer
    if live is not None:
        from node.grpc_side import connector

        connect = connector(live)
    return Source(
        target.sessions, target.engine, target.binding, target.journal, connect, resume_s,
        target.speaks, {} if config.planes is None else config.planes.towards,
    )  # fmt: skip


def _no_peer(peer: str, _address: Address) -> grpc.aio.Channel:
    raise CredentialsError(
        f"node {peer}: this node has no credentials: it was started without --grpc"
    )


async def _remember(
    stack: contextlib.AsyncExitStack,
    config: ServeConfig,
    entrance: Entrance | None,
    sessions: Sessions,
    tenants: Tenants,
) -> Remembering | None:
    """What clients of the HTTP port were told, if there is one: until the stack ends."""
    if entrance is None:
        return None
    from node.behind import remembering

    return await stack.enter_async_context(remembering(config, sessions, tenants.default))


async def _recover(
    target: Target, transfers: Transfers, roots: StoreRoots, remembered: Remembering | None
) -> None:
    """Bring back what a process before had. Nobody is served before."""
    memory = None if remembered is None else remembered.conversations
    recovered = await recover(target, transfers, roots, memory)
    log.info("restored %d sessions, %d lost", len(recovered.restored), len(recovered.lost))


def _keep_transfers(stack: contextlib.AsyncExitStack, node: Node) -> None:
    """What runs in the background of moves, until the stack ends."""
    if node.tier is not None:
        node.tier.start(lambda: bool(node.transfers.under_way()))
        stack.push_async_callback(node.tier.close)
    leases = asyncio.create_task(node.transfers.watch_leases())
    stack.push_async_callback(_cancel, leases)
    stack.push_async_callback(node.transfers.close)


async def _serve(
    stack: contextlib.AsyncExitStack,
    config: ServeConfig,
    fitting: Fitting,
    node: Node,
    server: grpc.aio.Server,
    live: LiveCredentials,
    shared: SqliteDirectory | None,
    listeners: PlaneListeners,
) -> None:
    """Serve gRPC until the stack ends; then moves are finished before the port closes."""
    from node import grpc_side
    from node.directory_service import DirectoryService
    from node.placement.wiring import placed
    from node.trust import Gate

    fleet = await stack.enter_async_context(placed(config, node, node.moves.binding, live))
    intake = await listeners.start(node.transfers, live)
    packs_dir = config.data_dir / PACKS
    health_service = grpc_side.add_services(server, live, node, packs_dir, fleet, intake)
    if shared is not None:
        service = DirectoryService(shared, Gate(live))
        server.add_generic_rpc_handlers((service.handlers(),))
    if node.entrance is not None:
        from node.relay.wiring import relaying

        server.add_generic_rpc_handlers((relaying(node.entrance, node, live),))
    if fitting.services is not None:
        fitting.services(server, node)
    await server.start()
    # Streams beside mTLS end as those within it do: before the transfers that they are of.
    stack.push_async_callback(listeners.close)
    stack.push_async_callback(server.stop, grpc_side.GRACE_S)
    stack.push_async_callback(_stop, node)
    stack.push_async_callback(health_service.enter_graceful_shutdown)


def _enrolled_key(config: ServeConfig) -> EpochKey | None:
    if config.credentials_dir is None:
        return None
    from node.enroll import TENANT_KEY

    return load_key_file(config.credentials_dir / TENANT_KEY)


async def _stop(node: Node) -> None:
    await node.moves.close()
    await node.depot.close()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, KvpackError):
        await task
