"""Servers in processes of their own: a node, and ``mlx_lm.server`` beside it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.config import child_environment

ROOT: Final = Path(__file__).resolve().parents[2]

#: The model that ships: it was trained, so that texts can be told apart. Window 256.
TRAINED: Final = ROOT / "examples" / "models" / "muse-novels-6m"
WINDOW_TOKENS: Final = 256

START_S: Final = 90.0
STOP_S: Final = 30.0


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        name: What stands in tables.
        url: Without a path.
        pid: Of its one process.
        process: It.
        started_s: Seconds from its start until it answered.
        grpc: Where a node listens for gRPC; empty: nowhere.
    """

    name: str
    url: str
    pid: int
    process: subprocess.Popen[bytes]
    started_s: float
    grpc: str = ""

    def cpu_s(self) -> float:
        """Processor seconds of all its threads, in user and in kernel."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Memory that is its own: what it maps of files comes and goes as the kernel likes."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"^RssAnon:\s+(\d+) kB$", text, re.MULTILINE)
        return int(found[1]) * 1024 if found else 0

    def kill(self) -> None:
        """As by ``kill -9``."""
        self.process.kill()
        self.process.wait(STOP_S)

    def json(self, path: str, body: dict[str, Any] | None = None, limit_s: float = 120) -> Any:
        """An answer that is no stream.

        Raises:
            OSError: None came, or a refusal.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)  # noqa: S310  loopback
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise OSError(f"{path}: {error.code} {error.read(500)!r}") from error

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:  # noqa: S310
            text = answer.read().decode()
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if re.match(rf"{name}[ {{]", line)
        )


@contextlib.contextmanager
def node(
    data_dir: Path, *arguments: str, model: Path = TRAINED, bytecode: Path | None = None
) -> Iterator[Server]:
    """A node that is ready; the same folder again is a restart.

    ``bytecode`` is a folder for compiled modules, as an installation has them beside the source.
    """
    command = [
        *(sys.executable, "-P", "-m", "node", "serve", "--model", str(model)),
        *("--data-dir", str(data_dir), "--port", "0", "--volume-worst", "20"),
        *("--stop-on-stdin-end", *arguments),
    ]
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    log = data_dir.with_name(f"{data_dir.name}.log")
    with _process(command, log, bytecode) as process:
        if process.stdout is None:
            raise OSError("the node has no standard output")
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline() if ready else b""
        if not line:
            raise OSError(f"the node did not start: {_end_of(log)}")
        said = json.loads(line)
        started_s = time.perf_counter() - began
        yield Server(
            "kvnode", said["http"], process.pid, process, started_s, said.get("address", "")
        )


@contextlib.contextmanager
def mlx_lm_server(folder: Path, *arguments: str, model: Path = TRAINED) -> Iterator[Server]:
    """``mlx_lm.server`` at its unbatched setting, from the same installation."""
    port = _free_port()
    command = [
        *(sys.executable, "-m", "mlx_lm", "server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "ERROR"),
        *("--decode-concurrency", "1", "--prompt-concurrency", "1", *arguments),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with _process(command, folder / "mlx-lm.log") as process:
        server = Server("mlx_lm.server", f"http://127.0.0.1:{port}", process.pid, process, 0.0)
        while True:
            if process.poll() is not None or time.perf_counter() - began > START_S:
                raise OSError("mlx_lm.server did not start")
            with contextlib.suppress(OSError):
                server.json("/health", limit_s=5)
                break
            time.sleep(0.05)
        yield server


@contextlib.contextmanager
def _process(
    command: list[str], log: Path, bytecode: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """It never outlives the block."""
    environment = child_environment(ROOT)
    if bytecode is not None:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-1000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
