"""The bundle header: whose rows these are, under which key, of which model, in which shape.

::

    offset  bytes  field
         0      8  magic 89 4B 56 50 0D 0A 1A 0A
         8      2  version, 1
        10      2  flags, 0
        12      4  identity bytes I
        16      4  epoch
        20      2  tenant bytes T
        22      2  reserved, 0
        24      T  tenant, UTF-8
      24+T      I  identity, canonical protobuf

All numbers are unsigned and little-endian. Tenant and epoch stand before the identity so that the
key can be found, and the manifest's MAC over these bytes checked, before the identity is parsed.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Final

from kvpack import limits
from kvpack.errors import FormatError, IdentityMismatchError, VersionError
from kvpack.identity import Identity, require_same_layout
from kvpack.layout import CacheLayout
from kvpack.wire import decode_identity, encode_identity, identity_digest, layout_digest

#: As in PNG: a byte above 127, CR LF and a lone LF show a transfer that took it for text.
MAGIC: Final = b"\x89KVP\r\n\x1a\n"
VERSION: Final = 1
_FIXED: Final = struct.Struct("<8sHHIIHH")
FIXED_BYTES: Final = _FIXED.size
HEADER_BYTES_MAX: Final = FIXED_BYTES + limits.NAME_BYTES_MAX + limits.IDENTITY_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Header:
    """What a pack says about itself before its first chunk.

    Attributes:
        tenant: Whose key seals the pack; the identity's tenant.
        epoch: Epoch of the key that makes the manifest's and the footer's MACs.
        identity: Whose rows.
        layout: Their shape; the identity's layout.

    Raises:
        LimitError: The epoch is outside its cap.
        IdentityMismatchError: The tenant is not the identity's.
        LayoutMismatchError: The layout is not the identity's.
    """

    tenant: str
    epoch: int
    identity: Identity
    layout: CacheLayout

    def __post_init__(self) -> None:
        limits.check_range("header.epoch", self.epoch, 1, limits.EPOCH_MAX)
        if self.tenant != self.identity.tenant:
            raise IdentityMismatchError("header.tenant", self.identity.tenant, self.tenant)
        require_same_layout(self.identity.layout, self.layout)

    @classmethod
    def of(cls, identity: Identity, epoch: int) -> Header:
        """The header of ``identity`` under ``epoch``."""
        return cls(identity.tenant, epoch, identity, identity.layout)

    @property
    def identity_digest(self) -> bytes:
        """32 bytes over the identity, as chunk headers carry it."""
        return identity_digest(self.identity)

    @property
    def layout_digest(self) -> bytes:
        """32 bytes over the layout, as chunk headers carry it."""
        return layout_digest(self.layout)


@dataclass(frozen=True, slots=True)
class HeaderPrefix:
    """The part of a header that is read before anything can be authenticated.

    Attributes:
        tenant: Which key to look for.
        epoch: Which key to look for.
        identity_offset: Where the identity begins, in bytes from the start.
        header_bytes: Length of the whole header.
    """

    tenant: str
    epoch: int
    identity_offset: int
    header_bytes: int


def encode_header(header: Header) -> bytes:
    """The header's bytes."""
    tenant, identity = header.tenant.encode(), encode_identity(header.identity)
    limits.check_range("header.identity_bytes", len(identity), 1, limits.IDENTITY_BYTES_MAX)
    fixed = _FIXED.pack(MAGIC, VERSION, 0, len(identity), header.epoch, len(tenant), 0)
    return fixed + tenant + identity


def decode_header(data: bytes) -> Header:
    """Read a whole header. Strict, but nothing in it is authentic before the manifest's MAC is.

    Raises:
        FormatError: Not a header, an identity that is not canonical, or one of another tenant.
        VersionError: A header of another version.
        LimitError: A field is outside its cap.
    """
    return _decode(bytes(data))


#: All packs and cuts of one node have one header, or a few.
@functools.lru_cache(maxsize=8)
def _decode(data: bytes) -> Header:
    prefix = parse_prefix(data)
    if len(data) != prefix.header_bytes:
        raise FormatError("header", f"{prefix.header_bytes} bytes", f"{len(data)} bytes")
    identity = decode_identity(data[prefix.identity_offset :])
    if identity.tenant != prefix.tenant:
        raise FormatError("header.identity.tenant", prefix.tenant, identity.tenant)
    return Header.of(identity, prefix.epoch)


def tenant_bytes(fixed: bytes) -> int:
    """Length of the tenant that follows the fixed part.

    Raises:
        FormatError: ``fixed`` is not the beginning of a pack.
        VersionError: It is one of another version.
        LimitError: A length is outside its cap.
    """
    if len(fixed) < FIXED_BYTES:
        raise FormatError("header", f"{FIXED_BYTES} bytes", f"{len(fixed)} bytes")
    magic, version, flags, identity, epoch, tenant, reserved = _FIXED.unpack_from(fixed)
    if magic != MAGIC:
        raise FormatError("header.magic", MAGIC.hex(), magic.hex())
    if version != VERSION:
        raise VersionError("header.version", VERSION, version)
    for name, value in (("flags", flags), ("reserved", reserved)):
        if value:
            raise FormatError(f"header.{name}", 0, value)
    limits.check_range("header.identity_bytes", identity, 1, limits.IDENTITY_BYTES_MAX, "bytes")
    limits.check_range("header.epoch", epoch, 1, limits.EPOCH_MAX)
    return limits.check_range("header.tenant_bytes", tenant, 1, limits.NAME_BYTES_MAX, "bytes")


def parse_prefix(data: bytes) -> HeaderPrefix:
    """Read tenant, epoch and lengths from the beginning of ``data``; the rest is not looked at.

    Raises:
        FormatError: Not the beginning of a pack.
        VersionError: A pack of another version.
        LimitError: A field is outside its cap.
    """
    identity_offset = FIXED_BYTES + tenant_bytes(data)
    if len(data) < identity_offset:
        raise FormatError("header", f"{identity_offset} bytes", f"{len(data)} bytes")
    _, _, _, identity_bytes, epoch, _, _ = _FIXED.unpack_from(data)
    try:
        tenant = data[FIXED_BYTES:identity_offset].decode()
    except UnicodeDecodeError:
        raise FormatError("header.tenant", "UTF-8", "other bytes") from None
    limits.check_name("header.tenant", tenant)
    return HeaderPrefix(tenant, epoch, identity_offset, identity_offset + identity_bytes)
