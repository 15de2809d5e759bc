"""Real nodes with an HTTP port: one in a process of its own, one in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from node.config import Address, ServeConfig, child_environment
from node.http.auth import add_key
from node.http.options import HttpOptions
from node.server import Node, running
from node.serving.options import ServingOptions
from node.serving.serving import Serving

ROOT = Path(__file__).resolve().parents[3]

#: The model that ships: it writes English, so answers can be told apart.
TRAINED = ROOT / "examples" / "models" / "muse-novels-6m"

#: How long a node may take to start on a machine that is busy.
START_S = 60.0
STOP_S = 20.0


@dataclasses.dataclass
class NodeProcess:
    """A running ``kvnode serve``.

    Attributes:
        base_url: Without a path; OpenAI's clients want ``/v1`` behind it (:attr:`v1`).
        process: Its process.
        data_dir: Its own files.
        log: What it writes on standard error.
        grpc: Where it listens for gRPC; empty: nowhere.
    """

    base_url: str
    process: subprocess.Popen
    data_dir: Path
    log: Path
    grpc: str = ""

    @property
    def v1(self) -> str:
        return f"{self.base_url}/v1"

    def kill(self) -> None:
        """As by ``kill -9``."""
        self.process.kill()
        self.process.wait(STOP_S)

    def stop(self, seconds: float = STOP_S) -> int:
        """SIGTERM, and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def served(
    data_dir: Path,
    *arguments: str,
    model: Path = TRAINED,
    port: int = 0,
    environment: dict[str, str] | None = None,
) -> Iterator[NodeProcess]:
    """A node in a process of its own that is ready to answer; it is stopped with the block.

    Args:
        data_dir: Its own files; the same one again is a restart.
        arguments: Further options of ``kvnode serve``.
        model: What it serves.
        port: 0 lets the system choose.
        environment: Set beside what every child gets.
    """
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    log = data_dir.with_name(f"{data_dir.name}.log")
    with start(data_dir, *arguments, model=model, port=port, environment=environment) as process:
        said = announced(process, log)
        yield NodeProcess(said["http"], process, data_dir, log, said.get("address", ""))


@contextlib.contextmanager
def start(
    data_dir: Path,
    *arguments: str,
    model: Path = TRAINED,
    port: int = 0,
    environment: dict[str, str] | None = None,
) -> Iterator[subprocess.Popen]:
    """The process alone, perhaps not ready yet; it never outlives the block."""
    command = [
        *(sys.executable, "-P", "-m", "node", "serve", "--model", str(model)),
        *("--data-dir", str(data_dir), "--port", str(port), "--volume-worst", "20"),
        *("--stop-on-stdin-end", *arguments),
    ]
    log = data_dir.with_name(f"{data_dir.name}.log")
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            env={**child_environment(ROOT), **(environment or {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in (process.stdin, process.stdout):
            pipe.close()


def announced(process: subprocess.Popen, log: Path) -> dict:
    """What the node says once it is ready."""
    ready, _, _ = select.select([process.stdout], [], [], START_S)
    line = process.stdout.readline() if ready else b""
    if not line:
        raise AssertionError(f"the node did not start: {log.read_text()[-2000:]}")
    return json.loads(line)


@dataclasses.dataclass(frozen=True)
class WebNode:
    """A node in this process.

    Attributes:
        node: Everything of it.
        base_url: Without a path.
    """

    node: Node
    base_url: str

    @property
    def v1(self) -> str:
        return f"{self.base_url}/v1"

    @property
    def serving(self) -> Serving:
        """What its routes get."""
        return self.node.entrance.door.serving


@contextlib.asynccontextmanager
async def web_node(
    data_dir: Path,
    model: Path = TRAINED,
    serving: ServingOptions | None = None,
    **http: object,
) -> AsyncIterator[WebNode]:
    """A node in this process and loop, until the block ends.

    Args:
        data_dir: Its own files; the same one again is a restart.
        model: What it serves.
        serving: Slots, context and cache.
        http: Fields of ``HttpOptions``.
    """
    config = ServeConfig(
        None,
        model,
        data_dir,
        None,
        f"sqlite:{data_dir / 'directory.sqlite'}",
        volume_worst_s=20.0,
        http=HttpOptions(Address("127.0.0.1", 0), **{"drain_s": 2.0, **http}),
        serving=serving or ServingOptions(),
    )
    async with running(config) as node:
        yield WebNode(node, node.entrance.url)


def within(work, seconds: float = 60.0):
    """Run a coroutine in a loop of its own, with a bound on its time."""

    async def bounded():
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(bounded())


def until(found, seconds: float = 40.0, step: float = 0.02):
    """The first true thing that ``found()`` gives in that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = found()
        if value:
            return value
        time.sleep(step)
    raise AssertionError(f"nothing in {seconds} s (load {os.getloadavg()[0]:.1f})")


def settled(node: NodeProcess, seconds: float = 20.0) -> None:
    """Wait until no file of its store is new any more: cuts become durable in the background."""
    seen = -1

    def still() -> bool:
        nonlocal seen
        before, seen = seen, sum(1 for _ in (node.data_dir / "store").rglob("*"))
        return seen == before

    until(still, seconds, 0.5)


def ask(url: str, method: str = "GET", body: bytes | None = None, **headers: str):
    """``(status, headers, body)`` of one request, made by the standard library."""
    request = urllib.request.Request(url, body, headers, method=method)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def two_tenants(folder: Path) -> tuple[Path, tuple[dict[str, str], ...]]:
    """A key file in ``folder``, and the headers of tenants ``mine``, ``other``, and of ``local``.

    The last one is the node's own tenant, and an administrator.
    """
    keys = folder / "keys"
    folder.chmod(0o700)
    made = (
        add_key(keys, "mine"),
        add_key(keys, "other"),
        add_key(keys, "local", is_admin=True),
    )
    return keys, tuple({"Authorization": f"Bearer {key}"} for key in made)


def code(answer) -> str:
    """The stable word of a refusal that :func:`ask` met."""
    return json.loads(answer[2])["error"]["code"]
