"""Two nodes as real processes on one machine, a client's credentials, and what lies on disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvpack.keys import generate_key, write_key_file
from kvpack.publish import is_private_name
from node import enroll
from node.client import NodeClient
from node.config import Address
from node.handover import copy_tenant_key
from node.trust import Role, pin
from tests.small_model import make_small_model

from .nursery import ROOT, Child, Nursery, execute

NODES = ("a", "b")
CLIENT = "client"
#: With the prompts of the campaign: a window that is not full, two that have wrapped, and with two
#: of the three a block of it that is sealed before the freeze.
WINDOW = 512
LAYERS = 6

#: Short, so that no test waits for long; long enough for a node that has to start anew.
TRANSFER_LEASE_S = 6.0
NODE_LEASE_S = 3.0
START_S = 60.0


@dataclass(frozen=True)
class Lab:
    """Folders of two nodes and a client that know each other; nothing runs yet."""

    root: Path
    model: Path

    @classmethod
    def make(cls, root: Path) -> Lab:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        lab = cls(root, root / "tiny")
        make_small_model(lab.model, "muse_glimmer", seed=5, window=WINDOW, layers=LAYERS)
        key = root / "tenant.key"
        write_key_file(key, generate_key("faults"))
        for name in (*NODES, CLIENT):
            enroll.enroll(root / "authority", lab.credentials(name), name)
            copy_tenant_key(key, lab.credentials(name))
        for name in NODES:
            pin(lab.credentials(name), lab.certificate(CLIENT), Role.CLIENT)
            pin(lab.credentials(CLIENT), lab.certificate(name), Role.NODE)
            for other in NODES:
                if other != name:
                    pin(lab.credentials(name), lab.certificate(other), Role.NODE)
        return lab

    @property
    def directory(self) -> Path:
        return self.root / "directory.sqlite"

    def credentials(self, name: str) -> Path:
        return self.root / f"{name}-credentials"

    def certificate(self, name: str) -> bytes:
        return (self.credentials(name) / enroll.NODE_CERTIFICATE).read_bytes()

    def data(self, name: str) -> Path:
        return self.root / f"{name}-data"

    def leftovers(self, name: str) -> list[str]:
        """Files below a node's data that belong to nothing that the node holds.

        What a killed writer left in the store of cuts is for ``kvpack gc`` to collect.
        """
        folder = self.data(name)
        with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as journal:
            held = {row[0] for row in journal.execute("SELECT pack FROM held")}
        spool = {path.name for path in (folder / "spool").iterdir()}
        found = [path for path in folder.rglob("*") if is_private_name(path.name)]
        private = [str(path) for path in found if folder / "store" not in path.parents]
        return sorted([*(spool - held), *private])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class NodeProcess:
    """One node, started again on the same address as often as it ends."""

    lab: Lab
    name: str
    nursery: Nursery | None = None  # forks it; else it is executed
    host: str = "127.0.0.1"  # where we find it
    listen: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    transfer_lease_s: float = TRANSFER_LEASE_S
    lease_s: float = NODE_LEASE_S
    more: Sequence[str] = ()  # further options of ``kvnode serve``
    prefix: Sequence[str] = ()  # what runs the command, such as ``ip netns exec NAME``
    child: Child | None = None
    starts: int = 0

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)

    @property
    def orders(self) -> Path:
        return self.lab.root / f"{self.name}.order"

    @property
    def log(self) -> Path:
        return self.lab.root / f"{self.name}.log"

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    def order(self, text: str) -> None:
        """What this node is to do next at which point; empty: nothing."""
        self.orders.write_text(text)

    def reached(self) -> list[str]:
        """Every point that this node ever reached, in order."""
        trace = self.orders.with_name(self.orders.name + ".trace")
        return trace.read_text().split() if trace.exists() else []

    async def start(self) -> bool:
        """Start it; False where it ended, by an order, before it served."""
        if not self.orders.exists():
            self.order("")
        arguments = [
            "serve",
            "--grpc", f"{self.listen}:{self.port}", "--model", str(self.lab.model),
            "--data-dir", str(self.lab.data(self.name)),
            "--credentials", str(self.lab.credentials(self.name)),
            "--directory", f"sqlite:{self.lab.directory}", "--volume-worst", "30",
            "--lease", str(self.lease_s), "--transfer-lease", str(self.transfer_lease_s),
            "--fault-points", "--stop-on-stdin-end", *self.more,
        ]  # fmt: skip
        environment = {"KVPACK_FAULT": f"@{self.orders}"}
        if self.nursery is not None:
            self.child = self.nursery.fork(arguments, environment, self.log)
        else:
            paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
            command = [*self.prefix, sys.executable, "-P", "-m", "node", *arguments]
            self.child = execute(command, environment, self.log)
        self.starts += 1
        async with asyncio.timeout(START_S):
            line = await self.child.first_line()
            if not line:
                await self.child.ended.wait()
        return bool(line)

    def is_paused(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rsplit(")", 1)[1].split()[0] == "T"

    def has_ended(self) -> bool:
        return self.child is None or self.child.ended.is_set()

    def signal(self, number: int) -> None:
        assert self.child is not None
        self.child.signal(number)

    async def kill(self) -> None:
        if self.child is not None:
            self.child.signal(signal.SIGKILL)
            await self.child.ended.wait()

    async def stop(self) -> None:
        """End it as an operator would, paused or not."""
        if self.child is None or self.has_ended():
            return
        self.child.signal(signal.SIGCONT)
        self.child.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(20):
                await self.child.ended.wait()
        except TimeoutError:
            await self.kill()

    def client(self) -> NodeClient:
        return NodeClient(self.lab.credentials(CLIENT), self.name, self.address)


@contextlib.asynccontextmanager
async def started(*nodes: NodeProcess):
    """The nodes, running until the block ends."""
    try:
        served = await asyncio.gather(*(node.start() for node in nodes))
        assert all(served), [node.log.read_text()[-2000:] for node in nodes]
        yield
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))
