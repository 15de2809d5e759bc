"""uvicorn inside the node's own loop, with bounds that it does not have by itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from node.config import Address
from node.errors import ListenError
from node.http.certificate import LiveCertificate
from node.http.limits import (
    BACKLOG,
    CONNECTIONS_MAX,
    HEAD_BYTES_MAX,
    HEAD_S,
    SEND_BUFFER_BYTES,
    UNACKNOWLEDGED_MS,
)
from node.http.options import HttpOptions

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

#: uvicorn looks ten times a second whether it is to stop.
_STARTED_S: Final = 5.0
_STOPPED_S: Final = 5.0


class _Connection(H11Protocol):
    """A connection that has only so long to say what it wants, and ends with a cut stream."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(*arguments, **options)
        self._inner: Any = self.app
        self.app = self._run
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait on, unless the head is whole."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        else:
            self._stop_waiting()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self.cycle
        await self._inner(scope, receive, send)
        if not cycle.response_complete and not cycle.disconnected:
            # A close would wait for ever for a reader that does not read.
            self.transport.abort()
            cycle.disconnected = True

    def _await_head(self) -> None:
        # Not anew with each byte: a head that comes byte by byte is late, too.
        if self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    """uvicorn, which leaves signals to the node."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield


@contextlib.asynccontextmanager
async def listening(options: HttpOptions, app: ASGIApp) -> AsyncIterator[Address]:
    """``app`` is served until the block ends. Gives the address, with the port that it got.

    Raises:
        ListenError: The address cannot be bound.
        CredentialsError: Certificate or key cannot be used.
    """
    tls = None if options.tls_certificate is None else _tls(options)
    listener = _bind(options.address)
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS_MAX,
        backlog=BACKLOG,
        timeout_keep_alive=max(1, int(HEAD_S)),
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(_STARTED_S):
            while not server.started and not serving.done():
                await asyncio.sleep(0.002)
        yield Address(options.address.host, listener.getsockname()[1])
    finally:
        server.should_exit = True
        _, late = await asyncio.wait({serving}, timeout=_STOPPED_S)
        for task in late:
            task.cancel()
        listener.close()


def _bind(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"{address}: {error.strerror or 'no such address'}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Accepted connections inherit what follows.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Half-open ones end although nobody said goodbye.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
        listener.bind(where)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ListenError(f"{address}: cannot listen there ({error.strerror})") from error
    return listener


def _tls(options: HttpOptions) -> ssl.SSLContext:
    if options.tls_certificate is None or options.tls_key is None:
        raise RuntimeError("asked for TLS without a certificate")
    return LiveCertificate(options.tls_certificate, options.tls_key).context
