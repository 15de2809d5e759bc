"""Two nodes of made rows as processes of their own, with credentials that are thrown away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from kvpack.keys import generate_key, write_key_file
from node import enroll
from node.client import NodeClient
from node.config import Address, child_environment
from node.handover import copy_tenant_key
from node.trust import Role, pin

ROOT: Final = Path(__file__).resolve().parents[2]
NODES: Final = ("source", "target")
CLIENT: Final = "client"
START_S: Final = 60.0

_STEP: Final = re.compile(r"^(\S+ \S+) INFO node.migration.source: move of (\S+) to \S+: (\w+)$")


@dataclass(frozen=True)
class Running:
    """A node that runs."""

    address: Address
    pid: int

    def cpu_s(self) -> float:
        """Processor seconds of all its threads, in user and in kernel."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Ends:
    """Folders of two nodes and a client that know each other; nothing runs yet."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> Ends:
        ends = cls(root)
        key = root / "tenant.key"
        write_key_file(key, generate_key("bench"))
        for name in (*NODES, CLIENT):
            enroll.enroll(root / "authority", ends.credentials(name), name)
            copy_tenant_key(key, ends.credentials(name))
        leaves = {
            name: (ends.credentials(name) / enroll.NODE_CERTIFICATE).read_bytes()
            for name in (*NODES, CLIENT)
        }
        for name in NODES:
            pin(ends.credentials(name), leaves[CLIENT], Role.CLIENT)
            pin(ends.credentials(CLIENT), leaves[name], Role.NODE)
            for other in NODES:
                if other != name:
                    pin(ends.credentials(name), leaves[other], Role.NODE)
        return ends

    def credentials(self, name: str) -> Path:
        return self.root / f"{name}-credentials"

    def log(self, name: str) -> Path:
        return self.root / f"{name}.log"

    def client(self, name: str, address: Address) -> NodeClient:
        return NodeClient(self.credentials(CLIENT), name, address)

    @contextlib.asynccontextmanager
    async def running(self, name: str, rows: int) -> AsyncIterator[Running]:
        """The node of that name, whose sessions have so many rows, until the block ends."""
        with self.log(name).open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "bench.drain.node",
                "--data-dir", str(self.root / f"{name}-data"), "--rows", str(rows),
                "--credentials", str(self.credentials(name)),
                "--directory", f"sqlite:{self.root / 'directory.sqlite'}",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=sink,
                env=child_environment(ROOT),
            )  # fmt: skip
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("started without pipes")
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
            if not line:
                raise SystemExit(f"{name} did not start:\n{self.log(name).read_text()[-2000:]}")
            yield Running(Address.parse(json.loads(line)["address"]), process.pid)
        finally:
            process.stdin.close()
            await process.wait()

    def steps(self, name: str) -> dict[str, dict[str, float]]:
        """By session, when its move entered which state, in s, by the node's own log."""
        found: dict[str, dict[str, float]] = {}
        for line in self.log(name).read_text().splitlines():
            said = _STEP.match(line)
            if said is not None:
                at = datetime.strptime(said[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                found.setdefault(said[2], {})[said[3]] = at
        return found
