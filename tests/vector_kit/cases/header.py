"""Section 4: each field of the header, under true MACs."""

from __future__ import annotations

from tests.vector_kit.cases.shared import refused
from tests.vector_kit.chunks import u16, u32
from tests.vector_kit.packs import Pack, at

_bad = refused("malformed header")
_over = refused("over_limit header")
_key = refused("unknown_key key")


def _edited(offset: int, value: bytes) -> Pack:
    return Pack(header_edit=at(offset, value))


VECTORS = [
    _bad("header-empty-file", "no bytes", Pack(file_edit=lambda data: b"")),
    _bad("header-magic", "another first byte", _edited(0, b"\x88")),
    _bad("header-text-mode", "a transfer that rewrote line ends",
         Pack(file_edit=lambda data: data.replace(b"\r\n", b"\n"))),
    refused("unsupported_version header")("header-version-2", "version 2", _edited(8, u16(2))),
    refused("unsupported_version header")("header-version-0", "version 0", _edited(8, u16(0))),
    _bad("header-flags", "a flag", _edited(10, u16(1))),
    _bad("header-reserved", "a reserved field", _edited(22, u16(1))),
    _bad("header-identity-0", "no identity", _edited(12, u32(0))),
    _over("header-identity-cap", "an identity of 262,145 bytes", _edited(12, u32(262_145))),
    _bad("header-epoch-0", "epoch 0", _edited(16, u32(0))),
    _over("header-epoch-cap", "epoch 2^31", _edited(16, u32(2**31))),
    _bad("header-tenant-0", "no tenant", _edited(20, u16(0))),
    _over("header-tenant-cap", "a tenant of 257 bytes", _edited(20, u16(257))),
    _bad("header-tenant-utf8", "a tenant that is no UTF-8", _edited(24, b"\xff")),
    _bad("header-tenant-control", "a tenant with a line end", _edited(24, b"\n")),
    _key("key-epoch", "no key of the pack's epoch", Pack(epoch=2)),
    _key("key-tenant", "a key of another tenant", Pack(), keys=(("rival", 1, 0),)),
    _key("key-older-epoch", "no key of an older epoch that objects are of", Pack(epoch=2),
         keys=(("acme", 2, 0),)),
    refused("not_authentic footer.mac")(
        "key-root", "another root for tenant and epoch", Pack(),
                                        keys=(("acme", 1, 1),)),
]  # fmt: skip
