"""Why a TLS handshake failed, in the node's log: gRPC tells it to nobody but its own."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_FILTER: Final = Path(__file__).with_name("handshake_filter.py")
_STDERR: Final = 2

#: How long the filter may take to write what is left when the node stops.
_END_S: Final = 2.0


@contextlib.contextmanager
def handshakes_heard() -> Iterator[None]:
    """Let descriptor 2, where native code writes, go through the filter; Python's own does not.

    Only for a process that is a node: descriptor 2 is one for all of it. The block runs on without
    the filter where it cannot be started.
    """
    reader, writer = os.pipe()
    try:
        child = _start(reader)
    except OSError as error:
        os.close(reader)
        os.close(writer)
        log.warning("reasons of failed handshakes are not heard: %s", error.strerror)
        yield
        return
    os.close(reader)
    # Whoever writes must never wait for the filter; what it cannot take is lost.
    os.set_blocking(writer, False)
    before, original = sys.stderr, os.dup(_STDERR)
    sys.stderr = io.TextIOWrapper(
        open(original, "wb", buffering=0, closefd=False),  # noqa: SIM115 - a descriptor
        encoding="utf-8",
        errors="backslashreplace",
        write_through=True,
    )
    faulthandler.enable(file=original)
    os.dup2(writer, _STDERR)
    os.close(writer)
    try:
        yield
    finally:
        faulthandler.disable()
        os.dup2(original, _STDERR)
        sys.stderr = before
        os.close(original)
        _end(child)


def _start(reader: int) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C is for the node. It ends with the pipe, so with the node.
    command = [sys.executable, "-I", "-S", str(_FILTER)]
    return subprocess.Popen(
        command, stdin=reader, stdout=subprocess.DEVNULL, start_new_session=True, close_fds=True
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
