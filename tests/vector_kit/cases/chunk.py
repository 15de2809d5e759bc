"""Section 5: headers of objects, and objects in the wrong place."""

from __future__ import annotations

from dataclasses import replace

from tests.vector_kit.cases.shared import OTHER, change, refused, state, with_state
from tests.vector_kit.chunks import u16, u32
from tests.vector_kit.packs import Pack, at, chunks, noise

_bad = refused("malformed chunk.1", released=3)
_over = refused("over_limit chunk.1", released=3)
# References share these rules, and the manifest is judged before any object.
_scan = refused("malformed manifest.scan")
_seal = refused("not_authentic chunk.3", released=3)
_tag = refused("not_authentic chunk.5", released=3)
_moved = refused("not_authentic reference")
_sums = refused("malformed sums")


def _edited(offset: int, value: bytes) -> Pack:
    return with_state(edit=at(offset, value))


def _swapped(objects: list[bytes]) -> list[bytes]:
    return [objects[1], objects[0], *objects[2:]]


_ROWS = chunks()[0]
_FORBIDDEN = [
    ("class-0", 5, b"\0"), ("class-8", 5, b"\x08"), ("codec-0", 6, b"\0"), ("codec-3", 6, b"\x03"),
    ("aead-0", 7, b"\0"), ("aead-3", 7, b"\x03"), ("epoch-0", 8, u32(0)), ("count", 16, u32(1)),
    ("plain-0", 20, bytes(8)), ("encoded-above-plain", 24, u32(21)), ("role", 28, b"\x01"),
]  # fmt: skip
_ABOVE = [
    ("epoch-cap", 8, u32(2**31)), ("position-cap", 12, u32(2**24 + 1)),
    ("plain-cap", 20, u32(4_194_305)), ("encoded-cap", 24, u32(4_194_305)),
    ("part-cap", 29, b"\xff"),
    ("layers-cap", 30, u16(513)),
]  # fmt: skip
VECTORS = [
    refused("unsupported_version chunk.1", released=3)("chunk-version-2", "version 2",
                                                       _edited(4, b"\x02")),
    *(_bad(f"chunk-{name}", f"byte {offset} of the header", _edited(offset, value))
      for name, offset, value in _FORBIDDEN),
    *(_over(f"chunk-{name}", f"byte {offset} of the header", _edited(offset, value))
      for name, offset, value in _ABOVE),
    _scan("chunk-rows-none", "a chunk of no rows", Pack(change(0, count=0))),
    _scan("chunk-rows-block", "rows of two blocks", Pack(change(0, first=254))),
    _scan("chunk-ids-block", "token ids of two ranges", Pack(change(2, first=65_530))),
    _scan("chunk-layers-twice", "a layer twice", Pack(change(0, layers=[0, 0]))),
    _scan("chunk-layers-descend", "layers that descend", Pack(change(0, layers=[2, 0]))),
    _scan("chunk-rows-part", "rows with a part", Pack(change(0, part=1))),
    _scan("chunk-ids-size", "token ids of 35 bytes", Pack(change(2, plain=bytes(35)))),
    _scan("chunk-logits-count", "logits of two rows",
          Pack([*chunks(), replace(_ROWS, kind=4, layers=[], first=7, count=2)])),
    _scan("chunk-rows-no-layer", "rows of no layer", Pack(change(1, layers=[]))),
    _seal("chunk-sealed-content", "another content id in the header", _edited(96, OTHER)),
    _seal("chunk-sealed-seal", "another seal id in the header", _edited(128, OTHER)),
    _seal("chunk-sealed-aead", "the other AEAD in the header", _edited(7, b"\x02")),
    _tag("chunk-sealed-identity", "another model in a sealed header", _edited(32, OTHER)),
    _tag("chunk-sealed-layout", "another layout in a sealed header", _edited(64, OTHER)),
    _tag("chunk-sealed-position", "another position in a sealed header", _edited(12, u32(8))),
    _tag("chunk-sealed-part", "another part in a sealed header", _edited(29, b"\x01")),
    _tag("chunk-sealed-body", "a changed ciphertext", _edited(161, b"\xff\xff")),
    _tag("chunk-sealed-tag", "a changed tag", _edited(-2, b"\xff\xff")),
    _seal("chunk-other-tenant", "an object of another tenant", with_state(tenant="rival"),
          keys=(("acme", 1, 0), ("rival", 1, 0))),
    refused("identity_mismatch chunk.7", released=3)(
        "chunk-other-model", "an object of another model", with_state(identity=OTHER)),
    refused("layout_mismatch chunk.7", released=3)(
        "chunk-other-layout", "an object of another shape", with_state(layout=OTHER)),
    _moved("chunk-other-layer", "rows of other layers than the reference says", Pack(
        change(0, layers=[0, 1], reference={"layers": b"\0\x02"}))),
    refused("over_limit chunk.1")("chunk-layer-index", "a sealed header that names layer 512", Pack(
        change(0, layers=[0, 512], reference={"layers": b"\0\x02"}))),
    _moved("chunk-other-position", "rows of another position than the reference says", Pack(
        change(0, first=5, reference={"first": 4}))),
    _moved("chunk-other-rows", "other rows of the same range", Pack(change(
        0, plain=noise("others", 100), reference={"content": OTHER, "seal": OTHER}))),
    _moved("chunk-other-part", "another part than the reference says",
           with_state(part=1, reference={"part": 0}), released=3),
    _moved("chunk-swapped", "two objects swapped", Pack(objects_edit=_swapped)),
    _sums("chunk-missing", "an object missing", Pack(objects_edit=lambda found: found[:2])),
    _sums("chunk-doubled", "an object doubled",
          Pack(objects_edit=lambda found: [found[0], *found])),
    _sums("chunk-unreferenced", "a reference missing",
          Pack([*chunks(), *with_state().chunks[3:]], references_edit=lambda found: found[:3])),
    refused("malformed sums")(
        "chunk-short", "an object one byte shorter than its header says",
        with_state(edit=lambda data: data[:-1])),
    *(refused("malformed chunk.1", released=number)(
        f"chunk-magic-{number}", "an object that begins as the manifest does",
        Pack(change(number, edit=at(3, b"M")))) for number in range(3)),
    refused("malformed chunk.4", released=3)(
        "chunk-passes-manifest", "an object that by its own header ends inside the manifest",
        with_state(edit=lambda data: data[:-1], reference={"plain": 18, "encoded": 18})),
    refused("not_authentic chunk.5", released=3)(
        "chunk-shifted", "an object one byte short, the next one byte long: the sum is right",
        Pack([*chunks(), state(edit=lambda data: data[:-1]), state(part=1, extra=b"\0")])),
    _scan("chunk-layers-of-a-state", "a state with a layer", with_state(layers=[0])),
    _scan("chunk-state-count", "a state of one row", with_state(count=1)),
    refused("malformed sums")(
        "chunk-gap", "a byte between objects and manifest", with_state(extra=b"\0")),
]  # fmt: skip
