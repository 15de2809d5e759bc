"""Directories for tests: the file itself and the same file over gRPC; a clock that a test moves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import grpc.aio

from node import enroll
from node.config import Address
from node.directory import Ownership
from node.directory_remote import RemoteDirectory
from node.directory_service import DirectoryService
from node.directory_sqlite import SqliteDirectory
from node.trust import (
    Gate,
    GateInterceptor,
    LiveCredentials,
    Role,
    pin,
    server_credentials,
    server_options,
)

KEEPER = "keeper"
NODES = ("a", "b", "c")
CLIENT = "client"
STRANGER = "stranger"


def nonce(number: int) -> bytes:
    return number.to_bytes(16, "big")


class FakeClock:
    """A clock that stands still until it is moved; ``restart`` is what a reboot does to it."""

    def __init__(self, now_s: float = 1000.0):
        self.value_s = now_s

    def now_s(self):
        return self.value_s

    def move(self, seconds):
        self.value_s += seconds

    def restart(self, now_s=0.0):
        self.value_s = now_s


def enroll_all(root: Path) -> Path:
    """Folders of a keeper of a directory, three nodes and a client of it, and a stranger."""
    for name in (KEEPER, *NODES, CLIENT, STRANGER):
        enroll.enroll(root / "authority", root / name, name)
    keeper = (root / KEEPER / enroll.NODE_CERTIFICATE).read_bytes()
    for name in (*NODES, CLIENT, STRANGER):
        pin(root / name, keeper, Role.NODE)
    for name in (*NODES, CLIENT):
        role = Role.CLIENT if name == CLIENT else Role.NODE
        pin(root / KEEPER, (root / name / enroll.NODE_CERTIFICATE).read_bytes(), role)
    return root


class Everybody:
    """One directory as its nodes see it together: each write goes out by whom it is for.

    A node reaches a directory of another machine under its own name only, so a test that speaks
    for several nodes needs a connection of each. What names no node goes out by the owner.
    """

    def __init__(self, ways):
        self.ways = ways

    def __getattr__(self, name):
        return getattr(self.ways["a"], name)

    async def claim(self, session_id, node, nonce):
        return await self.ways[node].claim(session_id, node, nonce)

    async def transfer(self, session_id, token, node, nonce):
        # A store has no way of its own: its owner gives a session to it.
        way = self.ways.get(node) or await self._of(session_id, token)
        return await way.transfer(session_id, token, node, nonce)

    async def takeover(self, session_id, token, node, nonce):
        return await self.ways[node].takeover(session_id, token, node, nonce)

    async def release(self, session_id, token):
        await (await self._of(session_id, token)).release(session_id, token)

    async def put(self, session_id, token, value):
        await (await self._of(session_id, token)).put(session_id, token, value)

    async def register(self, node, incarnation, ttl_s):
        return await self.ways[node].register(node, incarnation, ttl_s)

    async def renew(self, node, incarnation, ttl_s):
        return await self.ways[node].renew(node, incarnation, ttl_s)

    async def expire(self, node, incarnation):
        await self.ways[node].expire(node, incarnation)

    async def _of(self, session_id, token):
        entry = await self.ways["a"].owner(session_id)
        owned = isinstance(entry, Ownership) and entry.token == token
        return self.ways[entry.node if owned else "a"]


@dataclasses.dataclass
class Place:
    """A directory file, the clock that it is measured by, and how it is reached.

    ``parties`` is a folder of :func:`enroll_all`, or None to use the file itself.
    """

    path: Path
    parties: Path | None = None
    clock: FakeClock = dataclasses.field(default_factory=FakeClock)
    ttl_s: float = 10.0

    default_lease = "node.directory_tables.LEASE_S"

    def begun(self):
        """As :meth:`etcd_support.EtcdPlace.begun`: here nothing is over but by the clock."""
        return contextlib.nullcontext

    async def part(self, share):
        """Let a part of a lease go by."""
        self.clock.move(share * self.ttl_s)

    async def outlast(self, directory, node):
        """Let a lease that runs end, and no more than that."""
        left_s = (await directory.lease(node)).left_s
        self.clock.move(left_s - 0.01)
        assert (await directory.lease(node)).left_s
        self.clock.move(0.011)
        assert not (await directory.lease(node)).left_s

    @contextlib.asynccontextmanager
    async def opened(self):
        """The directory, for all of its nodes."""
        directory = SqliteDirectory(self.path, self.clock)
        try:
            if self.parties is None:
                yield directory
                return
            async with self.served(directory) as address:
                ways = {name: self.remote(name, address) for name in NODES}
                everybody = Everybody(ways)
                # Only whoever has the file can adopt it.
                everybody.adopt = directory.adopt
                yield everybody
                for way in ways.values():
                    await way.close()
        finally:
            await directory.close()

    @contextlib.asynccontextmanager
    async def served(self, directory, shared=True, port=0):
        """A server of ``directory``; gives its address."""
        live = LiveCredentials(self.parties / KEEPER)
        gate = Gate(live)
        server = grpc.aio.server(interceptors=[GateInterceptor(gate)], options=server_options())
        port = server.add_secure_port(f"127.0.0.1:{port}", server_credentials(live))
        if shared:
            server.add_generic_rpc_handlers((DirectoryService(directory, gate).handlers(),))
        await server.start()
        try:
            yield Address("127.0.0.1", port)
        finally:
            await server.stop(None)

    def remote(self, name, address):
        return RemoteDirectory(LiveCredentials(self.parties / name), KEEPER, address)

    def run(self, work, seconds=60.0):
        """Run ``work(directory)`` with a bound on its time."""

        async def bounded():
            async with asyncio.timeout(seconds), self.opened() as directory:
                return await work(directory)

        return asyncio.run(bounded())
