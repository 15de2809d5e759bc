"""Section 5: one object, in the steps of 5.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from tests.reference.keys import Roots, subkey
from tests.reference.ranges import check_range
from tests.reference.verdict import Refused, cap, need

FIXED = 160
TAG = 16
_PARSE, _SEAL, _LENGTH, _OPEN, _CODEC = "chunk.1", "chunk.3", "chunk.4", "chunk.5", "chunk.6"
_CIPHERS = {1: AESGCM, 2: ChaCha20Poly1305}


@dataclass(frozen=True)
class Chunk:
    """A header of an object: ``fields`` by the names of a reference, and its stored bytes."""

    fields: dict[str, Any]
    identity_digest: bytes
    layout_digest: bytes
    encoded_digest: bytes
    role_order: int
    header: bytes

    @property
    def object_bytes(self) -> int:
        """Bytes of the whole object."""
        return len(self.header) + int(self.fields["encoded_bytes"]) + TAG


def header_bytes(fixed: bytes) -> int:
    """Length of the header that begins with ``fixed``; believed for at most 1,216 bytes.

    Raises:
        Refused: Not 160 bytes, or more layers than the cap.
    """
    need(len(fixed) == FIXED, _PARSE, "the header is cut")
    count = _int(fixed, 30, 2)
    cap(count, 512, _PARSE, "layer count")
    return FIXED + 2 * count + (0 if fixed[6] == 1 else 32)


def parse_header(data: bytes) -> Chunk:
    """Step 1.

    Raises:
        Refused: ``malformed`` and its kinds.
    """
    fixed = data[:FIXED]
    need(fixed[:4] == b"KVPC", _PARSE, "no chunk begins here")
    need(len(fixed) == FIXED, _PARSE, "the header is cut")
    need(fixed[4] == 1, _PARSE, f"version {fixed[4]}", "unsupported_version")
    for name, offset, codes in (("class", 5, 7), ("codec", 6, 2), ("aead", 7, 2)):
        need(1 <= fixed[offset] <= codes, _PARSE, f"{name} {fixed[offset]} is no code")
    size = header_bytes(fixed)
    need(len(data) >= size, _PARSE, "the header is cut")
    fields = _fields(data)
    _check(fields, fixed[28])
    return Chunk(
        fields, data[32:64], data[64:96], data[size - 32 : size] if fixed[6] == 2 else b"",
        fixed[28], data[:size],
    )  # fmt: skip


def _fields(data: bytes) -> dict[str, Any]:
    return {
        "chunk_class": data[5], "codec": data[6], "aead": data[7], "epoch": _int(data, 8, 4),
        "first_position": _int(data, 12, 4), "token_count": _int(data, 16, 4),
        "plain_bytes": _int(data, 20, 4), "encoded_bytes": _int(data, 24, 4), "part": data[29],
        "layers": [_int(data, FIXED + 2 * i, 2) for i in range(_int(data, 30, 2))],
        "content_id": data[96:128], "seal_id": data[128:160],
    }  # fmt: skip


def _check(fields: dict[str, Any], role_order: int) -> None:
    cap(fields["epoch"], 2**31 - 1, _PARSE, "epoch")
    need(fields["epoch"] > 0, _PARSE, "epoch 0")
    cap(fields["plain_bytes"], 4_194_304, _PARSE, "plaintext bytes")
    cap(fields["encoded_bytes"], 4_194_304, _PARSE, "encoded bytes")
    need(fields["plain_bytes"] > 0, _PARSE, "no plaintext")
    cap(fields["part"], 254, _PARSE, "part")
    check_range(fields, _PARSE)
    need(role_order == (1 if fields["layers"] else 2), _PARSE, "role order")


def check_seal_id(roots: Roots, tenant: str, chunk: Chunk) -> None:
    """Steps 2 and 3.

    Raises:
        Refused: ``unknown_key`` or ``not_authentic``.
    """
    fields = chunk.fields
    key = subkey(roots, tenant, fields["epoch"], "seal-id")
    fed = [
        fields["content_id"], bytes([fields["codec"], fields["aead"]]), _u32(fields["epoch"]),
        _u32(fields["plain_bytes"]), _u32(fields["encoded_bytes"]), _u32(len(chunk.header)),
        len(chunk.encoded_digest).to_bytes(2, "little"), chunk.encoded_digest,
    ]  # fmt: skip
    found = blake3(b"".join(fed), key=key).digest()
    need(found == fields["seal_id"], _SEAL, "seal id", "not_authentic")


def open_object(roots: Roots, tenant: str, chunk: Chunk, body: bytes) -> bytes:
    """Steps 4 to 6 over ciphertext and tag; the plaintext.

    Raises:
        Refused: ``malformed`` or ``not_authentic``.
    """
    fields = chunk.fields
    need(len(body) == fields["encoded_bytes"] + TAG, _LENGTH, "the object has another length")
    key = subkey(roots, tenant, fields["epoch"], "chunk", fields["seal_id"])
    try:
        encoded = _CIPHERS[fields["aead"]](key).decrypt(bytes(12), body, chunk.header)
    except InvalidTag:
        raise Refused("not_authentic", _OPEN, "tag") from None
    if fields["codec"] == 1:
        return encoded
    digest = blake3(encoded, key=subkey(roots, tenant, fields["epoch"], "encoded")).digest()
    need(digest == chunk.encoded_digest, _CODEC, "encoded digest", "not_authentic")
    return join(encoded, fields["plain_bytes"])


def join(encoded: bytes, plain_bytes: int) -> bytes:
    """Section 5.3.

    Raises:
        Refused: ``malformed``.
    """
    need(len(encoded) > 0, _CODEC, "nothing")
    planes, frame = encoded[0], encoded[1:]
    need(planes in (2, 4) and plain_bytes % planes == 0, _CODEC, f"{planes} planes")
    _plain_frame(frame)
    try:
        stated = zstandard.get_frame_parameters(frame)
        need(stated.content_size == plain_bytes, _CODEC, "the frame states another size")
        decoder = zstandard.ZstdDecompressor(max_window_size=2**23).decompressobj()
        split = decoder.decompress(frame)
    except zstandard.ZstdError as error:
        raise Refused("malformed", _CODEC, "no zstd frame") from error
    need(decoder.eof and decoder.unused_data == b"", _CODEC, "the frame ends elsewhere")
    need(len(split) == plain_bytes, _CODEC, "the frame holds another size")
    size = plain_bytes // planes
    plain = bytearray(plain_bytes)
    for plane in range(planes):
        plain[plane::planes] = split[plane * size : (plane + 1) * size]
    return bytes(plain)


def _plain_frame(frame: bytes) -> None:
    """No dictionary, checksum, reserved or unused bit, and no large window."""
    need(len(frame) >= 9 and frame[:4] == b"\x28\xb5\x2f\xfd", _CODEC, "no plain frame")
    need(frame[4] & 31 == 0, _CODEC, "a bit of the frame's descriptor")
    if not frame[4] & 32:
        window = 1 << (10 + (frame[5] >> 3))
        need(window + window // 8 * (frame[5] & 7) <= 2**23, _CODEC, "a large window")


def check_content_id(roots: Roots, tenant: str, chunk: Chunk, plaintext: bytes) -> None:
    """Step 8.

    Raises:
        Refused: ``not_authentic``.
    """
    fields, name = chunk.fields, tenant.encode()
    fed = [
        len(name).to_bytes(2, "little"), name, chunk.identity_digest, chunk.layout_digest,
        bytes([fields["chunk_class"], chunk.role_order, fields["part"]]),
        len(fields["layers"]).to_bytes(2, "little"),
        *(layer.to_bytes(2, "little") for layer in fields["layers"]),
        _u32(fields["first_position"]), _u32(fields["token_count"]), _u32(len(plaintext)),
        plaintext,
    ]  # fmt: skip
    key = subkey(roots, tenant, fields["epoch"], "content-id")
    found = blake3(b"".join(fed), key=key).digest()
    need(found == fields["content_id"], "chunk.8", "content id", "not_authentic")


def _int(data: bytes, offset: int, size: int) -> int:
    return int.from_bytes(data[offset : offset + size], "little")


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")
