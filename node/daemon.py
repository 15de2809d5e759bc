"""``kvnode serve``: a node in the foreground until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys

from node.config import ServeConfig, notify_socket
from node.handshakes import handshakes_heard
from node.notify import READY, STOPPING, notify
from node.server import SERVED, Fitting, Node, running

log = logging.getLogger(__name__)


def serve(
    config: ServeConfig,
    *,
    stop_on_stdin_end: bool,
    fitting: Fitting = SERVED,
    log_level: str = "INFO",
) -> None:
    """Serve until SIGTERM or SIGINT. Prints one JSON line once it accepts calls.

    Args:
        config: What to serve, and where.
        stop_on_stdin_end: Stop also when standard input ends: a parent that dies takes us along.
        fitting: What a measurement puts in the place of the node's parts.
        log_level: Of the log on standard error.

    Raises:
        KvpackError: The node could not be started.
    """
    with handshakes_heard():
        logging.basicConfig(
            level=log_level,
            stream=sys.stderr,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        asyncio.run(_serve(config, stop_on_stdin_end, fitting))


async def _serve(config: ServeConfig, stop_on_stdin_end: bool, fitting: Fitting) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    manager = notify_socket()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if stop_on_stdin_end:
        await _watch_stdin(stop)
    async with running(config, fitting) as node:
        sys.stdout.write(_announcement(node))
        sys.stdout.flush()
        model = node.sessions.engine.model.name
        if node.address is not None:
            log.info("node %s serves %s on %s", node.name, model, node.address)
        if node.entrance is not None:
            log.info("node %s serves %s on %s", node.name, model, node.entrance.url)
        notify(manager, READY)
        await stop.wait()
        notify(manager, STOPPING)


def _announcement(node: Node) -> str:
    line: dict[str, object] = {
        "node": node.name,
        "pid": os.getpid(),
        "model": node.sessions.engine.model.name,
    }
    if node.address is not None:
        line["address"] = str(node.address)
    if node.entrance is not None:
        line["http"] = node.entrance.url
    return json.dumps(line) + "\n"


async def _watch_stdin(stop: asyncio.Event) -> None:
    class _UntilEnd(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            stop.set()

    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(_UntilEnd, sys.stdin)
