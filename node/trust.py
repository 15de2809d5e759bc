"""Who may talk to this node, and as what.

Two checks on each side. TLS 1.3 with certificates of one authority on both ends; on top of it the
leaf itself is pinned. A server sees its caller's leaf and compares the SHA-256 of its DER. A client
gives gRPC the pinned leaf as its only trust root, so another leaf of the same authority and the
same name ends the handshake. What a peer may call depends on the folder its pin lies in
(``nodes`` or ``clients``); a service that is not listed here is closed to everybody.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from cryptography.hazmat.primitives import serialization

from kvpack import limits
from node import config, enroll
from node.errors import CredentialsError, PeerRefusedError
from node.files import make_private_folder, read_private, read_public, write_private

log = logging.getLogger(__name__)


class Role(enum.Enum):
    """What a pinned peer is, and the folder of its pin."""

    NODE = "nodes"
    CLIENT = "clients"


#: The widest chunk that the format permits, and its framing.
MESSAGE_BYTES_MAX: Final = limits.CHUNK_PLAINTEXT_BYTES_MAX + (64 << 10)

_EVERYBODY: Final = frozenset({Role.NODE, Role.CLIENT})

#: Service -> who may call it. Deny by default.
POLICY: Final[Mapping[str, frozenset[Role]]] = {
    "node.v1.Migration": frozenset({Role.NODE}),
    "node.v1.Session": frozenset({Role.CLIENT}),
    # Only a node that was started by "kvnode bench serve" has it.
    "node.v1.Bench": frozenset({Role.NODE}),
    "grpc.health.v1.Health": _EVERYBODY,
    "grpc.reflection.v1alpha.ServerReflection": _EVERYBODY,
}


@dataclass(frozen=True, slots=True)
class PinnedPeer:
    """A peer that was enrolled here: its name, its role and its certificate.

    Attributes:
        name: The common name and only DNS name of the certificate.
        role: What it may call.
        certificate_pem: The leaf.
        digest: SHA-256 of the leaf's DER, 32 bytes.
    """

    name: str
    role: Role
    certificate_pem: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Credentials:
    """A node's or client's key, certificate and pins, as loaded from one folder."""

    name: str
    certificate_pem: bytes
    authority_pem: bytes
    peers: tuple[PinnedPeer, ...]
    key_pem: bytes = field(repr=False)

    def peer(self, name: str, role: Role = Role.NODE) -> PinnedPeer:
        """The pinned peer of that name.

        Raises:
            CredentialsError: It is not pinned here.
        """
        for peer in self.peers:
            if peer.name == name and peer.role is role:
                return peer
        raise CredentialsError(f"{name}: no pinned certificate of that name under {role.value}/")


def leaf_digest(certificate_pem: bytes) -> bytes:
    """SHA-256 of the certificate's DER.

    Raises:
        CredentialsError: Not a certificate.
    """
    certificate = enroll.load_certificate(certificate_pem, "certificate")
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


def pin(folder: Path, certificate_pem: bytes, role: Role) -> PinnedPeer:
    """Pin a peer's leaf in the credentials folder ``folder``.

    Raises:
        CredentialsError: Not a usable certificate, or that name is pinned already.
    """
    peer = _peer(certificate_pem, role)
    make_private_folder(folder / role.value)
    write_private(folder / role.value / f"{peer.name}.pem", certificate_pem)
    return peer


def load_credentials(folder: Path) -> Credentials:
    """Read a credentials folder: key, certificate, authority and pins.

    Raises:
        CredentialsError: A file is missing, too open, a link, or they do not belong together.
    """
    key_pem = read_private(folder / enroll.NODE_KEY)
    key = enroll.load_key(key_pem, folder / enroll.NODE_KEY)
    certificate_pem = read_public(folder / enroll.NODE_CERTIFICATE)
    certificate = enroll.load_certificate(certificate_pem, enroll.NODE_CERTIFICATE)
    if certificate.public_key() != key.public_key():
        raise CredentialsError(f"{folder}: the certificate is not for the key beside it")
    return Credentials(
        name=enroll.check_name(enroll.common_name(certificate.subject)),
        certificate_pem=certificate_pem,
        authority_pem=read_public(folder / enroll.AUTHORITY_CERTIFICATE),
        peers=tuple(_load_pins(folder)),
        key_pem=key_pem,
    )


def server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """mTLS for a server: a caller without a certificate of the authority never gets through.

    Raises:
        RuntimeError: :func:`node.config.prepare_process` was not called, so TLS 1.2 would pass.
    """
    _require_tls13()
    return grpc.ssl_server_credentials(
        [(credentials.key_pem, credentials.certificate_pem)],
        root_certificates=credentials.authority_pem,
        require_client_auth=True,
    )


def open_channel(
    credentials: Credentials, peer: PinnedPeer, address: config.Address
) -> grpc.aio.Channel:
    """A channel that reaches exactly the pinned peer, whatever the address resolves to.

    Raises:
        RuntimeError: :func:`node.config.prepare_process` was not called, so TLS 1.2 would pass.
    """
    _require_tls13()
    # The leaf as the only root: the chain must end at this very certificate.
    tls = grpc.ssl_channel_credentials(
        peer.certificate_pem, credentials.key_pem, credentials.certificate_pem
    )
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
    """Finds the pinned peer behind a call and says whether it may make it."""

    def __init__(self, credentials: Credentials) -> None:
        self._by_digest = {(peer.digest, peer.role): peer for peer in credentials.peers}

    def admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> PinnedPeer:
        """The peer that calls ``method`` (``/service/name``).

        Raises:
            PeerRefusedError: Its leaf is not pinned, or not for this service.
        """
        roles = POLICY.get(method.rpartition("/")[0].lstrip("/"), frozenset())
        digest = _peer_digest(context.auth_context())
        for role in Role:
            if role in roles and (digest, role) in self._by_digest:
                return self._by_digest[digest, role]
        raise PeerRefusedError(f"{method}: leaf {digest.hex()[:16]} is not pinned for it")


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
                    self._guard(behaviour, method),
                    request_deserializer=handler.request_deserializer,
                    response_serializer=handler.response_serializer,
                )
                return guarded
        return handler

    def _guard(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def refuse_unless_admitted(context: grpc.aio.ServicerContext[Any, Any]) -> None:
            try:
                self._gate.admit(method, context)
            except PeerRefusedError as error:
                log.warning("refused: %s", error)
                # The wire carries no reason: a stranger learns nothing from it.
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, "refused")

        if inspect.isasyncgenfunction(behaviour):

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
                await refuse_unless_admitted(context)
                async for reply in behaviour(request, context):
                    yield reply

            return stream

        async def single(request: Any, context: Any) -> Any:  # noqa: ANN401
            await refuse_unless_admitted(context)
            return await behaviour(request, context)

        return single


def _peer_digest(auth_context: Mapping[str, Any]) -> bytes:
    leaves = list(auth_context.get("x509_pem_cert", ()))
    if len(leaves) != 1:
        raise PeerRefusedError("no certificate")
    return leaf_digest(leaves[0])


def _require_tls13() -> None:
    if not config.tls13_only():
        raise RuntimeError("prepare_process() must run before TLS is used")


def _peer(certificate_pem: bytes, role: Role) -> PinnedPeer:
    certificate = enroll.load_certificate(certificate_pem, "certificate")
    name = enroll.check_name(enroll.common_name(certificate.subject))
    return PinnedPeer(name, role, certificate_pem, leaf_digest(certificate_pem))


def _load_pins(folder: Path) -> list[PinnedPeer]:
    peers: list[PinnedPeer] = []
    for role in Role:
        pins = folder / role.value
        if not pins.exists():
            continue
        make_private_folder(pins)
        for path in sorted(pins.glob("*.pem")):
            peer = _peer(read_public(path), role)
            if path.stem != peer.name:
                raise CredentialsError(f"{path}: pins a certificate of {peer.name}")
            peers.append(peer)
    return peers
