"""Sections 6 and 8: the manifest's frame, the footer and the file, under true MACs."""

from __future__ import annotations

from tests.vector_kit.cases.shared import refused
from tests.vector_kit.chunks import u16, u32
from tests.vector_kit.packs import Pack, at

_tail = refused("malformed tail")
_footer = refused("malformed footer")
_over = refused("over_limit footer")
_sums = refused("malformed sums")


def _blob(offset: int, value: bytes) -> Pack:
    return Pack(blob_edit=at(offset, value))


def _field(offset: int, value: bytes) -> Pack:
    return Pack(footer_edit=at(offset, value))


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _counted(footer: bytes, change: int, offset: int) -> bytes:
    """A field that is wrong by ``change``, and the sum that follows from it."""
    for place, size in ((8, 8), (offset, 8 if offset < 24 else 4)):
        value = int.from_bytes(footer[place : place + size], "little") + change
        footer = footer[:place] + value.to_bytes(size, "little") + footer[place + size :]
    return footer


VECTORS = [
    _tail("manifest-magic", "another magic", _blob(0, b"KVPX")),
    refused("unsupported_version tail")("manifest-version-2", "version 2", _blob(4, b"\x02")),
    _tail("manifest-reserved", "a reserved byte", _blob(7, b"\x01")),
    _tail("manifest-empty", "no message", Pack(blob_edit=lambda blob: blob[:8] + u32(0))),
    _tail("manifest-length", "a length that is one too much",
          Pack(blob_edit=lambda blob: blob[:8] + u32(len(blob) - 11) + blob[12:])),
    refused("over_limit tail")("manifest-cap", "a message of 16,777,217 bytes",
                               _blob(8, u32(2**24 + 1))),
    refused("not_authentic manifest.mac")("manifest-mac", "another MAC",
                                          Pack(blob_after=at(-2, b"\xff\xff"))),
    _footer("footer-magic", "another magic", _field(0, b"KVPG")),
    refused("unsupported_version footer")("footer-version-2", "version 2", _field(4, u16(2))),
    _footer("footer-flags", "a flag", _field(6, u16(1))),
    _footer("footer-file-bytes", "one byte less than there are", _field(8, _u64(1))),
    _over("footer-file-cap", "2^40 + 1 bytes", _field(8, _u64(2**40 + 1))),
    _over("footer-file-2-63", "2^63 bytes", _field(8, _u64(2**63))),
    _footer("footer-chunks-bytes", "chunks of no bytes", _field(16, _u64(0))),
    _sums("footer-chunk-count", "one chunk more", _field(24, u32(4))),
    _over("footer-count-cap", "65,537 chunks", _field(24, u32(65_537))),
    _footer("footer-header-bytes", "a header of no bytes", _field(28, u32(0))),
    _footer("footer-manifest-bytes", "a manifest of no bytes", _field(32, u32(0))),
    _over("footer-manifest-cap", "a manifest of 16,777,261 bytes", _field(32, u32(2**24 + 45))),
    _footer("footer-signature-bytes", "a signature that is not there", _field(36, u32(96))),
    _footer("footer-signature-size", "a signature of 95 bytes", _field(36, u32(95))),
    refused("not_authentic footer.mac")("footer-mac", "another MAC",
                                        Pack(file_edit=at(-2, b"\xff\xff"))),
    _footer("file-longer", "a byte after the footer", Pack(file_edit=lambda data: data + b"\0")),
    _footer("file-cut", "the last byte missing", Pack(file_edit=lambda data: data[:-1])),
    _footer("file-no-footer", "no footer", Pack(file_edit=lambda data: data[:-72])),
    _footer("file-twice", "a pack after a pack", Pack(file_edit=lambda data: data * 2)),
    _footer("footer-sums-file", "sums agree and the file is shorter",
            Pack(footer_edit=lambda footer: _counted(footer, 1, 16))),
]  # fmt: skip
