"""The parent's end of a child process: one request at a time, each with a bound on its time."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import node as node_package
from node.config import child_environment
from node.errors import NodeError
from node.prove.messages import LINE_BYTES_MAX, decode, encode

#: -P: the folder that the command is run in may hold a package of the same name.
COMMAND: Final = (sys.executable, "-P", "-m", "node.prove.child")

_STOP_S: Final = 10.0


class ProveChildError(NodeError):
    """A child process ended, hung, or could not do what everything else depends on."""

    reason = "child_failed"


class ModelRefusedError(ProveChildError):
    """The model cannot be loaded like that; nothing was computed."""

    reason = "bad_model_folder"


@dataclass(frozen=True, slots=True)
class Refused:
    """The child's answer where something was refused: what, in its own words."""

    kind: str
    message: str


class ChildProcess:
    """A running child."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def ask(self, operation: str, timeout_s: float, **values: object) -> Any | Refused:  # noqa: ANN401
        """Send a request and wait for its answer.

        Raises:
            ProveChildError: The child ended, or did not answer in time.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("started without pipes")
        try:
            async with asyncio.timeout(timeout_s):
                stdin.write(encode({"op": operation, **values}))
                await stdin.drain()
                line = await stdout.readline()
        except TimeoutError:
            raise ProveChildError(f"{operation}: no answer in {timeout_s:.0f} s") from None
        except (ConnectionError, ValueError):
            line = b""
        if not line:
            raise ProveChildError(f"{operation}: the child ended{_last_line(self._log)}")
        return _answer(decode(line))


def _answer(said: Mapping[str, Any]) -> Any | Refused:  # noqa: ANN401
    if "error" in said:
        return Refused(said["kind"], said["error"])
    return said["answer"]


@contextlib.asynccontextmanager
async def child_process(log: Path, command: Sequence[str] = COMMAND) -> AsyncIterator[ChildProcess]:
    """Run a child until the block ends; whatever happens, it has ended then."""
    environment = child_environment(Path(str(node_package.__file__)).resolve().parent.parent)
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=sink,
            env=environment,
            limit=LINE_BYTES_MAX,
            # Its own group: an interrupt at the terminal is the parent's to act on.
            start_new_session=True,
        )
    try:
        yield ChildProcess(process, log)
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        # The end of its input is the child's end, even in the middle of a computation.
        process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1][:200]}" if said else ""
