"""Sealing, section 5, with every field open to be wrong and still be sealed truthfully."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

import zstandard
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from tests.vector_kit import wire

TENANT = "acme"


def root(epoch: int, holder: int = 0) -> bytes:
    """The root of an epoch; another ``holder`` has others."""
    return blake3(f"vector root {epoch} {holder}".encode()).digest()


def subkey(tenant: str, epoch: int, purpose: str, context: bytes = b"", holder: int = 0) -> bytes:
    """Section 2."""
    name = tenant.encode()
    salt = b"kvpack/v1" + len(name).to_bytes(2, "little") + name + epoch.to_bytes(4, "little")
    extracted = hmac.digest(salt, root(epoch, holder), hashlib.sha256)
    info = b"kvpack/v1/" + purpose.encode() + b"\0" + context + b"\x01"
    return hmac.digest(extracted, info, hashlib.sha256)


def u16(value: int) -> bytes:
    return value.to_bytes(2, "little")


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def frame(plain: bytes, planes: int = 2, **options: bool) -> bytes:
    """Encoded bytes of codec 2, section 5.3."""
    split = b"".join(plain[plane::planes] for plane in range(planes))
    writer = zstandard.ZstdCompressor(
        level=3, write_checksum=options.get("checksum", False),
        write_content_size=options.get("content_size", True),
    )  # fmt: skip
    return bytes([planes]) + writer.compress(split)


@dataclass
class Chunk:
    """What is sealed, and what the header says about it."""

    kind: int
    layers: list[int]
    first: int
    count: int
    plain: bytes
    part: int = 0
    codec: int = 1
    aead: int = 1
    epoch: int = 1
    tenant: str = TENANT
    identity: bytes | None = None
    layout: bytes | None = None
    encoded: bytes | None = None
    magic: bytes = b"KVPC"
    version: int = 1
    role: int | None = None
    plain_bytes: int | None = None
    encoded_bytes: int | None = None
    content: bytes | None = None
    seal: bytes | None = None
    wrong_digest: bool = False
    reference: dict[str, int | bytes] = field(default_factory=dict)
    edit: Callable[[bytes], bytes] = bytes
    extra: bytes = b""

    def seal_with(self, identity: bytes, layout: bytes) -> Sealed:
        """The object and its reference, in a session of these digests."""
        return _seal(self, self.identity or identity, self.layout or layout)


@dataclass
class Sealed:
    """An object as stored, and its reference."""

    stored: bytes
    reference: bytes
    plain: bytes


def _seal(chunk: Chunk, identity: bytes, layout: bytes) -> Sealed:
    encoded = chunk.encoded
    if encoded is None:
        encoded = frame(chunk.plain) if chunk.codec == 2 else chunk.plain
    plain_bytes = len(chunk.plain) if chunk.plain_bytes is None else chunk.plain_bytes
    encoded_bytes = len(encoded) if chunk.encoded_bytes is None else chunk.encoded_bytes
    rows = chunk.kind <= 2 or (chunk.kind == 6 and chunk.layers)
    role = (1 if rows else 2) if chunk.role is None else chunk.role
    layers = b"".join(map(u16, chunk.layers))
    content = chunk.content or _content_id(chunk, identity, layout, role, plain_bytes)
    digest = b""
    if chunk.codec != 1:
        key = subkey(chunk.tenant, chunk.epoch, "encoded")
        digest = blake3(encoded + b"x" * chunk.wrong_digest, key=key).digest()
    fixed = [
        chunk.magic, bytes([chunk.version, chunk.kind, chunk.codec, chunk.aead]),
        u32(chunk.epoch), u32(chunk.first), u32(chunk.count), u32(plain_bytes),
        u32(encoded_bytes), bytes([role, chunk.part]), u16(len(chunk.layers)), identity, layout,
        content,
    ]  # fmt: skip
    sizes = u32(plain_bytes) + u32(encoded_bytes) + u32(160 + len(layers) + len(digest))
    fed = content + bytes([chunk.codec, chunk.aead]) + u32(chunk.epoch) + sizes
    key = subkey(chunk.tenant, chunk.epoch, "seal-id")
    seal = chunk.seal or blake3(fed + u16(len(digest)) + digest, key=key).digest()
    header = b"".join(fixed) + seal + layers + digest
    cipher = {1: AESGCM, 2: ChaCha20Poly1305}.get(chunk.aead, AESGCM)
    sealed = cipher(subkey(chunk.tenant, chunk.epoch, "chunk", seal)).encrypt(
        bytes(12), encoded, header
    )
    stored = chunk.edit(header + sealed) + chunk.extra
    reference = _reference(chunk, content, seal, plain_bytes, encoded_bytes)
    return Sealed(stored, reference, chunk.plain)


def _content_id(chunk: Chunk, identity: bytes, layout: bytes, role: int, size: int) -> bytes:
    name = chunk.tenant.encode()
    layers = b"".join(map(u16, chunk.layers))
    fed = u16(len(name)) + name + identity + layout + bytes([chunk.kind, role, chunk.part])
    fed += u16(len(chunk.layers)) + layers + u32(chunk.first) + u32(chunk.count) + u32(size)
    key = subkey(chunk.tenant, chunk.epoch, "content-id")
    return blake3(fed + chunk.plain, key=key).digest()


def _reference(chunk: Chunk, content: bytes, seal: bytes, plain: int, encoded: int) -> bytes:
    said: dict[str, int | bytes] = {
        "kind": chunk.kind, "first": chunk.first, "count": chunk.count, "part": chunk.part,
        "content": content, "seal": seal, "codec": chunk.codec, "aead": chunk.aead,
        "epoch": chunk.epoch, "plain": plain, "encoded": encoded, "used": 0, "used_count": 0,
        "layers": b"".join(map(wire.varint, chunk.layers)),
    } | chunk.reference  # fmt: skip
    fields = [
        wire.number(1, said["kind"]), wire.data(2, said["layers"]) if said["layers"] else b"",
        wire.number(3, said["first"]), wire.number(4, said["count"]), wire.number(5, said["part"]),
        wire.data(6, said["content"]), wire.data(7, said["seal"]), wire.number(8, said["codec"]),
        wire.number(9, said["aead"]), wire.number(10, said["epoch"]),
        wire.number(11, said["plain"]), wire.number(12, said["encoded"]),
        wire.number(13, said["used"]), wire.number(14, said["used_count"]),
    ]  # fmt: skip
    return b"".join(fields)
