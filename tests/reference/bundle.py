"""Sections 4, 6, 8 and 9: a whole file, from the footer and forwards."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from blake3 import blake3

from tests.reference import gate
from tests.reference.chunk import (
    FIXED,
    TAG,
    Chunk,
    check_content_id,
    check_seal_id,
    header_bytes,
    open_object,
    parse_header,
)
from tests.reference.keys import Roots, subkey
from tests.reference.scan import parse, text
from tests.reference.schemas import EPOCH, IDENTITY, LAYOUT, MANIFEST
from tests.reference.verdict import Refused, cap, need

FOOTER = 72
_MANIFEST = 16_777_216
_TAIL = _MANIFEST + 12 + 32 + 96 + FOOTER
_MAGIC = bytes.fromhex("894B56500D0A1A0A")


@dataclass(frozen=True)
class Header:
    """Section 4; the identity is parsed only after the manifest was authenticated."""

    raw: bytes
    tenant: str
    epoch: int
    identity: bytes


@dataclass(frozen=True)
class Footer:
    """Section 8."""

    raw: bytes
    chunks_bytes: int
    chunk_count: int
    header_bytes: int
    manifest_bytes: int
    signature_bytes: int

    @property
    def tail_bytes(self) -> int:
        """Manifest, signature block and footer."""
        return self.manifest_bytes + self.signature_bytes + FOOTER


@dataclass(frozen=True)
class Index:
    """Everything but the chunks, after steps 1 to 8 of section 9."""

    header: Header
    manifest: dict[str, Any]
    identity_digest: bytes
    layout_digest: bytes

    def compare(self, chunk: Chunk, number: int, reason: str = "not_authentic") -> None:
        """A chunk against its reference.

        Raises:
            Refused: It is another one.
        """
        reference = self.manifest["references"][number]
        same = all(reference[name] == value for name, value in chunk.fields.items())
        need(same, "reference", f"chunk {number} is another one", reason)

    def belongs(self, chunk: Chunk) -> None:
        """5.4, step 7.

        Raises:
            Refused: ``layout_mismatch`` or ``identity_mismatch``.
        """
        same = chunk.layout_digest == self.layout_digest
        need(same, "chunk.7", "layout", "layout_mismatch")
        same = chunk.identity_digest == self.identity_digest
        need(same, "chunk.7", "identity", "identity_mismatch")

    def finish(self) -> None:
        """The last word on a pack without a fault.

        Raises:
            Refused: ``incomplete``.
        """
        need(self.manifest["parent"] is None, "parent", "a delta alone", "incomplete")


def read_header(read: Callable[[int], bytes]) -> Header:
    """Section 4.

    Raises:
        Refused: ``malformed`` and its kinds.
    """
    fixed = read(24)
    need(fixed[:8] == _MAGIC, "header", "magic")
    need(len(fixed) == 24, "header", "cut")
    version, flags = _int(fixed, 8, 2), _int(fixed, 10, 2)
    need(version == 1, "header", f"version {version}", "unsupported_version")
    size, epoch, tenant_size = _int(fixed, 12, 4), _int(fixed, 16, 4), _int(fixed, 20, 2)
    need(flags == 0 and fixed[22:24] == b"\0\0", "header", "flags or reserved")
    cap(size, 262_144, "header", "identity bytes")
    cap(epoch, EPOCH, "header", "epoch")
    cap(tenant_size, 256, "header", "tenant bytes")
    need(size > 0 and epoch > 0 and tenant_size > 0, "header", "a zero")
    name = read(tenant_size)
    need(len(name) == tenant_size, "header", "cut")
    tenant = text(name, "header", "tenant")
    identity = read(size)
    need(len(identity) == size, "header", "cut")
    return Header(fixed + name + identity, tenant, epoch, identity)


def parse_footer(raw: bytes, file_bytes: int) -> Footer:
    """Step 2 of section 9.

    Raises:
        Refused: ``malformed`` and its kinds.
    """
    need(raw[:4] == b"KVPF" and len(raw) == FOOTER, "footer", "magic")
    version = _int(raw, 4, 2)
    need(version == 1, "footer", f"version {version}", "unsupported_version")
    need(_int(raw, 6, 2) == 0, "footer", "flags")
    stated = _int(raw, 8, 8)
    footer = Footer(raw, _int(raw, 16, 8), *(_int(raw, at, 4) for at in (24, 28, 32, 36)))
    cap(stated, 2**40, "footer", "file bytes")
    cap(footer.chunks_bytes, 2**40, "footer", "chunks bytes")
    cap(footer.chunk_count, 65_536, "footer", "chunk count")
    cap(footer.header_bytes, 24 + 256 + 262_144, "footer", "header bytes")
    cap(footer.manifest_bytes, _MANIFEST + 44, "footer", "manifest bytes")
    need(footer.signature_bytes in (0, 96), "footer", "signature bytes")
    total = footer.header_bytes + footer.chunks_bytes + footer.tail_bytes
    need(stated == total, "footer", "the sum")
    need(stated == file_bytes, "footer", "the file has another size")
    return footer


def read_index(roots: Roots | None, header: Header, footer: Footer, tail: bytes) -> Index:
    """Steps 3 to 8 of section 9; without roots (a signature was checked) no MAC is.

    Raises:
        Refused: The first step that does not hold.
    """
    blob, block = split_tail(header, footer, tail)
    if roots is not None:
        key = subkey(roots, header.tenant, header.epoch, "footer")
        found = _hmac(key, footer.raw[:40] + blob[-32:] + block)
        need(hmac.compare_digest(found, footer.raw[40:]), "footer.mac", "MAC", "not_authentic")
        key = subkey(roots, header.tenant, header.epoch, "manifest")
        found = _hmac(key, header.raw + blob[:-32])
        need(hmac.compare_digest(found, blob[-32:]), "manifest.mac", "MAC", "not_authentic")
    manifest = parse(MANIFEST, blob[12:-32], "manifest.scan")
    identity = parse(IDENTITY, header.identity, "identity.scan")
    need(identity["tenant"] == header.tenant, "identity.scan", "another tenant")
    index = Index(header, manifest, *_digests(header.identity))
    gate.check(manifest, identity["layout"], index.identity_digest, header.epoch)
    references = manifest["references"]
    need(len(references) == footer.chunk_count, "sums", "chunk count")
    sizes = sum(_object_bytes(reference) for reference in references)
    need(sizes == footer.chunks_bytes, "sums", "chunks bytes")
    return index


def split_tail(header: Header, footer: Footer, tail: bytes) -> tuple[bytes, bytes]:
    """Step 3: the stored manifest and the signature block.

    Raises:
        Refused: ``malformed`` and its kinds.
    """
    need(footer.header_bytes == len(header.raw), "tail", "header bytes")
    need(len(tail) == footer.tail_bytes, "tail", "the tail has another length")
    blob = tail[: footer.manifest_bytes]
    need(blob[:4] == b"KVPM" and len(blob) > 44, "tail", "no manifest")
    need(blob[4] == 1, "tail", f"version {blob[4]}", "unsupported_version")
    size = _int(blob, 8, 4)
    cap(size, _MANIFEST, "tail", "message bytes")
    need(blob[5:8] == bytes(3), "tail", "reserved")
    need(size == len(blob) - 44, "tail", "message bytes")
    return blob, tail[footer.manifest_bytes : -FOOTER]


def _digests(identity: bytes) -> tuple[bytes, bytes]:
    """Digests of an identity that was scanned, and of the layout inside it: field 8."""
    at, layout = 0, b""
    while at < len(identity):
        number, at = identity[at] >> 3, at + 1
        size, shift = 0, 0
        while True:
            size |= (identity[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if identity[at - 1] < 128:
                break
        if number == 8:
            layout = identity[at : at + size]
        at += size
    parse(LAYOUT, layout, "identity.scan")
    return (
        blake3(b"kvpack/v1/identity\0" + identity).digest(),
        blake3(b"kvpack/v1/layout\0" + layout).digest(),
    )


def _object_bytes(reference: dict[str, Any]) -> int:
    digest = 32 if reference["codec"] == 2 else 0
    return int(FIXED + 2 * len(reference["layers"]) + digest + reference["encoded_bytes"] + TAG)


def open_from_footer(data: bytes, roots: Roots) -> tuple[Index, Iterator[bytes]]:
    """Steps 1 to 8 from the footer, and step 9 as an iterator over plaintexts.

    Raises:
        Refused: The first step that does not hold.
    """
    header = read_header(Cursor(data).read)
    subkey(roots, header.tenant, header.epoch, "footer")
    footer = parse_footer(data[-FOOTER:], len(data))
    need(footer.header_bytes == len(header.raw), "tail", "header bytes")
    index = read_index(roots, header, footer, data[len(data) - footer.tail_bytes :])
    return index, _plaintexts(data[: len(data) - footer.tail_bytes], index, roots)


def _plaintexts(data: bytes, index: Index, roots: Roots) -> Iterator[bytes]:
    cursor = Cursor(data, len(index.header.raw))
    for number in range(len(index.manifest["references"])):
        chunk, plaintext = _object(cursor.read, index.header.tenant, roots)
        index.compare(chunk, number)
        index.belongs(chunk)
        yield plaintext
    need(cursor.at == len(data), "sums", "objects end elsewhere")


def _object(read: Callable[[int], bytes], tenant: str, roots: Roots) -> tuple[Chunk, bytes]:
    return _rest_of_object(read(4), read, tenant, roots)


def _rest_of_object(
    magic: bytes, read: Callable[[int], bytes], tenant: str, roots: Roots, deep: bool = False
) -> tuple[Chunk, bytes]:
    fixed = magic + read(FIXED - 4)
    more = header_bytes(fixed) - FIXED if len(fixed) == FIXED else 0
    chunk = parse_header(fixed + read(more))
    check_seal_id(roots, tenant, chunk)
    plaintext = open_object(roots, tenant, chunk, read(chunk.fields["encoded_bytes"] + TAG))
    if deep:
        check_content_id(roots, tenant, chunk, plaintext)
    return chunk, plaintext


def verify_forwards(stream: BinaryIO, roots: Roots, deep: bool = False) -> Index:
    """Section 9, forwards; returns only if the whole stream is good.

    Raises:
        Refused: The first step that does not hold.
    """
    header = read_header(stream.read)
    subkey(roots, header.tenant, header.epoch, "footer")
    chunks, counted = [], 0
    while (magic := stream.read(4)) == b"KVPC":
        chunk, _ = _rest_of_object(magic, stream.read, header.tenant, roots, deep)
        counted += chunk.object_bytes
        chunks.append(chunk)
        cap(len(chunks), 65_536, "chunk.1", "chunks")
    need(magic == b"KVPM", "tail", "neither a chunk nor a manifest")
    tail = magic + stream.read(_TAIL - 3)
    cap(len(tail), _TAIL, "tail", "bytes of the tail")
    footer = parse_footer(tail[-FOOTER:], len(header.raw) + counted + len(tail))
    need(footer.chunks_bytes == counted, "tail", "chunks bytes")
    index = read_index(roots, header, footer, tail)
    need(len(chunks) == footer.chunk_count, "sums", "chunk count")
    for number, chunk in enumerate(chunks):
        index.compare(chunk, number)
        index.belongs(chunk)
    return index


class Cursor:
    """Reads onwards in bytes, and short at their end."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def read(self, count: int) -> bytes:
        """At most ``count`` bytes."""
        found = self.data[self.at : self.at + count]
        self.at += len(found)
        return found


def _int(data: bytes, offset: int, size: int) -> int:
    return int.from_bytes(data[offset : offset + size], "little")


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)


__all__ = ["Refused", "open_from_footer", "verify_forwards"]
