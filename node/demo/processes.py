"""Child processes of the demo. None outlives it: they stop when their standard input ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import node as node_package
from node.config import Address, child_environment
from node.errors import NodeError, UsageError
from node.migration.book import to_the_end

#: Loading a small model takes about two seconds; the rest is for a machine that is very busy.
START_S: Final = 90.0
STOP_S: Final = 10.0
COMMAND_S: Final = 60.0


class ChildError(NodeError):
    """A child process did not do what it was started for."""

    reason = "child_failed"


@dataclass(frozen=True, slots=True)
class ServeProcess:
    """A running ``kvnode serve``."""

    node: str
    address: Address
    pid: int


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str


@contextlib.asynccontextmanager
async def serving(
    arguments: Sequence[str], log: Path, command: Sequence[str] = ("serve",)
) -> AsyncIterator[ServeProcess]:
    """Run ``kvnode serve``, or another ``command`` that announces itself, until the block ends.

    Raises:
        ChildError: It did not start; the message is its own.
    """
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *_command("node", *command, *arguments, "--stop-on-stdin-end"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=sink,
            env=_environment(),
            # Its own group: an interrupt at the terminal is ours to pass on, in order.
            start_new_session=True,
        )
    try:
        yield await _announced(process, log)
    finally:
        # Also where this is cancelled meanwhile: a child that nobody waits for outlives the loop.
        await to_the_end(_stop(process))


async def run_command(module: str, *arguments: str, within_s: float = COMMAND_S) -> Ran:
    """Run a command of ours to its end, which must come in ``within_s`` seconds.

    Raises:
        ChildError: It does not end.
    """
    process = await asyncio.create_subprocess_exec(
        *_command(module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(),
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(within_s):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        raise ChildError(f"{module} {arguments[0]}: did not end in {within_s:.0f} s") from None
    finally:
        await to_the_end(_stop(process))
    code = process.returncode if process.returncode is not None else -1
    return Ran(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))


async def _announced(process: asyncio.subprocess.Process, log: Path) -> ServeProcess:
    if process.stdout is None:
        raise RuntimeError("started without a pipe")
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
    except TimeoutError:
        lines = log.read_text(errors="replace").splitlines()
        said = lines[-1] if lines else "it said nothing; is this machine very busy?"
        raise ChildError(f"a node did not start in {START_S:.0f} s: {said}") from None
    try:
        said = json.loads(line)
        return ServeProcess(said["node"], Address.parse(said["address"]), said["pid"])
    except (ValueError, KeyError, TypeError, UsageError):
        raise ChildError(_last_error(log)) from None


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    own = [line for line in lines if line.startswith("kvnode: error: ")]
    if own:
        return own[-1].removeprefix("kvnode: error: ")
    return "a node ended before it served" + (f": {lines[-1]}" if lines else "")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        # Not by asyncio: it would reap a child that has just ended, behind its own watcher's back.
        os.kill(process.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _command(module: str, *arguments: str) -> list[str]:
    # -P: the folder that the demo is run in may hold a package of the same name.
    return [sys.executable, "-P", "-m", module, *arguments]


def _environment() -> dict[str, str]:
    return child_environment(Path(str(node_package.__file__)).resolve().parent.parent)
