"""Section 3 in the identity: layouts, names and constants, under true MACs, with no chunk."""

from __future__ import annotations

from tests.vector_kit import wire
from tests.vector_kit.cases.shared import refused, shaped
from tests.vector_kit.packs import FULL, ROPE, SWA, Pack, identity, layout

_bad = refused("malformed identity.scan")
_over = refused("over_limit identity.scan")


def _layer(base: list[bytes], number: int, content: bytes) -> Pack:
    found = [field for field in base if field[:1] and field[0] >> 3 != number]
    found.append(content)
    return shaped(layout([sorted(found, key=lambda field: field[0] >> 3 if field else 0)]))


def _rope(number: int, content: bytes) -> Pack:
    rope = [*ROPE[: number - 1], content, *ROPE[number:]]
    return _layer(SWA, 6, wire.data(6, b"".join(rope)))


def _named(number: int, content: bytes) -> Pack:
    fields = identity()
    fields[number - 1] = content
    return Pack([], 0, identity=fields)


def _constants(*constants: bytes) -> Pack:
    return Pack([], 0, identity=[*identity()[:8], *constants])


def _constant(name: str, bits: int = 1) -> bytes:
    return wire.data(9, wire.data(1, name) + wire.fixed64(2, bits))


def _row(heads: int, key: int, value: int) -> Pack:
    numbers = zip((1, 3, 4, 5), (2, heads, key, value), strict=True)
    return shaped(layout([[wire.number(n, v) for n, v in numbers]]))


#: One code point of every range that no text may hold, and what it would do there.
_REFUSED = [
    (0x1B, "escape"), (0x85, "c1-control"), (0xA0, "space-that-does-not-break"),
    (0xAD, "soft-hyphen"), (0x61C, "arabic-letter-mark"), (0x1680, "ogham-space"),
    (0x180E, "mongolian-separator"), (0x200B, "zero-width-space"), (0x2028, "line-separator"),
    (0x202E, "right-to-left-override"), (0x2066, "isolate"), (0x3000, "ideographic-space"),
    (0xE000, "private-use"), (0xFDD0, "noncharacter"), (0xFEFF, "byte-order-mark"),
    (0xFFF9, "annotation"), (0xFFFE, "plane-end"), (0x1FFFF, "plane-end-1"),
    (0x1BCA0, "shorthand-control"), (0x1D173, "musical-control"), (0xE0041, "tag"),
    (0x10FFFD, "private-plane"),
]  # fmt: skip

VECTORS = [
    *(_bad(f"text-{name}", f"U+{point:04X} in a text", _named(7, wire.data(7, f"a{chr(point)}b")))
      for point, name in _REFUSED),
    *(_bad(f"identity-missing-{number}", f"an identity without field {number}",
           _named(number, b"")) for number in (2, 3, 4, 5, 6, 7)),
    _bad("identity-tenant", "the tenant of another header",
         Pack([], 0, "rival"), keys=(("rival", 1, 0),)),
    _bad("identity-digest", "a digest of 33 bytes", _named(2, wire.data(2, bytes(33)))),
    _bad("identity-text-empty", "an empty text", _named(3, wire.data(3, ""))),
    _over("identity-text-cap", "a text of 257 bytes", _named(7, wire.data(7, "x" * 257))),
    _bad("identity-text-control", "a text with a line end", _named(7, wire.data(7, "a\nb"))),
    _bad("identity-constants-order", "constants that descend",
         _constants(_constant("b"), _constant("a"))),
    _bad("identity-constants-twice", "a constant twice", _constants(*[_constant("a")] * 2)),
    _over("identity-constants-cap", "257 constants",
          _constants(*(_constant(f"c{number:03}") for number in range(257)))),
    _bad("identity-constant-zero", "+0.0 that is present", _constants(
        wire.data(9, wire.data(1, "a") + b"\x11" + bytes(8)))),
    _bad("layout-encoding", "encoding 4", shaped(layout(encoding=4))),
    _over("layout-context-cap", "a context of 16,777,217", shaped(layout(tokens=2**24 + 1))),
    _bad("layout-context-0", "no context", shaped(layout(tokens=0))),
    _bad("layout-no-layers", "no layers", shaped(layout([]))),
    _over("layout-layers-cap", "513 layers", shaped(layout([FULL] * 513))),
    _bad("layer-kind", "kind 3", _layer(FULL, 1, wire.number(1, 3))),
    _bad("layer-full-window", "a full layer with a window", _layer(FULL, 2, wire.number(2, 5))),
    _bad("layer-swa-no-window", "a window layer without one", _layer(SWA, 2, b"")),
    _over("layer-window-cap", "a window of 16,777,217", _layer(SWA, 2, wire.number(2, 2**24 + 1))),
    _over("layer-heads-cap", "1,025 heads", _row(1025, 1, 1)),
    _over("layer-key-cap", "a key of 4,097", _row(1, 4097, 1)),
    _over("layer-value-cap", "a value of 4,097", _row(1, 1, 4097)),
    _over("layer-row-cap", "a row of 16,388 bytes", _row(2, 2048, 2049)),
    _bad("rope-dims-1", "one rotated element", _rope(2, wire.number(2, 1))),
    _bad("rope-dims-above-key", "four rotated elements of two", _rope(2, wire.number(2, 4))),
    _bad("rope-pairing", "pairing 3", _rope(3, wire.number(3, 3))),
    _bad("rope-no-scaling", "no scaling", _rope(4, b"")),
]  # fmt: skip
