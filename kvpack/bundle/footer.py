"""The footer: how long everything is, and that it belongs together.

::

    offset  bytes  field
         0      4  magic "KVPF"
         4      2  version, 1
         6      2  flags, 0
         8      8  file bytes, this footer included
        16      8  chunks bytes, all objects together
        24      4  chunk count
        28      4  header bytes
        32      4  manifest bytes: prefix, message and MAC
        36      4  signature bytes, 0 or 96
        40     32  HMAC-SHA-256 under subkey "footer" over bytes [0, 40) ‖ manifest MAC ‖ signature

All numbers are unsigned and little-endian.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from typing import Final

from kvpack import limits
from kvpack.errors import AuthenticationError, FormatError, VersionError
from kvpack.header import FIXED_BYTES as HEADER_FIXED_BYTES
from kvpack.header import HEADER_BYTES_MAX
from kvpack.keys import EpochKey
from kvpack.manifest.sealed import BLOB_BYTES_MAX, MAC_BYTES, PREFIX_BYTES

MAGIC: Final = b"KVPF"
VERSION: Final = 1
_FIELDS: Final = struct.Struct("<4sHHQQIIII")
FOOTER_BYTES: Final = _FIELDS.size + MAC_BYTES

#: Ed25519: a public key of 32 bytes, then a signature of 64.
SIGNATURE_BYTES: Final = 96


@dataclass(frozen=True, slots=True)
class Footer:
    """Lengths of the parts of one bundle, in bytes, in file order.

    Raises:
        LimitError: A length is outside its cap.
        FormatError: The signature has an impossible length.
    """

    header_bytes: int
    chunk_count: int
    chunks_bytes: int
    manifest_bytes: int
    signature_bytes: int = 0

    def __post_init__(self) -> None:
        smallest = HEADER_FIXED_BYTES + 2
        limits.check_range("footer.header_bytes", self.header_bytes, smallest, HEADER_BYTES_MAX)
        limits.check_range("footer.chunk_count", self.chunk_count, 0, limits.REFERENCES_MAX)
        limits.check_range("footer.chunks_bytes", self.chunks_bytes, 0, limits.BUNDLE_BYTES_MAX)
        smallest = PREFIX_BYTES + 1 + MAC_BYTES
        limits.check_range("footer.manifest_bytes", self.manifest_bytes, smallest, BLOB_BYTES_MAX)
        if self.signature_bytes not in (0, SIGNATURE_BYTES):
            raise FormatError(
                "footer.signature_bytes", f"0 or {SIGNATURE_BYTES}", self.signature_bytes
            )

    @property
    def manifest_offset(self) -> int:
        """Where the manifest begins: the end of the last chunk."""
        return self.header_bytes + self.chunks_bytes

    @property
    def tail_bytes(self) -> int:
        """Length of everything after the last chunk, the footer included."""
        return self.manifest_bytes + self.signature_bytes + FOOTER_BYTES

    @property
    def file_bytes(self) -> int:
        """Length of the whole bundle."""
        return self.manifest_offset + self.tail_bytes


def encode_footer(key: EpochKey, footer: Footer, manifest_mac: bytes, signature: bytes) -> bytes:
    """The footer's bytes, its MAC included."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        0,
        footer.file_bytes,
        footer.chunks_bytes,
        footer.chunk_count,
        footer.header_bytes,
        footer.manifest_bytes,
        footer.signature_bytes,
    )
    return fields + key.mac("footer", fields, manifest_mac, signature)


def decode_footer(data: bytes, file_bytes: int) -> Footer:
    """Read a footer and compare it with the real size of the file. Framing only.

    Raises:
        FormatError: Not a footer, or of a file of another size.
        VersionError: A footer of another version.
        LimitError: A length is outside its cap.
    """
    if len(data) != FOOTER_BYTES:
        raise FormatError("footer", f"{FOOTER_BYTES} bytes", f"{len(data)} bytes")
    magic, version, flags, *lengths = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        # Cut files and files with bytes appended end here: their last bytes are something else.
        raise FormatError("footer.magic", MAGIC.hex(), f"{magic.hex()} in {file_bytes} bytes")
    if version != VERSION:
        raise VersionError("footer.version", VERSION, version)
    if flags:
        raise FormatError("footer.flags", 0, flags)
    declared, chunks_bytes, chunk_count, header_bytes, manifest_bytes, signature_bytes = lengths
    footer = Footer(header_bytes, chunk_count, chunks_bytes, manifest_bytes, signature_bytes)
    if declared != footer.file_bytes:
        raise FormatError("footer.file_bytes", f"{footer.file_bytes}, the sum", declared)
    if declared != file_bytes:
        raise FormatError("footer.file_bytes", f"{declared} bytes", f"{file_bytes} bytes")
    return footer


def check_footer_mac(key: EpochKey, data: bytes, manifest_mac: bytes, signature: bytes) -> None:
    """Check the footer's MAC.

    Raises:
        AuthenticationError: Footer, manifest MAC or signature block was changed.
    """
    fields, mac = data[: _FIELDS.size], data[_FIELDS.size :]
    if not hmac.compare_digest(key.mac("footer", fields, manifest_mac, signature), mac):
        raise AuthenticationError("footer")
