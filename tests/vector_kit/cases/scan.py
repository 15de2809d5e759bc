"""Section 3 in the manifest: one rule of the canonical encoding at a time, under true MACs."""

from __future__ import annotations

from tests.vector_kit import wire
from tests.vector_kit.cases.shared import (
    OTHER,
    change,
    component,
    named,
    parent,
    refused,
    run,
    state,
)
from tests.vector_kit.packs import Pack, chunks

_bad = refused("malformed manifest.scan")
_over = refused("over_limit manifest.scan")
_DELTA = (chunks(265, 256), 265)


def _field(number: int, content: bytes) -> Pack:
    return Pack(manifest={number: content})


def _state_reference(old: bytes, new: bytes) -> Pack:
    def edit(references: list[bytes]) -> list[bytes]:
        return [*references[:-1], references[-1].replace(old, new, 1)]

    return Pack([*chunks(), state()], references_edit=edit)


def _swapped(parts: list[bytes]) -> list[bytes]:
    return [parts[1], parts[0], *parts[2:]]


def _apart(parts: list[bytes]) -> list[bytes]:
    return [*parts[6:8], parts[5], *parts[8:]]


VECTORS = [
    _bad("scan-varint-padded", "a value of two bytes that fits one",
         _field(3, b"\x18" + wire.varint(9, 1))),
    _bad("scan-tag-padded", "a tag of two bytes", _field(3, wire.varint(24, 1) + b"\x09")),
    _bad("scan-length-padded", "a length of two bytes", _field(4, b"\x22" + wire.varint(0, 1))),
    _bad("scan-packed-padded", "a packed layer of two bytes",
         Pack([*chunks()[1:], chunks()[0]], references_edit=lambda found: [
             *found[:-1], found[-1].replace(b"\x12\x02\x00\x02", b"\x12\x03\x80\x00\x02")])),
    _bad("scan-varint-64", "a value of 2^64", _field(3, b"\x18" + b"\xff" * 9 + b"\x02")),
    _bad("scan-varint-long", "a varint of eleven bytes", _field(3, b"\x18" + b"\xff" * 10 + b"\1")),
    _bad("scan-varint-cut", "a varint without its end", _field(0, b"\x18\x80")),
    _bad("scan-tag-32", "a tag of 2^32", _field(0, wire.varint(2**35) + b"\x01")),
    _bad("scan-descending", "producer before window_rule", Pack(order=_swapped)),
    _bad("scan-repeated-singular", "the position twice", _field(3, wire.number(3, 9) * 2)),
    _bad("scan-repeated-apart", "a reference before the components", Pack(order=_apart)),
    _bad("scan-unknown-field", "field 10", _field(0, wire.number(10, 1))),
    _bad("scan-field-0", "a byte left over", _field(0, b"\0")),
    _bad("scan-group", "a group", _field(0, wire.varint(10 << 3 | 3) + wire.varint(10 << 3 | 4))),
    _bad("scan-wire-type", "a position of fixed64", _field(3, wire.fixed64(3, 9))),
    _bad("scan-message-cut", "a message longer than what is left",
         _field(0, wire.varint(9 << 3 | 2) + b"\x05\x08")),
    _bad("scan-default-number", "position 0 that is present",
         Pack([], 0, manifest={3: b"\x18\0"})),
    _bad("scan-default-packed", "an empty list of layers that is present",
         _state_reference(b"\x08\x07", b"\x08\x07\x12\x00")),
    _bad("scan-default-text", "an empty name", _field(4, wire.data(4, named("", "x")))),
    *(_bad(f"scan-missing-{number}", f"the manifest without its required field {number}",
           _field(number, b"")) for number in (1, 2, 4, 5, 6)),
    _bad("scan-digest-31", "a digest of 31 bytes", _field(6, component(1, OTHER[:31]))),
    _bad("scan-window-rule", "window rule 2", _field(1, wire.number(1, 2))),
    _bad("scan-producer", "producer 5", _field(2, wire.number(2, 5))),
    _over("scan-position-cap", "a position of 16,777,217", _field(3, wire.number(3, 2**24 + 1))),
    _bad("scan-component-kind", "component 3", _field(6, component(3))),
    _over("scan-components-cap", "three components", _field(6, component(1) * 3)),
    _bad("scan-numerics-order", "names that descend",
         _field(4, wire.data(4, named("b", "1") + named("a", "1")))),
    _bad("scan-numerics-twice", "a name twice", _field(4, wire.data(4, named("a", "1") * 2))),
    _over("scan-numerics-cap", "257 values", _field(4, wire.data(4, b"".join(
        named(f"n{number:03}", "1") for number in range(257))))),
    _over("scan-text-cap", "a value of 257 bytes",
          _field(4, wire.data(4, named("a", "x" * 257)))),
    _bad("scan-text-utf8", "a surrogate as UTF-8", _field(4, wire.data(4, wire.data(
        1, wire.data(1, "a") + wire.data(2, b"\xed\xa0\x80"))))),
    _bad("scan-dropped-all", "a call that kept nothing", _field(5, run(1, 9, 9))),
    _bad("scan-dropped-long", "a call of 17 that dropped rows", _field(5, run(1, 17, 8))),
    _bad("scan-parent-off-grid", "a parent at 255", Pack(*_DELTA, manifest={7: parent(255)})),
    _over("scan-parent-depth", "depth 8", Pack(*_DELTA, manifest={7: parent(depth=8)})),
    _bad("scan-parent-depth-0", "no depth", Pack(*_DELTA, manifest={7: parent(depth=0)})),
    _over("scan-layer-cap", "a reference that names layer 512", Pack(
        change(0, layers=[0, 511], reference={"layers": b"\0\x80\x04"}))),
    _over("scan-parent-epoch", "a parent of epoch 2^31",
          Pack(*_DELTA, manifest={7: parent(epoch=2**31)})),
]  # fmt: skip
