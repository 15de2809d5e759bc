"""Opening: an object becomes plaintext, or nothing at all.

1. Parse the header: framing and caps, no trust.
2. The epoch must be the key's.
3. Recompute the seal id from the header's fields: from here on the lengths are the sealer's.
4. Check the tag over header and ciphertext. Before that no plaintext exists for the caller.
5. Decode. The encoded digest must match; the size must be the one that was sealed.
6. The identity and layout digests must be those of the session that asks.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidTag

from kvpack.chunk import codec as split_codec
from kvpack.chunk.header import ChunkHeader, parse_object
from kvpack.chunk.reference import ChunkReference
from kvpack.chunk.seal import (
    NONCE,
    SealContext,
    cipher,
    compute_content_id,
    compute_seal_id,
    encoded_digest,
)
from kvpack.codes import Codec
from kvpack.errors import (
    AuthenticationError,
    IdentityMismatchError,
    LayoutMismatchError,
    UnknownKeyError,
)
from kvpack.keys import EpochKey
from kvpack.layout import CacheLayout
from kvpack.snapshot import Tile


@dataclass(frozen=True, slots=True, repr=False)
class OpenedChunk:
    """Plaintext whose tag was checked. ``plaintext`` is read-only bytes."""

    reference: ChunkReference
    plaintext: memoryview

    def __repr__(self) -> str:
        return f"OpenedChunk({self.reference.slot}, {len(self.plaintext)} bytes)"


def open_chunk(context: SealContext, data: bytes | memoryview, where: str = "chunk") -> OpenedChunk:
    """Open one whole chunk object.

    Args:
        context: What the chunk must be bound to.
        data: The object; it is not copied before it is decrypted.
        where: Name of the chunk in errors, such as ``"chunks[3]"``.

    Raises:
        FormatError: Not a chunk object; also LimitError and VersionError.
        UnknownKeyError: It was sealed in another epoch than that of the key.
        AuthenticationError: It was changed, or another tenant sealed it.
        IdentityMismatchError: Sealed under this key for another model or tokenizer.
        LayoutMismatchError: Sealed under this key for another layout.
    """
    return open_parsed(context, parse_object(data), memoryview(data), where)


def open_parsed(
    context: SealContext,
    header: ChunkHeader,
    data: memoryview,
    where: str,
    scratch: bytearray | None = None,
) -> OpenedChunk:
    """Open the object ``data`` whose header was read before by :func:`parse_object`.

    Args:
        context: What the chunk must be bound to.
        header: The parsed header of ``data``.
        data: The object.
        where: Name of the chunk in errors.
        scratch: As in :func:`decrypt`.

    Raises:
        KvpackError: As :func:`open_chunk`, but for what parsing finds.
    """
    check_seal_id(context.key, header, where)
    opened = decrypt(context.key, header, data, where, scratch)
    check_binding(context, header, where)
    return opened


def open_tile(
    context: SealContext, layout: CacheLayout, data: bytes | memoryview, where: str = "chunk"
) -> Tile:
    """Open one chunk of K/V rows and check its size against ``layout`` to the byte.

    Raises:
        FormatError: It holds no rows. And everything that :func:`open_chunk` raises.
        LayoutMismatchError: A layer is not in ``layout``, or the size differs.
    """
    return tile_of(layout, open_chunk(context, data, where))


def tile_of(layout: CacheLayout, opened: OpenedChunk) -> Tile:
    """The rows of an opened chunk: FULL or SWA of the target's ``layout``, DRAFT of the draft's.

    Raises:
        FormatError: It holds no rows.
        LayoutMismatchError: A layer is not in ``layout``, or the size differs.
    """
    spec = opened.reference.rows_of(layout)
    expected = spec.data_bytes(layout)
    if len(opened.plaintext) != expected:
        raise LayoutMismatchError("tile.data_bytes", expected, len(opened.plaintext))
    return Tile(spec, opened.plaintext)


def recompute_content_id(context: SealContext, opened: OpenedChunk) -> bytes:
    """The content id that the plaintext really has. A sealer with the key could claim another."""
    return compute_content_id(context, opened.reference, opened.plaintext)


def check_content_id(context: SealContext, opened: OpenedChunk, where: str) -> None:
    """Refuse a chunk that claims another content id than its own.

    Raises:
        AuthenticationError: The claimed id is not the recomputed one.
    """
    require_content_id(opened.reference, recompute_content_id(context, opened), where)


def require_content_id(reference: ChunkReference, found: bytes, where: str) -> None:
    """Refuse a reference that claims another content id than ``found``, the plaintext's own.

    Raises:
        AuthenticationError: The claimed id is not the recomputed one.
    """
    if not hmac.compare_digest(found, reference.content_id):
        raise AuthenticationError(where, "content id is not that of the plaintext")


def check_seal_id(key: EpochKey, header: ChunkHeader, where: str) -> None:
    """Steps 2 and 3: after this the header's lengths, codec and cipher are the sealer's.

    Raises:
        UnknownKeyError: Another epoch.
        AuthenticationError: The seal id is not the one these fields have under this key.
    """
    reference = header.reference
    if reference.epoch != key.epoch:
        raise UnknownKeyError(
            f"{where}: sealed in epoch {reference.epoch}, the key is for epoch {key.epoch}"
        )
    found = compute_seal_id(key, reference, reference.content_id, header.encoded_digest)
    if not hmac.compare_digest(found, reference.seal_id):
        raise AuthenticationError(where, "seal id")


class Bound(Protocol):
    """Whatever names one model and its shape: a :class:`SealContext`, or what a pack is of."""

    @property
    def identity_digest(self) -> bytes:
        """32 bytes."""

    @property
    def layout_digest(self) -> bytes:
        """32 bytes."""


def check_binding(context: Bound, header: ChunkHeader, where: str) -> None:
    """Step 6, after the tag: an authentic chunk of another model is named as such.

    Raises:
        IdentityMismatchError: Another model or tokenizer.
        LayoutMismatchError: Another layout.
    """
    # The identity includes the layout, so the layout is asked first: it is the nearer reason.
    if header.layout_digest != context.layout_digest:
        raise LayoutMismatchError(
            f"{where}.layout_digest",
            _short(context.layout_digest),
            _short(header.layout_digest),
        )
    if header.identity_digest != context.identity_digest:
        raise IdentityMismatchError(
            f"{where}.identity_digest",
            _short(context.identity_digest),
            _short(header.identity_digest),
        )


def _short(digest: bytes) -> str:
    return digest.hex()[:16] + "…"


def decrypt(
    key: EpochKey,
    header: ChunkHeader,
    data: memoryview,
    where: str,
    scratch: bytearray | None = None,
) -> OpenedChunk:
    """Steps 4 and 5 on a whole object.

    Args:
        key: Root of the chunk's epoch.
        header: The parsed header of ``data``.
        data: The object.
        where: Name in errors.
        scratch: Reused for the plaintext where given, of at least ``encoded_bytes``; the next call
            with it overwrites the plaintext. Without it the plaintext is a value of its own.

    Raises:
        AuthenticationError: The tag or the encoded digest does not match.
        FormatError: The codec's frame is not what was sealed.
    """
    reference = header.reference
    start = reference.header_bytes
    opener = cipher(key, reference)
    associated, sealed = data[:start], data[start:]
    try:
        if scratch is None:
            encoded = memoryview(opener.decrypt(NONCE, sealed, associated))
        else:
            target = memoryview(scratch)[: reference.encoded_bytes]
            opener.decrypt_into(NONCE, sealed, associated, target)
            encoded = target.toreadonly()
    except InvalidTag:
        raise AuthenticationError(where, "tag") from None
    if reference.codec is Codec.RAW:
        return OpenedChunk(reference, encoded)
    if not hmac.compare_digest(encoded_digest(key, encoded), header.encoded_digest):
        raise AuthenticationError(where, "encoded digest")
    plaintext = split_codec.decompress(encoded, reference.plain_bytes)
    return OpenedChunk(reference, memoryview(plaintext))
