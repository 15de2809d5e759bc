"""The stored manifest: a fixed prefix, the message, and a MAC over the header's bytes and both.

::

    offset  bytes  field
         0      4  magic "KVPM"
         4      1  version, 1
         5      3  reserved, 0
         8      4  message bytes M
        12      M  message, canonical protobuf
      12+M     32  HMAC-SHA-256 under subkey "manifest" over header ‖ bytes [0, 12+M)

All numbers are unsigned and little-endian. The stored bytes are authenticated as they stand.
"""

from __future__ import annotations

import hmac
import struct
from typing import Final

from kvpack import limits
from kvpack.errors import AuthenticationError, FormatError, UnknownKeyError, VersionError
from kvpack.header import Header, decode_header, parse_prefix
from kvpack.keys import EpochKey
from kvpack.manifest.gate import check_manifest
from kvpack.manifest.message import (
    KnownReferences,
    decode_message,
    encode_message,
    message_seal_ids,
)
from kvpack.manifest.model import Manifest
from kvpack.manifest.tally import Tally

MAGIC: Final = b"KVPM"
VERSION: Final = 1
MAC_BYTES: Final = 32
_PREFIX: Final = struct.Struct("<4sB3sI")
PREFIX_BYTES: Final = _PREFIX.size

#: The whole blob: prefix, message and MAC.
BLOB_BYTES_MAX: Final = PREFIX_BYTES + limits.MANIFEST_BYTES_MAX + MAC_BYTES


def seal_manifest(
    key: EpochKey,
    header: bytes,
    manifest: Manifest,
    *,
    in_store: bool = False,
    known: KnownReferences | None = None,
) -> bytes:
    """The stored bytes of ``manifest``, its MAC included.

    Args:
        key: Root of the header's tenant and epoch.
        header: The bundle header's bytes, which the MAC binds.
        manifest: What the pack holds; it passes the gate before it is sealed.
        in_store: For a store: references may be trimmed.
        known: The manifest's own references, where they were encoded before.

    Raises:
        UnknownKeyError: The key is not that of the header.
        FormatError: The manifest does not describe one whole state; also LimitError,
            IdentityMismatchError, LayoutMismatchError.
    """
    _check_key(key, header)
    tally = _tally_of(manifest, known)
    check_manifest(decode_header(header), manifest, in_store=in_store, tally=tally)
    message = encode_message(manifest, known)
    limits.check_range("manifest", len(message), 1, limits.MANIFEST_BYTES_MAX, "bytes")
    stored = _PREFIX.pack(MAGIC, VERSION, bytes(3), len(message)) + message
    return stored + key.mac("manifest", header, stored)


def open_manifest(
    key: EpochKey,
    header: bytes,
    blob: bytes,
    *,
    in_store: bool = False,
    known: KnownReferences | None = None,
) -> Manifest:
    """Check the MAC, then scan, then parse, then ask the gate.

    Args:
        key: Root of the header's tenant and epoch.
        header: The header's bytes.
        blob: The manifest as stored, its MAC included.
        in_store: It comes from a store: references may be trimmed.
        known: What its references should be, to be compared instead of read; a matter of speed.

    Raises:
        FormatError: The prefix is not one, or authentic bytes are not canonical.
        UnknownKeyError: The key is not that of the header.
        AuthenticationError: Header or manifest were changed, or the key is another.
        LimitError: A field is outside its cap.
        IdentityMismatchError: The target component is another model than the header's.
        LayoutMismatchError: Rows or token ids are missing, doubled, or of another size.
    """
    return open_under_header(key, header, blob, in_store=in_store, known=known)[1]


def open_under_header(
    key: EpochKey,
    header: bytes,
    blob: bytes,
    *,
    in_store: bool = False,
    known: KnownReferences | None = None,
) -> tuple[Header, Manifest]:
    """As :func:`open_manifest`, which says what it takes and raises; the header's value comes too.

    A header is read in a large part of the time that a whole index takes: once is enough.
    """
    check_blob(blob)
    _check_key(key, header)
    stored = memoryview(blob)[:-MAC_BYTES]
    if not hmac.compare_digest(key.mac("manifest", header, stored), manifest_id(blob)):
        raise AuthenticationError("manifest")
    manifest = decode_message(bytes(stored[PREFIX_BYTES:]), known)
    value = decode_header(header)
    check_manifest(value, manifest, in_store=in_store, tally=_tally_of(manifest, known))
    return value, manifest


def _tally_of(manifest: Manifest, known: KnownReferences | None) -> Tally | None:
    """What the references of ``manifest`` came to, if they are the known ones."""
    if known is None or known.references != manifest.references:
        return None
    return known.tally


def check_blob(blob: bytes) -> None:
    """Check prefix and length of stored manifest bytes. Framing only.

    Raises:
        FormatError: Not a manifest, or of another length than its prefix says.
        VersionError: A manifest of another version.
        LimitError: Its message is longer than a manifest may be.
    """
    if len(blob) < PREFIX_BYTES + MAC_BYTES:
        expected = f"at least {PREFIX_BYTES + MAC_BYTES} bytes"
        raise FormatError("manifest", expected, f"{len(blob)} bytes")
    magic, version, reserved, message_bytes = _PREFIX.unpack_from(blob)
    if magic != MAGIC:
        raise FormatError("manifest.magic", MAGIC.hex(), magic.hex())
    if version != VERSION:
        raise VersionError("manifest.version", VERSION, version)
    if any(reserved):
        raise FormatError("manifest.reserved", 0, reserved.hex())
    limits.check_range("manifest.message_bytes", message_bytes, 1, limits.MANIFEST_BYTES_MAX)
    expected_bytes = PREFIX_BYTES + message_bytes + MAC_BYTES
    if len(blob) != expected_bytes:
        raise FormatError("manifest", f"{expected_bytes} bytes", f"{len(blob)} bytes")


def read_unverified(blob: bytes) -> Manifest:
    """Parse a manifest without a key, for people who look. Nothing in it can be trusted.

    Raises:
        FormatError: Not a canonical manifest; also VersionError, LimitError.
    """
    check_blob(blob)
    return decode_message(blob[PREFIX_BYTES:-MAC_BYTES])


def read_seal_ids(blob: bytes) -> tuple[int, bytes]:
    """``(position, seal ids)`` of a manifest by its own word, the ids 32 bytes each, joined.

    For whoever asks what a manifest names and nothing else: its form is checked, its values are
    not. So what a reader would refuse may still name chunks here.

    Raises:
        FormatError: Not a canonical manifest; also VersionError, LimitError.
    """
    check_blob(blob)
    return message_seal_ids(blob[PREFIX_BYTES:-MAC_BYTES])


def manifest_id(blob: bytes) -> bytes:
    """32 bytes that name a stored manifest within its epoch: its MAC."""
    return blob[-MAC_BYTES:]


def _check_key(key: EpochKey, header: bytes) -> None:
    prefix = parse_prefix(header)
    if (prefix.tenant, prefix.epoch) != (key.tenant, key.epoch):
        raise UnknownKeyError(
            f"the pack is of tenant {prefix.tenant!r}, epoch {prefix.epoch}; "
            f"the key is of tenant {key.tenant!r}, epoch {key.epoch}"
        )
