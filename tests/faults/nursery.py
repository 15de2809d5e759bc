"""Forks node processes from one that has imported everything: a start then takes no second.

Nearly all of a node's start is the import of its libraries. A campaign starts hundreds of nodes,
and a forked one is as real a process as another: it has its own pid, memory, sockets and death.
The process that forks never opened a socket, ran no model and has one thread.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUEST_BYTES = 1 << 14
PR_SET_PDEATHSIG = 1


class Child:
    """A process of ours, forked or executed.

    Attributes:
        pid: Its id.
        ended: Set once it has ended.
    """

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.ended = asyncio.Event()
        self._stdin, self._stdout = stdin, stdout
        self._end = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._end, self._has_ended)

    async def first_line(self) -> bytes:
        """The first line that it prints; empty where it ends before."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        pipe = os.fdopen(self._stdout, "rb", buffering=0)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        return await reader.readline()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _has_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end)
        os.close(self._end)
        os.close(self._stdin)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)  # Only where it is our own child.
        self.ended.set()


def execute(command: Sequence[str], environment: dict[str, str], log: Path) -> Child:
    """A process of its own from the start."""
    (child_in, stdin), (stdout, child_out) = os.pipe(), os.pipe()
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=child_in, stdout=child_out,
            stderr=sink, start_new_session=True,
        )  # fmt: skip
    process.returncode = 0  # It is reaped by its Child, and not by subprocess.
    os.close(child_in)
    os.close(child_out)
    return Child(process.pid, stdin, stdout)


class Nursery:
    """The process that forks. One request at a time."""

    def __init__(self) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.faults.nursery", str(there.fileno())],
            pass_fds=[there.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        there.close()

    def fork(self, arguments: Sequence[str], environment: dict[str, str], log: Path) -> Child:
        """``kvnode ARGUMENTS`` in a forked process."""
        (child_in, stdin), (stdout, child_out) = os.pipe(), os.pipe()
        request = json.dumps([list(arguments), environment, str(log)]).encode()
        handles = array.array("i", [child_in, child_out])
        self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])
        os.close(child_in)
        os.close(child_out)
        return Child(int(self._socket.recv(32)), stdin, stdout)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(timeout=20)


def serve(connection: socket.socket) -> None:
    """Fork one process for each request, until nobody asks any more."""
    # What was forked ends by itself, or by its standard input; nobody waits for it here.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, handles, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 2)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(*json.loads(request), *handles)
        for handle in handles:
            os.close(handle)
        connection.send(str(pid).encode())


def _become(arguments, environment, log, stdin: int, stdout: int) -> None:
    """Be the node. Does not return."""
    code = 1
    try:
        os.setsid()
        # One that is paused would not see that its standard input ended.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number, handle in enumerate((stdin, stdout, sink)):
            os.dup2(handle, number)
            os.close(handle)
        os.environ.update(environment)
        from node.cli import main

        main(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        os._exit(code)


if __name__ == "__main__":
    from node.config import prepare_process

    prepare_process()

    import node.cli
    import node.daemon  # noqa: F401

    serve(socket.socket(fileno=int(sys.argv[1])))
