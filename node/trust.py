"""Who may talk to this node, and as what.

Two checks on each side. TLS 1.3 with certificates of one authority on both ends; on top of it the
leaf itself is pinned. A server sees its caller's leaf and compares the SHA-256 of its DER. A client
gives gRPC the pinned leaf as its only trust root, so another leaf of the same authority and the
same name ends the handshake. What a peer may call depends on the folder its pin lies in
(``nodes`` or ``clients``); a service that is not listed here is closed to everybody.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from kvpack import limits
from node import certificates, config
from node.certificates import leaf_digest
from node.credentials import (
    Credentials,
    CredentialsSource,
    LiveCredentials,
    PinnedPeer,
    Role,
    load_credentials,
    pin,
    unpin,
)
from node.errors import CredentialsError, PeerRefusedError
from node.unexpected import unexpected

__all__ = [
    "POLICY",
    "Credentials",
    "Gate",
    "GateInterceptor",
    "LiveCredentials",
    "PinnedPeer",
    "Role",
    "load_credentials",
    "open_channel",
    "pin",
    "server_credentials",
    "server_options",
    "unpin",
]

log = logging.getLogger(__name__)

#: The widest chunk that the format permits, and its framing.
MESSAGE_BYTES_MAX: Final = limits.CHUNK_PLAINTEXT_BYTES_MAX + (64 << 10)

#: While a stream runs, pins are looked at again when they were last seen this long ago.
STREAM_AGE_S: Final = 1.0

#: How a call is ended on purpose.
_ENDS: Final = (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError)

_EVERYBODY: Final = frozenset({Role.NODE, Role.CLIENT})

#: Service -> who may call it. Deny by default.
POLICY: Final[Mapping[str, frozenset[Role]]] = {
    "node.v1.Migration": frozenset({Role.NODE}),
    "node.v1.Session": frozenset({Role.CLIENT}),
    # What is passed on could as well be asked for by the Session service: as a client.
    "node.v1.Relay": frozenset({Role.CLIENT}),
    # Only a node that was started with --share-directory has it.
    "node.v1.Directory": frozenset({Role.NODE}),
    # Only a node that was started by "kvnode bench serve" has it.
    "node.v1.Bench": frozenset({Role.NODE}),
    "grpc.health.v1.Health": _EVERYBODY,
    "grpc.reflection.v1alpha.ServerReflection": _EVERYBODY,
}


def server_credentials(live: CredentialsSource) -> grpc.ServerCredentials:
    """mTLS for a server: a caller without a certificate of the authority never gets through.

    Every handshake is made with the certificate that lies in the folder at that moment.

    Raises:
        RuntimeError: :func:`node.config.prepare_process` was not called, so TLS 1.2 would pass.
    """
    _require_tls13()
    served = live.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        present = live.current()
        if _material(present) == _material(served):
            return None
        served = present
        log.info("credentials: leaf %s is served from now on", _short(present.certificate_pem))
        return _configuration(present)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        fetch,  # type: ignore[arg-type] # The stubs lack None, which means: unchanged.
        require_client_authentication=True,
    )


def open_channel(
    credentials: Credentials, peer: PinnedPeer, address: config.Address
) -> grpc.aio.Channel:
    """A channel that reaches exactly the pinned peer, whatever the address resolves to.

    A channel keeps the certificates that it was opened with (grpc-python has no other way), so
    each piece of work opens its own, with the credentials of that moment. While a peer renews its
    certificate, two leaves are pinned for it and either one is right.

    Raises:
        RuntimeError: :func:`node.config.prepare_process` was not called, so TLS 1.2 would pass.
    """
    _require_tls13()
    # Leaves as the only roots: the chain must end at one of these very certificates.
    roots = b"".join(leaf.certificate_pem for leaf in credentials.leaves(peer))
    tls = grpc.ssl_channel_credentials(roots, credentials.key_pem, credentials.certificate_pem)
    return grpc.aio.secure_channel(str(address), tls, options=channel_options(peer.name))


def channel_options(peer_name: str) -> list[tuple[str, Any]]:
    """Options of a client channel; the keepalive agrees with :func:`server_options`."""
    return [
        ("grpc.ssl_target_name_override", peer_name),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        # gRPC's own bound is two minutes: a directory that is back would be away for so long.
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]


def server_options() -> list[tuple[str, Any]]:
    """Options of a server. A port in use must be an error, so ports are never shared."""
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


class Gate:
    """Finds the pinned peer behind a call and says whether it may make it.

    Pins and dates are those of the moment of each question: a peer that was unpinned, or whose
    certificate has expired, makes no further call on a connection that is still open.
    """

    def __init__(
        self, live: CredentialsSource, now: certificates.Now = certificates.utc_now
    ) -> None:
        self._live = live
        self._now = now

    def admit(
        self,
        method: str,
        context: grpc.aio.ServicerContext[Any, Any],
        max_age_s: float = 0.0,
    ) -> PinnedPeer:
        """The peer that calls ``method`` (``/service/name``).

        Args:
            method: What it calls.
            context: gRPC's, with its certificate.
            max_age_s: How old the pins may be that are looked at.

        Raises:
            PeerRefusedError: Its leaf is not pinned, not for this service, or not valid now; the
                message says which, and is for this node's log only.
        """
        roles = POLICY.get(method.rpartition("/")[0].lstrip("/"), frozenset())
        leaf = _peer_leaf(context.auth_context())
        peers = self._live.current(max_age_s).peers
        digest = leaf_digest(leaf)
        for peer in peers:
            if peer.digest == digest and peer.role in roles:
                self._require_valid(peer, method)
                return peer
        raise PeerRefusedError(f"{method}: {_why_not_pinned(leaf, digest, peers)}")

    def holds(self, peer: PinnedPeer, max_age_s: float = 0.0) -> bool:
        """Whether ``peer``, which was admitted before, is still pinned as it was, and valid."""
        pinned = self._live.current(max_age_s).peers
        return peer in pinned and peer.why_invalid(self._now) is None

    def _require_valid(self, peer: PinnedPeer, method: str) -> None:
        why = peer.why_invalid(self._now)
        if why is not None:
            raise PeerRefusedError(f"{method}: certificate of {peer.name}: {why}")


class GateInterceptor(grpc.aio.ServerInterceptor):
    """Asks the gate before every method of every service, streams included."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else self._wrap(handler, handler_call_details.method)

    def _wrap(
        self, handler: grpc.RpcMethodHandler[Any, Any], method: str
    ) -> grpc.RpcMethodHandler[Any, Any]:
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                guarded: grpc.RpcMethodHandler[Any, Any] = make(
                    self._guard(behaviour, method, streams_in=kind.startswith("stream")),
                    request_deserializer=handler.request_deserializer,
                    response_serializer=handler.response_serializer,
                )
                return guarded
        return handler

    def _guard(
        self, behaviour: Callable[..., Any], method: str, *, streams_in: bool
    ) -> Callable[..., Any]:
        async def admit(context: Any, max_age_s: float = 0.0) -> None:  # noqa: ANN401
            try:
                self._gate.admit(method, context, max_age_s)
            except PeerRefusedError as error:
                log.warning("refused: %s", error)
                # The wire carries no reason: a stranger learns nothing from it.
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, "refused")

        async def still_admitted(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
            # Looked at again when the pins may be older than that, and not for every message of a
            # stream that has thousands.
            admitted_s = -math.inf
            async for message in messages:
                if time.monotonic() - admitted_s >= STREAM_AGE_S:
                    await admit(context)
                    admitted_s = time.monotonic()
                yield message

        def received(request: Any, context: Any) -> Any:  # noqa: ANN401
            return still_admitted(request, context) if streams_in else request

        if inspect.isasyncgenfunction(behaviour):

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
                await admit(context)
                try:
                    async for reply in behaviour(received(request, context), context):
                        await admit(context, STREAM_AGE_S)
                        yield reply
                except _ENDS:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever it is, it is said and answered
                    await _end(context, method, error)

            return stream

        async def single(request: Any, context: Any) -> Any:  # noqa: ANN401
            await admit(context)
            try:
                return await behaviour(received(request, context), context)
            except _ENDS:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, it is said and answered
                return await _end(context, method, error)

        return single


#: As it was set, and as gRPC's contexts keep it.
_UNIMPLEMENTED: Final = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNIMPLEMENTED.value[0],
)


async def _end(context: Any, method: str, error: Exception) -> NoReturn:  # noqa: ANN401
    """End a call with an error of this program. Left to gRPC, its words went to log and peer."""
    if isinstance(error, NotImplementedError) and context.code() in _UNIMPLEMENTED:
        # The generated base class has said so, of a method that nothing stands behind: no fault.
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not offered here")
    log.error("%s: an error of this program: %s", method, unexpected(error))
    await context.abort(grpc.StatusCode.UNKNOWN, "an error of this node; its log says where")
    raise RuntimeError("abort returned")


def _peer_leaf(auth_context: Mapping[str, Any]) -> bytes:
    leaves = list(auth_context.get("x509_pem_cert", ()))
    if len(leaves) != 1:
        raise PeerRefusedError("no certificate")
    leaf: bytes = leaves[0]
    return leaf


def _why_not_pinned(leaf: bytes, digest: bytes, peers: tuple[PinnedPeer, ...]) -> str:
    """Which of the ways of not being pinned: another role, another leaf of a name, a stranger."""
    which = f"leaf {digest.hex()[:16]}"
    for peer in peers:
        if peer.digest == digest:
            return f"{which}: {peer.name} is not pinned for it, only under {peer.role.value}/"
    try:
        name = PinnedPeer.of(leaf, Role.NODE).name
    except CredentialsError:
        return f"{which} is not pinned; its name is not one of ours"
    if any(peer.name == name for peer in peers):
        return f"{which} is not pinned: it says {name}, whose pinned leaf is another"
    return f"{which} is not pinned: it says {name}, which is unknown here"


def _material(credentials: Credentials) -> tuple[bytes, bytes, bytes]:
    return credentials.key_pem, credentials.certificate_pem, credentials.authority_pem


def _configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.key_pem, credentials.certificate_pem)],
        root_certificates=credentials.authority_pem,
    )


def _short(certificate_pem: bytes) -> str:
    return leaf_digest(certificate_pem).hex()[:16]


def _require_tls13() -> None:
    if not config.tls13_only():
        raise RuntimeError("prepare_process() must run before TLS is used")
