"""Sealing: plaintext becomes an object, and equal plaintext always becomes the same object.

1. ``content_id`` = BLAKE3, keyed with subkey "content-id", over everything the chunk *is*.
2. The codec makes the encoded bytes.
3. ``seal_id`` = BLAKE3, keyed with subkey "seal-id", over everything about *how* it is sealed.
4. The chunk's own key is subkey "chunk" bound to the seal id; the nonce is fixed; the associated
   data is the header. So one key meets one plaintext and one header, ever.

Hash, codec and cipher read one immutable buffer.
"""

from __future__ import annotations

import functools
import platform
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from kvpack import codes, limits
from kvpack.chunk import codec as split_codec
from kvpack.chunk.header import ChunkHeader, encode_layers
from kvpack.chunk.reference import ID_BYTES, ChunkReference, check_ids, chunk_class_of
from kvpack.codes import Aead, ChunkClass, Codec
from kvpack.keys import EpochKey
from kvpack.layout import grid_ranges
from kvpack.snapshot import Tile

#: Each chunk has its own key, so every chunk may use the same nonce.
NONCE: Final = bytes(12)

_UNSEALED_ID: Final = bytes(ID_BYTES)

#: Of the seal id: codec, AEAD, epoch, three lengths, and the length of the digest behind them.
_SEALING: Final = struct.Struct("<BBIIIIH")


@functools.cache
def best_aead() -> Aead:
    """AES-256-GCM where the CPU has AES instructions, else ChaCha20-Poly1305."""
    if sys.platform == "linux":
        try:
            words = Path("/proc/cpuinfo").read_text(errors="replace").split()
        except OSError:
            return Aead.AES_256_GCM
        return Aead.AES_256_GCM if "aes" in words else Aead.CHACHA20_POLY1305
    modern = platform.machine().lower() in ("arm64", "aarch64", "x86_64", "amd64")
    return Aead.AES_256_GCM if modern else Aead.CHACHA20_POLY1305


@dataclass(frozen=True, slots=True)
class SealContext:
    """What every chunk of one session is bound to.

    Attributes:
        key: Root of the tenant and epoch.
        identity_digest: 32 bytes, :func:`kvpack.wire.identity_digest`.
        layout_digest: 32 bytes, :func:`kvpack.wire.layout_digest`.
        aead: Cipher for what is sealed here; opening goes by the chunk's header.

    Raises:
        LimitError: A digest is not 32 bytes.
    """

    key: EpochKey
    identity_digest: bytes
    layout_digest: bytes
    aead: Aead = field(default_factory=best_aead)

    def __post_init__(self) -> None:
        check_ids(identity_digest=self.identity_digest, layout_digest=self.layout_digest)


@dataclass(frozen=True, slots=True, repr=False)
class SealedChunk:
    """One chunk as it is stored and sent. ``object`` = chunk header, ciphertext, tag."""

    reference: ChunkReference
    object: bytes

    def __repr__(self) -> str:
        return f"SealedChunk({self.reference.slot}, {len(self.object)} bytes)"


def seal_tile(
    context: SealContext, tile: Tile, codec: Codec = Codec.RAW, *, element_bytes: int = 2
) -> SealedChunk:
    """Seal the rows of ``tile``. A codec that saves less than 3 % gives a raw chunk.

    Args:
        context: What the chunk is bound to.
        tile: Rows of one kind, inside one grid block.
        codec: RAW, or ZSTD_SPLIT where the link or the store is slower than the codec.
        element_bytes: For the codec: bytes of one element of the layout's encoding.

    Raises:
        LimitError: The tile is larger than a chunk may be.
    """
    spec = tile.spec
    slot = _Slot(chunk_class_of(spec.kind), spec.layers, spec.first_position, spec.token_count)
    return _seal(context, slot, tile.data, codec, element_bytes)


def seal_tile_framed(
    context: SealContext, tile: Tile, frame: Callable[[int], bytes], scratch: bytearray
) -> tuple[ChunkReference, bytes]:
    """The object of :func:`seal_tile`, raw, behind what a wire puts before it: copied once.

    Args:
        context: What the chunk is bound to.
        tile: Rows of one kind, inside one grid block.
        frame: What stands before an object of so many bytes.
        scratch: Where it is put together; grows as needed, and is the caller's again on return.

    Raises:
        LimitError: The tile is larger than a chunk may be.
    """
    spec = tile.spec
    limits.check_range("chunk.plain_bytes", len(tile.data), 1, limits.CHUNK_PLAINTEXT_BYTES_MAX)
    slot = _Slot(chunk_class_of(spec.kind), spec.layers, spec.first_position, spec.token_count)
    plaintext = tile.data if memoryview(tile.data).readonly else bytes(tile.data)
    header = _header(context, slot, plaintext, Codec.RAW, plaintext)
    associated, reference = header.encode(), header.reference
    before = frame(reference.object_bytes) + associated
    size = len(before) - len(associated) + reference.object_bytes
    if len(scratch) < size:
        scratch.extend(bytes(size - len(scratch)))
    with memoryview(scratch)[:size] as view:
        view[: len(before)] = before
        ciphertext = view[len(before) :]
        cipher(context.key, reference).encrypt_into(NONCE, plaintext, associated, ciphertext)
        return reference, bytes(view)


def seal_draft_tile(
    context: SealContext, tile: Tile, codec: Codec = Codec.RAW, *, element_bytes: int = 2
) -> SealedChunk:
    """Seal the rows of a draft model. Its ``context`` has the draft's digests, not the target's.

    Raises:
        LimitError: The tile is larger than a chunk may be.
    """
    spec = tile.spec
    slot = _Slot(ChunkClass.DRAFT, spec.layers, spec.first_position, spec.token_count)
    return _seal(context, slot, tile.data, codec, element_bytes)


def seal_component(
    context: SealContext,
    chunk_class: ChunkClass,
    first_position: int,
    token_count: int,
    data: bytes | memoryview,
    *,
    part: int = 0,
) -> SealedChunk:
    """Seal a payload that is not K/V rows: final logits, sampler, draft or session state.

    Args:
        context: What the chunk is bound to.
        chunk_class: What ``data`` is.
        first_position: FINAL_LOGITS: the row they were computed from, one below the cut. State:
            the cut.
        token_count: FINAL_LOGITS: 1. State: 0.
        data: The payload; its own first byte is its schema's version.
        part: Which piece of a payload that needs several chunks.

    Raises:
        FormatError: The class does not allow this range.
        LimitError: The payload is empty or larger than a chunk may be.
    """
    slot = _Slot(chunk_class, (), first_position, token_count, part)
    return _seal(context, slot, data, Codec.RAW, 1)


def seal_token_ids(
    context: SealContext, token_ids: Sequence[int], first_position: int = 0
) -> list[SealedChunk]:
    """Seal ``token_ids``, four bytes each, little-endian, in ranges of ``TOKEN_IDS_PER_CHUNK``.

    Args:
        context: What the chunks are bound to.
        token_ids: Ids of the tokens from ``first_position`` on. They are the user's text.
        first_position: 0, or the cut of a delta.

    Raises:
        LimitError: An id is outside its cap.
    """
    if token_ids:
        limits.check_range("token_ids.min", min(token_ids), 0, limits.TOKEN_ID_MAX)
        limits.check_range("token_ids.max", max(token_ids), 0, limits.TOKEN_ID_MAX)
    chunks, end = [], first_position + len(token_ids)
    for start, count in grid_ranges(first_position, end, limits.TOKEN_IDS_PER_CHUNK):
        ids = token_ids[start - first_position : start - first_position + count]
        slot = _Slot(ChunkClass.TOKEN_IDS, (), start, count)
        chunks.append(_seal(context, slot, struct.pack(f"<{count}I", *ids), Codec.RAW, 4))
    return chunks


@dataclass(frozen=True, slots=True)
class _Slot:
    chunk_class: ChunkClass
    layers: tuple[int, ...]
    first_position: int
    token_count: int
    part: int = 0


def _seal(
    context: SealContext,
    slot: _Slot,
    data: bytes | memoryview,
    codec: Codec,
    element_bytes: int,
    level: int = split_codec.LEVEL,
) -> SealedChunk:
    limits.check_range("chunk.plain_bytes", len(data), 1, limits.CHUNK_PLAINTEXT_BYTES_MAX)
    # A buffer that somebody may still write is copied once: what is hashed is what is encrypted.
    mutable = isinstance(data, bytearray) or not memoryview(data).readonly
    plaintext = bytes(data) if mutable else data
    encoded = plaintext
    if codec is Codec.ZSTD_SPLIT:
        shorter = split_codec.compress(plaintext, element_bytes, level)
        codec, encoded = (Codec.RAW, plaintext) if shorter is None else (codec, shorter)
    header = _header(context, slot, plaintext, codec, encoded)
    associated = header.encode()
    ciphertext = cipher(context.key, header.reference).encrypt(NONCE, encoded, associated)
    return SealedChunk(header.reference, b"".join((associated, ciphertext)))


def _header(
    context: SealContext,
    slot: _Slot,
    plaintext: bytes | memoryview,
    codec: Codec,
    encoded: bytes | memoryview,
) -> ChunkHeader:
    key = context.key
    unnamed = ChunkReference(
        slot.chunk_class, slot.layers, slot.first_position, slot.token_count,
        _UNSEALED_ID, _UNSEALED_ID, codec, context.aead, key.epoch,
        len(plaintext), len(encoded), slot.part,
    )  # fmt: skip
    digest = b"" if codec is Codec.RAW else encoded_digest(key, encoded)
    content_id = compute_content_id(context, unnamed, plaintext)
    seal_id = compute_seal_id(key, unnamed, content_id, digest)
    reference = ChunkReference(
        slot.chunk_class, slot.layers, slot.first_position, slot.token_count,
        content_id, seal_id, codec, context.aead, key.epoch,
        len(plaintext), len(encoded), slot.part,
    )  # fmt: skip
    return ChunkHeader(reference, context.identity_digest, context.layout_digest, digest)


def compute_content_id(
    context: SealContext, reference: ChunkReference, plaintext: bytes | memoryview
) -> bytes:
    """32 bytes over all that the chunk is. Every input has a fixed length or its length before it.

    The ids in ``reference`` are not looked at.
    """
    prefix = content_prefix(context, reference, len(plaintext))
    return content_hasher(context, prefix).update(plaintext).digest()


def content_hasher(context: SealContext, prefix: bytes) -> blake3:
    """The content id but for the plaintext: for whoever has that in pieces."""
    return blake3(prefix, key=context.key.subkey("content-id"))


def content_prefix(context: SealContext, reference: ChunkReference, plain_bytes: int) -> bytes:
    """What the content id covers before the plaintext."""
    tenant = context.key.tenant.encode()
    words = (
        codes.CHUNK_CLASSES.code(reference.chunk_class),
        codes.ROLE_ORDERS.code(reference.role_order),
        reference.part,
    )
    numbers = (reference.first_position, reference.token_count, plain_bytes)
    parts = (
        len(tenant).to_bytes(2, "little") + tenant,
        context.identity_digest + context.layout_digest,
        bytes(words),
        len(reference.layers).to_bytes(2, "little") + encode_layers(reference.layers),
        *(number.to_bytes(4, "little") for number in numbers),
    )
    return b"".join(parts)


def compute_seal_id(
    key: EpochKey, reference: ChunkReference, content_id: bytes, digest: bytes
) -> bytes:
    """32 bytes over how the chunk is sealed. The ids in ``reference`` are not looked at."""
    fields = _SEALING.pack(
        codes.CODECS.code(reference.codec),
        codes.AEADS.code(reference.aead),
        reference.epoch,
        reference.plain_bytes,
        reference.encoded_bytes,
        reference.header_bytes,
        len(digest),
    )
    return blake3(content_id + fields + digest, key=key.subkey("seal-id")).digest()


def encoded_digest(key: EpochKey, encoded: bytes | memoryview) -> bytes:
    """32 bytes, keyed, over the encoded bytes. Keyed, so that it confirms no guess to others."""
    return blake3(encoded, key=key.subkey("encoded")).digest()


def cipher(key: EpochKey, reference: ChunkReference) -> AESGCM | ChaCha20Poly1305:
    """The cipher under the chunk's own key."""
    chunk_key = key.subkey("chunk", reference.seal_id)
    if reference.aead is Aead.AES_256_GCM:
        return AESGCM(chunk_key)
    return ChaCha20Poly1305(chunk_key)
