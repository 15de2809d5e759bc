"""A link of a known rate, by the kernel: a loopback of its own, with a token bucket (``tc``).

What runs behind the prefix has a network namespace to itself, which ends with it. As another user
than root it has a user namespace, too, where the system permits that. Linux with iproute2 alone.

    python -m bench.link BYTES

sends so many bytes through a bare socket to itself and says how long that took.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench.measured import FAILED, NOT_INSTALLED
from bench.turns import NoFigureError

ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 60.0
_PIECE_BYTES = 1 << 20

#: Deep enough for what one socket writes at a time, and a hundredth of what is measured.
_BUCKET = "burst 4mb latency 200ms"


def behind(gbits: float | None) -> tuple[str, ...]:
    """A prefix for a command, which then has ``gbits`` Gb/s on its loopback; None: no bound.

    Raises:
        NoFigureError: There is no such thing here.
    """
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            raise NoFigureError(NOT_INSTALLED, f"{tool} (Linux, util-linux and iproute2)")
    rate = "" if gbits is None else f" && tc qdisc add dev lo root tbf rate {gbits}gbit {_BUCKET}"
    script = f'PATH=$PATH:/usr/sbin:/sbin; ip link set lo up{rate} && exec "$@"'
    flags = "-n" if os.geteuid() == 0 else "-rn"
    return ("unshare", flags, "sh", "-c", script, "sh")


def bare_seconds(prefix: Sequence[str], byte_count: int) -> float:
    """What ``byte_count`` bytes take through a bare socket behind ``prefix``.

    Raises:
        NoFigureError: The system does not permit it.
    """
    ran = subprocess.run(
        [*prefix, sys.executable, "-m", "bench.link", str(byte_count)], cwd=ROOT,
        capture_output=True, text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    if ran.returncode:
        lines = ran.stderr.strip().splitlines()
        raise NoFigureError(FAILED, lines[-1] if lines else f"it ended with {ran.returncode}")
    return float(json.loads(ran.stdout)["seconds"])


def _send(byte_count: int) -> float:
    piece = memoryview(bytes(_PIECE_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taker = threading.Thread(target=_take, args=(listener, byte_count), daemon=True)
        taker.start()
        with socket.create_connection(listener.getsockname()) as stream:
            start = time.perf_counter()
            for sent in range(0, byte_count, _PIECE_BYTES):
                stream.sendall(piece[: byte_count - sent])
            if stream.recv(1) != b"k":
                raise OSError("the socket was closed")
            return time.perf_counter() - start


def _take(listener: socket.socket, left: int) -> None:
    stream, _ = listener.accept()
    buffer = bytearray(_PIECE_BYTES)
    with stream:
        while left and (count := stream.recv_into(buffer)):
            left -= count
        stream.sendall(b"k")


if __name__ == "__main__":
    print(json.dumps({"seconds": _send(int(sys.argv[1]))}))
