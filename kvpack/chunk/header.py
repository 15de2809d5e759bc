"""The chunk header: what stands before the ciphertext, and is authenticated with it.

::

    offset  bytes  field
         0      4  magic "KVPC"
         4      1  version, 1
         5      1  chunk class
         6      1  codec
         7      1  AEAD
         8      4  epoch
        12      4  first position
        16      4  token count
        20      4  plaintext bytes
        24      4  encoded bytes
        28      1  role order
        29      1  part
        30      2  layer count L
        32     32  identity digest
        64     32  layout digest
        96     32  content id
       128     32  seal id
       160    2 L  layers, ascending
           0 or 32 encoded digest, absent for the raw codec

All numbers are unsigned and little-endian. Every field is an input of the content id or of the
seal id; there is no other place for anything.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

from kvpack import codes, limits
from kvpack.chunk.reference import HEADER_FIXED_BYTES, ID_BYTES, ChunkReference, check_ids
from kvpack.codes import Codec
from kvpack.errors import FormatError, VersionError

MAGIC: Final = b"KVPC"
VERSION: Final = 1
_FIXED: Final = struct.Struct("<4sBBBBIIIIIBBH32s32s32s32s")
_LAYERS: Final = tuple(f"<{count}H" for count in range(limits.LAYERS_MAX + 1))
if _FIXED.size != HEADER_FIXED_BYTES:
    raise RuntimeError("the fixed part of a chunk header has another length than it declares")


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """A reference together with what the chunk is bound to.

    Attributes:
        reference: What the manifest says about the chunk.
        identity_digest: 32 bytes: whose rows.
        layout_digest: 32 bytes: in which shape.
        encoded_digest: 32 bytes, keyed, over the encoded bytes; empty for the raw codec, whose
            encoded bytes are the plaintext that the content id covers.

    Raises:
        LimitError: A digest does not have its length.
    """

    reference: ChunkReference
    identity_digest: bytes
    layout_digest: bytes
    encoded_digest: bytes = b""

    def __post_init__(self) -> None:
        if len(self.identity_digest) != ID_BYTES or len(self.layout_digest) != ID_BYTES:
            check_ids(identity_digest=self.identity_digest, layout_digest=self.layout_digest)
        if self.reference.codec is Codec.RAW:
            if self.encoded_digest:
                raise FormatError("chunk.encoded_digest", "none for raw", "a digest")
        else:
            check_ids(encoded_digest=self.encoded_digest)

    def encode(self) -> bytes:
        """The header's bytes: also the associated data under which the chunk is encrypted."""
        reference = self.reference
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            codes.CHUNK_CLASSES.code(reference.chunk_class),
            codes.CODECS.code(reference.codec),
            codes.AEADS.code(reference.aead),
            reference.epoch,
            reference.first_position,
            reference.token_count,
            reference.plain_bytes,
            reference.encoded_bytes,
            codes.ROLE_ORDERS.code(reference.role_order),
            reference.part,
            len(reference.layers),
            self.identity_digest,
            self.layout_digest,
            reference.content_id,
            reference.seal_id,
        )
        return fixed + encode_layers(reference.layers) + self.encoded_digest


def encode_layers(layers: tuple[int, ...]) -> bytes:
    """Layer indices, two bytes each."""
    return struct.pack(_LAYERS[len(layers)], *layers)


def header_bytes(fixed: bytes | memoryview) -> int:
    """Length of the whole header whose first ``HEADER_FIXED_BYTES`` bytes are ``fixed``.

    Raises:
        FormatError: This is no chunk header.
        VersionError: It is one of another version.
        LimitError: Its layer list is longer than a layout may be.
    """
    return _length(_fixed(fixed))


def _fixed(data: bytes | memoryview) -> tuple[Any, ...]:
    if len(data) < HEADER_FIXED_BYTES:
        raise FormatError("chunk.header", f"{HEADER_FIXED_BYTES} bytes", f"{len(data)} bytes")
    return _FIXED.unpack_from(data)


def _length(fields: tuple[Any, ...]) -> int:
    if fields[0] != MAGIC:
        raise FormatError("chunk.magic", MAGIC.hex(), fields[0].hex())
    if fields[1] != VERSION:
        raise VersionError("chunk.version", VERSION, fields[1])
    codec = codes.CODECS.member(fields[3], "chunk.codec")
    limits.check_range("chunk.layers", fields[12], 0, limits.LAYERS_MAX)
    layers_end: int = HEADER_FIXED_BYTES + 2 * fields[12]
    return layers_end if codec is Codec.RAW else layers_end + ID_BYTES


def parse_header(data: bytes | memoryview) -> ChunkHeader:
    """Read the header at the beginning of ``data``; what follows it is not looked at.

    Framing only: nothing here is authentic yet.

    Raises:
        FormatError: Not a chunk header, or fields that contradict each other.
        VersionError: A chunk of another version.
        LimitError: A field is outside its cap.
    """
    fields = _fixed(data)
    length = _length(fields)
    if len(data) < length:
        raise FormatError("chunk.header", f"{length} bytes", f"{len(data)} bytes")
    layers_end = HEADER_FIXED_BYTES + 2 * fields[12]
    # In the order of the fields.
    reference = ChunkReference(
        codes.CHUNK_CLASSES.member(fields[2], "chunk.class"),
        struct.unpack_from(_LAYERS[fields[12]], data, HEADER_FIXED_BYTES),
        fields[6], fields[7], fields[15], fields[16],
        codes.CODECS.member(fields[3], "chunk.codec"),
        codes.AEADS.member(fields[4], "chunk.aead"),
        fields[5], fields[8], fields[9], fields[11],
    )  # fmt: skip
    role_order = codes.ROLE_ORDERS.member(fields[10], "chunk.role_order")
    if role_order is not reference.role_order:
        raise FormatError("chunk.role_order", reference.role_order.value, role_order.value)
    return ChunkHeader(reference, fields[13], fields[14], bytes(data[layers_end:length]))


def parse_object(data: bytes | memoryview) -> ChunkHeader:
    """The header of ``data``, which must be one whole chunk object. Framing only.

    Raises:
        FormatError: Not a chunk object, or of another length than its header says.
        VersionError: A chunk of another version.
        LimitError: A field is outside its cap.
    """
    header = parse_header(data)
    expected = header.reference.object_bytes
    if len(data) != expected:
        raise FormatError("chunk.object", f"{expected} bytes", f"{len(data)} bytes")
    return header


def parse_chunk(data: bytes | memoryview) -> ChunkReference:
    """The reference of a whole chunk object. Framing only: nothing here is authentic yet.

    Raises:
        FormatError: As :func:`parse_object`; also VersionError, LimitError.
    """
    return parse_object(data).reference
