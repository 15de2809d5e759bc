"""Two nodes in one process, on real sockets, and a source that is driven by hand."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import grpc
import grpc.aio

from kvpack.chunk import seal_component, seal_tile, seal_token_ids
from kvpack.keys import generate_key, write_key_file
from kvpack.wire import encode_numerics
from node import enroll
from node.client import NodeClient
from node.config import Address, ServeConfig
from node.handover import copy_tenant_key
from node.migration import wire
from node.packs import cut_session, manifest_blob
from node.pb.v1 import migration_pb2 as pb
from node.pb.v1 import session_pb2
from node.server import running
from node.trust import Role, load_credentials, open_channel, pin
from tests.small_model import make_small_model

WINDOW = 16
LAYERS = 4
SECONDS = 20.0


def run(work, seconds: float = 120.0):
    """Run a coroutine with a bound on its time."""

    async def bounded():
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(bounded())


def make_model(folder: Path) -> Path:
    """A tiny model folder with a window of 16 tokens."""
    make_small_model(folder / "tiny", "muse_glimmer", seed=3, window=WINDOW, layers=LAYERS)
    return folder / "tiny"


def prompt(length: int, seed: int = 1) -> list[int]:
    """Token ids that look like bytes."""
    return [(seed * 31 + 7 * i + i * i) % 251 for i in range(length)]


@dataclasses.dataclass(frozen=True)
class World:
    """Folders of several parties that were enrolled at one authority."""

    root: Path
    model_dir: Path

    NODES = ("source", "target", "third")

    @classmethod
    def make(cls, root: Path, model_dir: Path) -> World:
        world = cls(root, model_dir)
        key = root / "tenant.key"
        write_key_file(key, generate_key("tests"))
        for name in (*cls.NODES, "client", "stranger"):
            enroll.enroll(root / "authority", world.credentials(name), name)
            copy_tenant_key(key, world.credentials(name))
        for name in cls.NODES:
            pin(world.credentials(name), world.certificate("client"), Role.CLIENT)
            pin(world.credentials("client"), world.certificate(name), Role.NODE)
            pin(world.credentials("stranger"), world.certificate(name), Role.NODE)
            for other in cls.NODES:
                if other != name:
                    pin(world.credentials(name), world.certificate(other), Role.NODE)
        return world

    def credentials(self, name: str) -> Path:
        return self.root / f"{name}-credentials"

    def certificate(self, name: str) -> bytes:
        return (self.credentials(name) / enroll.NODE_CERTIFICATE).read_bytes()

    def config(self, name: str, model_dir: Path | None = None) -> ServeConfig:
        return ServeConfig(
            Address("127.0.0.1", 0),
            model_dir or self.model_dir,
            self.root / f"{name}-data",
            self.credentials(name),
            f"sqlite:{self.root / 'directory.sqlite'}",
            volume_worst_s=20.0,
        )

    def spool(self, name: str) -> list[str]:
        """Names in a node's spool folder."""
        return sorted(path.name for path in (self.root / f"{name}-data" / "spool").iterdir())

    @contextlib.asynccontextmanager
    async def node(self, name: str, model_dir: Path | None = None):
        """A running node and a client of it."""
        async with (
            running(self.config(name, model_dir)) as node,
            NodeClient(self.credentials("client"), name, node.address) as client,
        ):
            yield node, client

    @contextlib.asynccontextmanager
    async def pair(self):
        """Source and target, each with its client."""
        async with (
            self.node("source") as (source, giving),
            self.node("target") as (target, taking),
        ):
            yield source, giving, target, taking

    def migration_stub(self, caller: str, peer: str, address: Address):
        """The Migration service of ``peer`` as seen by ``caller``: ``(stub, channel)``."""
        credentials = load_credentials(self.credentials(caller))
        channel = open_channel(credentials, credentials.peer(peer, Role.NODE), address)
        return wire.MigrationStub(channel, wire.Meter()), channel


async def move(giving, target, session, token_ids=(), **options):
    """Move a session to ``target`` through its source; gives the result."""
    request = session_pb2.MigrateRequest(
        session_id=session.session_id,
        token=session.token,
        target_node=target.name,
        target_address=str(target.address),
        token_ids=token_ids,
        **options,
    )
    result = None
    async for event in giving.migrate(request):
        if event.WhichOneof("event") == "result":
            result = event.result
    return result


async def events(client, session, index, count):
    """``(index, token, logits)`` of a generation."""
    found = []
    async for event in client.generate(session, index, count):
        found.append((event.index, event.token_id, event.logits))
    return found


class Hidden(Exception):
    """The reason of a refusal, as Status told it."""


async def refusal(work) -> tuple[str, grpc.StatusCode]:
    """Reason word and status code of a call that must be refused."""
    try:
        await work
    except Hidden as error:
        return str(error), grpc.StatusCode.ABORTED
    except grpc.aio.AioRpcError as error:
        words = dict(error.trailing_metadata() or ())
        assert wire.REASON_KEY in words, error
        return words[wire.REASON_KEY], error.code()
    raise AssertionError("was not refused")


class HandSource:
    """The giving end of one transfer, step by step, so that each step can be made wrong.

    It owns the session ``name`` on the node ``source`` like any client, takes its cut by the
    product's own functions, and then speaks to the target itself.
    """

    def __init__(self, world: World, source, target, *, number: int = 1, caller: str = "source"):
        self.world = world
        self.source = source
        self.target = target
        self.stub, self.channel = world.migration_stub(caller, target.name, target.address)
        self.ref = wire.transfer_ref(1, number)
        self.chunks = []
        self.session = None
        self.cut = None

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.channel.close()

    @property
    def binding(self):
        return self.source.moves.binding

    async def take_cut(self, name: str, token_ids) -> None:
        """Open a session, prefill it, and seal its cut."""
        sessions = self.source.sessions
        if name not in sessions:
            await sessions.open(name)
        self.session = await sessions.find(name)
        await sessions.append(self.session, token_ids)
        self.cut = await sessions.engine.call(cut_session, self.session)
        context, position = self.binding.context, self.cut.snapshot.position
        self.chunks = [seal_tile(context, tile) for tile in self.cut.snapshot.tiles]
        self.chunks += seal_token_ids(context, self.cut.snapshot.token_ids)
        self.chunks += [
            seal_component(context, chunk_class, position, 0, data)
            for chunk_class, data in self.cut.states.items()
        ]

    def prepare_request(self, **changes) -> pb.PrepareRequest:
        request = pb.PrepareRequest(
            transfer=self.ref,
            session_id=self.session.session_id,
            mode=pb.MODE_MOVE,
            token=wire.token_message(self.session.token),
            pack_header=self.binding.header_bytes,
            numerics=encode_numerics(self.binding.numerics),
            position=self.cut.snapshot.position,
        )
        for name, value in changes.items():
            if isinstance(value, (int, str, bytes, bool)):
                setattr(request, name, value)
            else:
                getattr(request, name).CopyFrom(value)
        if request.mode == pb.MODE_COPY:
            request.ClearField("token")
        return request

    async def prepare(self, **changes):
        return await self.stub.prepare(self.prepare_request(**changes), timeout=SECONDS)

    async def push(self, objects=None, *, ref=None, raw=()):
        """Push chunk objects, then raw messages; gives the number held."""
        call = self.stub.push(timeout=SECONDS)
        try:
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(wire.encode_open(ref or self.ref))
                for chunk in [c.object for c in self.chunks] if objects is None else objects:
                    await call.write(wire.encode_object(chunk))
                for message in raw:
                    await call.write(message)
                await call.done_writing()
            return (await call).received_objects
        except grpc.aio.AioRpcError as error:
            if wire.REASON_KEY in dict(error.trailing_metadata() or ()):
                raise
            # A write that met the end of the call hides why: the product asks Status then, too.
            status = await self.status()
            raise Hidden(status.reason or "transfer_state") from None

    @staticmethod
    def held(seal_id: bytes) -> bytes:
        """The raw piece that names a chunk."""
        return wire.encode_held(seal_id)

    def seal_request(self, digest: bytes, **changes) -> pb.SealRequest:
        references = tuple(chunk.reference for chunk in self.chunks)
        request = pb.SealRequest(
            transfer=self.ref,
            manifest=manifest_blob(
                self.binding,
                self.cut.snapshot.position,
                self.cut.schedule,
                references,
                mixed=self.cut.mixed,
            ),
            objects=len(references),
            object_bytes=sum(reference.object_bytes for reference in references),
            boundary_digest=digest,
        )
        for name, value in changes.items():
            setattr(request, name, value)
        return request

    async def boundary_digest(self) -> bytes:
        decoded = await self.source.sessions.engine.call(self.session.decode_next)
        return decoded.logits.digest()

    async def seal(self, digest: bytes, **changes):
        return await self.stub.seal(self.seal_request(digest, **changes), timeout=SECONDS)

    async def commit(self):
        return await self.stub.commit(pb.CommitRequest(transfer=self.ref), timeout=SECONDS)

    async def abort(self):
        return await self.stub.abort(pb.AbortRequest(transfer=self.ref), timeout=SECONDS)

    async def status(self):
        return await self.stub.status(pb.StatusRequest(transfer=self.ref), timeout=SECONDS)
