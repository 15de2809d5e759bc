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
from tests.reference.ranges import DRAFT
from tests.reference.scan import parse, text
from tests.reference.schemas import EPOCH, IDENTITY, MANIFEST
from tests.reference.verdict import Refused, cap, need

FOOTER = 72
_MANIFEST = 16_777_216
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
    target: tuple[bytes, bytes]
    draft: tuple[bytes, bytes] | None

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
        model = self.draft if chunk.fields["chunk_class"] == DRAFT else self.target
        if model is None:
            raise Refused("malformed", "chunk.7", "a draft chunk without a draft")
        need(chunk.layout_digest == model[1], "chunk.7", "layout", "layout_mismatch")
        need(chunk.identity_digest == model[0], "chunk.7", "identity", "identity_mismatch")

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
    models = [identity_digests(identity)]
    models += [
        identity_digests(c["draft"]["identity"]) for c in manifest["components"] if c["draft"]
    ]
    index = Index(header, manifest, models[0], models[1] if len(models) > 1 else None)
    gate.check(manifest, identity, [digest for digest, _ in models], header.epoch)
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


def identity_digests(identity: dict[str, Any]) -> tuple[bytes, bytes]:
    """The digests of an identity and of the layout inside it, as headers of chunks carry them."""
    return (
        blake3(b"kvpack/v1/identity\0" + identity["raw"]).digest(),
        blake3(b"kvpack/v1/layout\0" + identity["layout"]["raw"]).digest(),
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
    return index, _plaintexts(data, index, roots, len(data) - footer.tail_bytes)


def _plaintexts(data: bytes, index: Index, roots: Roots, end: int) -> Iterator[bytes]:
    cursor = Cursor(data, len(index.header.raw))
    for number in range(len(index.manifest["references"])):
        start = cursor.at
        chunk = _read_header(cursor.read(4), cursor.read, index.header.tenant, roots)
        need(start + chunk.object_bytes <= end, "chunk.4", "it passes the manifest's beginning")
        plaintext = _open(chunk, cursor.read, index.header.tenant, roots)
        index.compare(chunk, number)
        index.belongs(chunk)
        yield plaintext
    need(cursor.at == end, "sums", "objects end elsewhere")


def _read_header(magic: bytes, read: Callable[[int], bytes], tenant: str, roots: Roots) -> Chunk:
    """5.4, steps 1 to 3."""
    fixed = magic + read(FIXED - 4)
    more = header_bytes(fixed) - FIXED if fixed[:4] == b"KVPC" and len(fixed) == FIXED else 0
    chunk = parse_header(fixed + read(more))
    check_seal_id(roots, tenant, chunk)
    return chunk


def _open(chunk: Chunk, read: Callable[[int], bytes], tenant: str, roots: Roots) -> bytes:
    """5.4, steps 4 to 6."""
    return open_object(roots, tenant, chunk, read(chunk.fields["encoded_bytes"] + TAG))


class _Forwards:
    """Reads objects until the manifest, or the first that is not good: ``fault``."""

    def __init__(self, stream: BinaryIO, header: Header, roots: Roots, deep: bool) -> None:
        self.chunks: list[Chunk] = []
        self.at = len(header.raw)  # where the object that is read now begins
        self.end = 0  # where it ends, if it says so itself
        self.fault: Refused | None = None
        self.recent = b""  # what was read since
        self._stream = stream
        try:
            while self._next(header.tenant, roots, deep):
                cap(len(self.chunks), 65_536, "chunk.1", "chunks")
        except Refused as refused:
            self.fault = refused

    def _read(self, count: int) -> bytes:
        found = self._stream.read(count)
        self.recent += found
        return found

    def _next(self, tenant: str, roots: Roots, deep: bool) -> bool:
        self.recent, self.end = b"", 0
        magic = self._read(4)
        if magic == b"KVPM":
            return False
        chunk = _read_header(magic, self._read, tenant, roots)
        self.end = self.at + chunk.object_bytes
        plaintext = _open(chunk, self._read, tenant, roots)
        if deep:
            check_content_id(roots, tenant, chunk, plaintext)
        self.chunks.append(chunk)
        self.at = self.end
        return True

    def finish(self, manifest_begins: int) -> None:
        """What stands after the good objects, now that the tail is known to be good."""
        need(self.end <= manifest_begins, "chunk.4", "it passes the manifest's beginning")
        if self.fault is not None:
            raise self.fault
        need(self.at == manifest_begins, "chunk.1", "no chunk begins here")


def verify_forwards(stream: BinaryIO, roots: Roots, deep: bool = False) -> Index:
    """Section 9, forwards; returns only if the whole stream is good.

    Raises:
        Refused: The first step that does not hold.
    """
    header = read_header(stream.read)
    subkey(roots, header.tenant, header.epoch, "footer")
    objects = _Forwards(stream, header, roots, deep)
    rest = objects.recent + stream.read()
    total = objects.at + len(rest)
    cap(total, 2**40, "footer", "bytes of the stream")
    footer = parse_footer(rest[-FOOTER:], total)
    need(footer.tail_bytes <= len(rest), "tail", "the manifest began before")
    index = read_index(roots, header, footer, rest[len(rest) - footer.tail_bytes :])
    for number, chunk in enumerate(objects.chunks):
        need(number < footer.chunk_count, "sums", "chunk count")
        index.compare(chunk, number)
        index.belongs(chunk)
    objects.finish(total - footer.tail_bytes)
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
