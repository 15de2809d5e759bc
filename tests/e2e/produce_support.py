"""Real processes of a producer that computes with torch, and of nodes that take its rows."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_support import bound, environment

from kvpack.keys import generate_key, write_key_file
from node.config import Address
from node.demo.stage import SOURCE, Stage, _enroll_all

#: Runs ``kvnode`` where MLX cannot be imported, as on a machine that has none.
WITHOUT_MLX = """
import sys
from importlib.machinery import PathFinder
class Barred(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.split(".")[0] in ("mlx", "mlx_lm")
        return None if absent else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Barred if finder is PathFinder else finder for finder in sys.meta_path]
from node.__main__ import main
main()
"""

#: Runs ``kvnode`` as it is.
AS_EVER = "from node.__main__ import main; main()"

#: Runs ``kvnode serve`` with a dense model in float32, which no node does: to measure by.
IN_FLOAT32 = """
import sys
from concurrent.futures import ThreadPoolExecutor
from node.config import prepare_process
prepare_process()
from node.cli_serve import serve, serve_config
options = serve.make_context("serve", sys.argv[2:]).params
config = serve_config(options, options["model"])
from engine import load_model
from node.daemon import serve as run
from node.engine_thread import EngineThread
from node.server import Fitting
async def load(config):
    executor = ThreadPoolExecutor(1)
    def work():
        return load_model(config.model_dir, dtype="float32", allow_float32=True)
    import asyncio
    model = await asyncio.get_running_loop().run_in_executor(executor, work)
    return EngineThread(executor, model)
run(config, stop_on_stdin_end=True, fitting=Fitting(load=load))
"""


def require_torch() -> None:
    """A producer that is silently not tried is untested, so its absence is a failure."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.fail(f"the producer's processes need a package: pip install {name}")


@dataclass(frozen=True)
class Child:
    """A running process that announced itself."""

    node: str
    address: Address
    http: str
    pid: int


@contextlib.asynccontextmanager
async def child(code: str, command: str, arguments: list[str], log: Path):
    """Run ``code`` with the arguments of ``kvnode COMMAND`` until the block ends."""
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", code, command, *arguments, "--stop-on-stdin-end",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=sink,
            env=environment(), start_new_session=True,
        )  # fmt: skip
    try:
        async with asyncio.timeout(bound(60)):
            line = await process.stdout.readline()
        assert line, log.read_text()
        said = json.loads(line)
        http = said.get("http", "")
        yield Child(said["node"], Address.parse(said["address"]), http, said["pid"])
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), 30)


def set_stage(folder: Path, model: Path) -> Stage:
    """Keys and certificates of two nodes and a client."""
    work = folder / "work"
    work.mkdir(mode=0o700)
    stage = Stage(folder, work, model)
    write_key_file(stage.key, generate_key("tests"))
    _enroll_all(stage)
    return stage


def producing(stage: Stage, *options: str):
    """``kvnode produce`` without MLX, on the CPU."""
    arguments = [*stage.serve_arguments(SOURCE, "127.0.0.1:0"), "--device", "cpu", *options]
    return child(WITHOUT_MLX, "produce", arguments, stage.log(SOURCE))
