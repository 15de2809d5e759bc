"""Section 7: each step of the gate, asked of an authentic and canonical manifest."""

from __future__ import annotations

from dataclasses import replace

from tests.vector_kit import wire
from tests.vector_kit.cases.shared import (
    change,
    component,
    parent,
    refused,
    run,
    shaped,
    state,
    with_state,
)
from tests.vector_kit.chunks import Chunk, u32
from tests.vector_kit.packs import ROW, Pack, chunks, identity, layout, noise

_SHORT = layout(tokens=8)
_SEAL = b"\x09" * 32


def _bad(step: int, name: str, comment: str, pack: Pack, **more: object) -> object:
    return refused(f"malformed gate.{step}")(f"gate-{step}-{name}", comment, pack, **more)


def _shape(step: int, name: str, comment: str, pack: Pack) -> object:
    return refused(f"layout_mismatch gate.{step}")(f"gate-{step}-{name}", comment, pack)


def _ids(first: int, count: int) -> Chunk:
    return Chunk(3, [], first, count, b"".join(u32(at) for at in range(first, first + count)))


def _full(first: int, count: int, layers: tuple[int, ...] = (1,)) -> Chunk:
    return Chunk(1, list(layers), first, count, noise(f"f{first}", ROW * count * len(layers)))


def _swa(first: int, count: int, layers: tuple[int, ...] = (0, 2)) -> Chunk:
    return Chunk(2, list(layers), first, count, noise(f"s{first}", ROW * count * len(layers)))


def _ring(*heads: tuple[int, int], producer: int = 4) -> Pack:
    fields = b"".join(wire.data(8, wire.number(1, a) + wire.number(2, b)) for a, b in heads)
    return Pack(manifest={2: wire.number(2, producer), 8: fields})


SWA_9, FULL_9, IDS_9 = chunks()
VECTORS = [
    _bad(1, "range-twice", "two chunks of one part",
         Pack([*chunks(), state(), state(plain=b"\x01other")])),
    _bad(1, "seal-twice", "two references of one seal id", Pack([
        *chunks(), state(reference={"seal": _SEAL}), state(part=1, reference={"seal": _SEAL})])),
    _bad(2, "draft-alone", "no target", Pack(manifest={6: component(2)})),
    _bad(2, "target-twice", "two targets", Pack(manifest={6: component(1) * 2})),
    _bad(3, "context", "9 tokens where 8 are the most",
         Pack(identity=identity(_SHORT), shape=_SHORT)),
    _shape(4, "oracle-f16", "an oracle of f16", shaped(layout(), manifest={2: wire.number(2, 2)})),
    refused("identity_mismatch gate.5")("gate-5-target", "another model's manifest",
                                        Pack(manifest={6: component(1)})),
    _bad(5, "draft-unnamed", "a draft chunk without a component", with_state(kind=6)),
    _bad(6, "schedule-short", "calls of 8 tokens", Pack(manifest={5: run(1, 8)})),
    _bad(6, "schedule-large", "calls beyond the last position", Pack(manifest={5: run(2**24, 2)})),
    _bad(6, "schedule-none", "an engine without calls", Pack(manifest={5: wire.data(5, b"")})),
    _bad(6, "schedule-wrong-import", "an importer with wrong calls",
         Pack(manifest={2: wire.number(2, 3), 5: run(1, 8)})),
    _bad(7, "ring-engine", "a ring head of the engine", _ring((0, 1), producer=1)),
    _shape(7, "ring-full", "a ring head of a full layer", _ring((1, 1))),
    _shape(7, "ring-no-layer", "a ring head of layer 3 of 3", _ring((3, 1))),
    _bad(7, "ring-order", "layers that descend", _ring((2, 1), (0, 1))),
    _bad(7, "ring-twice", "a layer twice", _ring((2, 1), (2, 1))),
    _shape(7, "ring-beyond", "row 5 of 5", _ring((0, 5))),
    _bad(8, "parent-at-position", "a parent above the pack", Pack(manifest={7: parent()})),
    _bad(9, "trimmed", "a reference of a store",
         Pack(change(0, reference={"used": 1, "used_count": 1}))),
    _bad(9, "epoch", "an object newer than its pack", with_state(epoch=2),
         keys=(("acme", 1, 0), ("acme", 2, 0))),
    _shape(9, "no-layer", "layer 3 of 3", Pack([SWA_9, FULL_9, IDS_9, _full(0, 9, (3,))])),
    _shape(9, "wrong-kind", "a window layer as a full one", Pack([SWA_9, _full(0, 9, (0,)),
                                                                  IDS_9])),
    _shape(9, "rows-short", "rows of another size", Pack(change(1, plain=bytes(ROW * 9 - 1)))),
    _shape(9, "rows-long", "rows of another size", Pack(change(1, plain=bytes(ROW * 9 + 1)))),
    _bad(9, "logits", "logits of a row before the last",
         Pack([*chunks(), Chunk(4, [], 7, 1, b"\x01l")])),
    _bad(9, "state", "a state of another cut", with_state(first=8)),
    _bad(10, "parts-order", "part 1 before part 0", Pack([*chunks(), state(part=1), state()])),
    _bad(10, "parts-first", "part 1 alone", with_state(part=1)),
    _bad(10, "parts-gap", "parts 0 and 2", Pack([*chunks(), state(), state(part=2)])),
    _shape(11, "no-chunks", "nine tokens without a chunk", Pack([])),
    _shape(11, "ids-missing", "no token ids", Pack([SWA_9, FULL_9])),
    _shape(11, "ids-short", "eight token ids", Pack([SWA_9, FULL_9, _ids(0, 8)])),
    _shape(11, "ids-long", "ten token ids", Pack([SWA_9, FULL_9, _ids(0, 10)])),
    _shape(11, "ids-gap", "token 4 missing", Pack([SWA_9, FULL_9, _ids(0, 4), _ids(5, 4)])),
    _shape(11, "ids-overlap", "token 4 twice", Pack([SWA_9, FULL_9, _ids(0, 5), _ids(4, 5)])),
    _shape(11, "ids-order", "later ids first", Pack([SWA_9, FULL_9, _ids(4, 5), _ids(0, 4)])),
    _shape(12, "full-missing", "no rows of the full layer", Pack([SWA_9, IDS_9])),
    _shape(12, "full-short", "its last row missing", Pack([SWA_9, _full(0, 8), IDS_9])),
    _shape(12, "full-gap", "row 4 missing", Pack([SWA_9, _full(0, 4), _full(5, 4), IDS_9])),
    _shape(12, "full-doubled", "row 8 twice", Pack([SWA_9, FULL_9, _full(8, 1), IDS_9])),
    _shape(12, "full-beyond", "a row above the cut", Pack([SWA_9, FULL_9, _full(9, 1), IDS_9])),
    _shape(12, "swa-short", "the window's first row missing", Pack([_swa(5, 4), FULL_9, IDS_9])),
    _shape(12, "swa-extra", "a row below the window", Pack([_swa(3, 6), FULL_9, IDS_9])),
    _shape(12, "swa-layer", "one window layer missing", Pack([_swa(4, 5, (0,)), FULL_9, IDS_9])),
    _shape(12, "nothing-with-rows", "rows at position 0",
           Pack([_full(0, 1)], 0)),
    _shape(12, "delta-below", "a delta with rows of its parent", Pack(
        [*chunks(265, 256), replace(_full(255, 1))], 265, manifest={7: parent()})),
    _shape(7, "ring-delta", "row 5 of 5 of a delta that stores two", Pack(
        chunks(258, 256), 258, manifest={
            2: wire.number(2, 4), 7: parent(), 8: wire.data(8, wire.number(2, 5))})),
]  # fmt: skip
