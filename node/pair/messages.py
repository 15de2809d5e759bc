"""What two sides of a pairing say: a kind byte, then a fixed number of fields for each kind.

A field is its length (2 bytes, little-endian) and its bytes; an absent one is empty. A message of
another kind than the expected one, with another number of fields, or with a byte too many is
refused whole.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import Final

from node.certificates import check_name
from node.credentials import Role
from node.errors import CredentialsError, PairError

_LENGTH: Final = struct.Struct("<H")
_EPOCH: Final = struct.Struct("<I")

_ROLES: Final = {b"node": Role.NODE, b"client": Role.CLIENT}
_ROLE_NAMES: Final = {role: name for name, role in _ROLES.items()}


class Kind(enum.IntEnum):
    """First byte of a message."""

    OFFER = 1
    YES = 2
    NO = 3
    GRANT = 4
    DONE = 5


_FIELDS: Final = {Kind.OFFER: 8, Kind.YES: 0, Kind.NO: 0, Kind.GRANT: 2, Kind.DONE: 0}


@dataclass(frozen=True, slots=True)
class TenantName:
    """Which tenant's key is on offer: never the key itself."""

    tenant: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Who a side is, and what it wants or gives.

    Attributes:
        name: Its name.
        role: What it is.
        certificate_pem: Its leaf, or empty if it asks for one.
        request_pem: Its signing request, or empty if it has a leaf.
        authority_pem: The authority of its leaf, or empty.
        proof: Signature of its key over the agreement (:meth:`Agreement.proof_input`).
        tenant: The tenant whose key it will hand over, or ``None``.

    Raises:
        PairError: Neither or both of leaf and request, or a leaf without its authority.
    """

    name: str
    role: Role
    certificate_pem: bytes
    request_pem: bytes
    authority_pem: bytes
    proof: bytes
    tenant: TenantName | None

    def __post_init__(self) -> None:
        if bool(self.certificate_pem) == bool(self.request_pem):
            raise PairError("offer: expected either a certificate or a request")
        if bool(self.certificate_pem) != bool(self.authority_pem):
            raise PairError("offer: expected a certificate together with its authority")


@dataclass(frozen=True, slots=True)
class Grant:
    """What a side hands over after both people agreed: a certificate, a key file, both, nothing."""

    certificate_pem: bytes
    key_file: bytes = field(repr=False)


def encode_offer(offer: Offer) -> bytes:
    """The message of an offer."""
    tenant, epoch = b"", b""
    if offer.tenant is not None:
        tenant, epoch = offer.tenant.tenant.encode(), _EPOCH.pack(offer.tenant.epoch)
    return _encode(
        Kind.OFFER,
        offer.name.encode(),
        _ROLE_NAMES[offer.role],
        offer.certificate_pem,
        offer.request_pem,
        offer.authority_pem,
        offer.proof,
        tenant,
        epoch,
    )


def decode_offer(message: bytes) -> Offer:
    """Read an offer.

    Raises:
        PairError: It is none, or a field is not what it should be.
    """
    name, role, certificate, request, authority, proof, tenant, epoch = _decode(message, Kind.OFFER)
    if role not in _ROLES:
        raise PairError("offer.role: expected node or client")
    return Offer(
        name=_read_name(name),
        role=_ROLES[role],
        certificate_pem=certificate,
        request_pem=request,
        authority_pem=authority,
        proof=proof,
        tenant=_read_tenant(tenant, epoch),
    )


def encode_grant(grant: Grant) -> bytes:
    """The message of a grant."""
    return _encode(Kind.GRANT, grant.certificate_pem, grant.key_file)


def decode_grant(message: bytes) -> Grant:
    """Read a grant.

    Raises:
        PairError: It is none.
    """
    return Grant(*_decode(message, Kind.GRANT))


def encode_word(kind: Kind) -> bytes:
    """A message without fields."""
    return _encode(kind)


def expect_word(message: bytes, kind: Kind) -> None:
    """Check that ``message`` is that word.

    Raises:
        PairError: It is something else; in particular NO.
    """
    _decode(message, kind)


def raise_if_no(message: bytes) -> None:
    """End here if the other side ended it.

    Raises:
        PairError: The message is NO.
    """
    if message == bytes((Kind.NO,)):
        raise PairError("the other side stopped, and says why; nothing was kept")


def _encode(kind: Kind, *fields: bytes) -> bytes:
    parts = [bytes((kind,))]
    for content in fields:
        parts += [_LENGTH.pack(len(content)), content]
    return b"".join(parts)


def _decode(message: bytes, kind: Kind) -> list[bytes]:
    raise_if_no(message)
    if message[:1] != bytes((kind,)):
        raise PairError(f"message: expected {kind.name}, found another")
    fields: list[bytes] = []
    place = 1
    while place < len(message) and len(fields) < _FIELDS[kind]:
        start = place + _LENGTH.size
        if start > len(message):
            break
        place = start + _LENGTH.unpack_from(message, place)[0]
        fields.append(message[start:place])
    if place != len(message) or len(fields) != _FIELDS[kind]:
        raise PairError(f"{kind.name}: its fields do not fill the message")
    return fields


def _read_name(content: bytes) -> str:
    try:
        return check_name(content.decode("ascii"))
    except (UnicodeDecodeError, CredentialsError) as error:
        raise PairError("offer.name: expected 1 to 63 of a-z, 0-9 and inner hyphens") from error


def _read_tenant(tenant: bytes, epoch: bytes) -> TenantName | None:
    if not tenant and not epoch:
        return None
    try:
        name = tenant.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PairError("offer.tenant: expected text") from error
    if not name or len(epoch) != _EPOCH.size:
        raise PairError("offer.tenant: expected a name and an epoch")
    return TenantName(name, _EPOCH.unpack(epoch)[0])
