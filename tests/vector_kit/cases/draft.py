"""Draft models: a component, rows of their own layout, and the gate over both."""

from __future__ import annotations

from dataclasses import replace

from tests.vector_kit import wire
from tests.vector_kit.cases.shared import OTHER, parent, refused, state
from tests.vector_kit.chunks import Chunk, frame
from tests.vector_kit.drafts import Draft, draft_identity, draft_state, full, swa
from tests.vector_kit.packs import FULL, ROW, SIGNER, SWA, Pack, chunks, identity, layout, noise

_ok = refused("ok")
_scan = refused("malformed manifest.scan")
_GOOD = Draft()
_NARROW = layout([FULL, SWA], tokens=8)
_F32 = layout([FULL, SWA], encoding=3)


def _gate(step: int, name: str, comment: str, pack: Pack, reason: str = "malformed") -> object:
    return refused(f"{reason} gate.{step}")(f"draft-gate-{step}-{name}", comment, pack)


def _rows(name: str, comment: str, *found: Chunk) -> object:
    return _gate(12, name, comment, _GOOD.pack(*found), "layout_mismatch")


def _shaped(shape: bytes, **more: object) -> Draft:
    return Draft(raw=draft_identity(shape), shape=shape, **more)


def _oracle() -> Pack:
    shape = layout(encoding=3)
    draft = Draft(0)
    fields = {2: wire.number(2, 2)}
    return draft.pack(target=[], identity=identity(shape), shape=shape, manifest=fields)


VECTORS = [
    _ok("draft-good", "all rows of a draft of another shape", _GOOD.pack(full(), swa())),
    _ok("draft-good-state", "rows and a state in two parts", _GOOD.pack(
        full(), swa(), draft_state(), draft_state(part=1))),
    _ok("draft-good-nothing", "a draft of position 0", Draft(0).pack(target=[])),
    _ok("draft-good-layers-apart", "two full layers in two chunks, one of them in two",
        _shaped(layout([FULL, FULL])).pack(
            full(), full(0, 4, (1,)), replace(full(4, 5, (1,)), plain=noise("d", 5 * ROW)))),
    _ok("draft-good-first", "the draft's rows before the target's", replace(
        _GOOD.pack(), chunks=[*_GOOD.bound(full(), swa()), *chunks()])),
    _ok("draft-good-zstd", "rows of zeros, codec 2", _GOOD.pack(
        replace(full(), plain=bytes(90), codec=2, encoded=frame(bytes(90))), swa())),
    _ok("draft-good-import", "a draft of an importer that knows no calls", replace(
        Draft(calls=0), ).pack(full(), swa(), manifest={2: wire.number(2, 3)})),
    _ok("draft-good-signed", "a signed pack with a draft, read with the public key", _GOOD.pack(
        full(), swa(), signer=SIGNER), signed=True),
    refused("incomplete parent", released=5)(
        "draft-delta", "a delta holds all rows of its draft",
        _shaped(_WIDE := layout([FULL]), position=265).pack(
            replace(full(0, 256), plain=noise("whole", 256 * ROW)),
            replace(full(256, 9), plain=noise("tail", 9 * ROW)),
            target=chunks(265, 256), manifest={7: parent()})),
    _gate(12, "delta", "a delta without its draft's older rows", _shaped(_WIDE, position=265).pack(
        replace(full(256, 9), plain=noise("tail", 9 * ROW)),
        target=chunks(265, 256), manifest={7: parent()}), "layout_mismatch"),
    _scan("draft-unsaid", "a draft without its model", Pack(order=lambda parts: [
        *parts[:6], wire.data(6, wire.number(1, 2) + wire.data(2, OTHER)), *parts[6:]])),
    _scan("draft-target-says", "a target with a draft model", Pack(order=lambda parts: [
        *parts[:5], wire.data(6, parts[5][2:] + wire.data(3, _GOOD.model())), *parts[6:]])),
    *(_scan(f"draft-missing-{number}", f"a draft model without field {number}", Pack(
        order=Draft(**changes).order)) for number, changes in (
            (2, {"numerics": b""}),)),
    _scan("draft-identity-scan", "an identity that is not canonical",
          Draft(raw=draft_identity() + wire.number(10, 1)).pack(full(), swa())),
    _gate(3, "context", "9 tokens where the draft takes 8", _shaped(_NARROW).pack(full(), swa())),
    _gate(4, "oracle-f16", "an oracle with a draft of f16", _oracle(), "layout_mismatch"),
    _gate(5, "digest", "the digest of another draft", Draft(digest=OTHER).pack(full(), swa())),
    _gate(5, "tenant", "a draft of another tenant",
          Draft(raw=draft_identity(tenant="rival")).pack(full(), swa())),
    _gate(5, "tokenizer", "a draft of other tokens",
          Draft(raw=draft_identity(tokens=4)).pack(full(), swa()), "identity_mismatch"),
    _gate(5, "unnamed", "draft rows without a component",
          Pack([*chunks(), *_GOOD.bound(full(), swa())])),
    _gate(6, "schedule-short", "calls of 8 tokens", Draft(calls=8).pack(full(), swa())),
    _gate(6, "schedule-none", "an engine's draft without calls", Draft(calls=0).pack(
        full(), swa())),
    _gate(9, "no-layer", "layer 2 of 2", _GOOD.pack(full(), swa(), full(0, 9, (2,))),
          "layout_mismatch"),
    _gate(9, "kinds", "a window layer beside a full one", _GOOD.pack(
        replace(full(0, 9, (0, 1)), plain=noise("kinds", 18 * ROW))), "layout_mismatch"),
    _gate(9, "rows-short", "rows of another size", _GOOD.pack(
        replace(full(), plain=bytes(89)), swa()), "layout_mismatch"),
    _gate(9, "f32", "f16 rows of an f32 draft", _shaped(_F32).pack(full(), swa()),
          "layout_mismatch"),
    _gate(9, "state", "a draft's state of another cut", _GOOD.pack(
        full(), swa(), draft_state(8))),
    _rows("nothing", "no rows of the draft"),
    _rows("state-alone", "a state and no rows", draft_state()),
    _rows("full-missing", "no rows of its full layer", swa()),
    _rows("full-short", "its last row missing", full(0, 8), swa()),
    _rows("full-gap", "row 4 missing", full(0, 4), full(5, 4), swa()),
    _rows("full-overlap", "row 4 twice", full(0, 5), full(4, 5), swa()),
    _rows("full-beyond", "a row above the cut", full(), full(9, 1), swa()),
    _rows("swa-missing", "no rows of its window", full()),
    _rows("swa-short", "the window's first row missing", full(), swa(5, 4)),
    _rows("swa-extra", "a row below the window", full(), swa(3, 6)),
    refused("malformed manifest.scan")("draft-rows-part", "draft rows with a part",
        _GOOD.pack(full(), swa(), replace(full(), part=1))),
    refused("malformed chunk.1", released=4)("draft-role", "draft rows as an opaque payload",
        _GOOD.pack(full(), replace(swa(), role=2))),
    refused("identity_mismatch chunk.7", released=3)(
        "draft-of-target", "draft rows that name the target's model",
        replace(_GOOD.pack(), chunks=[*chunks(), *(
            replace(one, identity=None) for one in _GOOD.bound(full(), swa()))])),
    refused("layout_mismatch chunk.7", released=3)(
        "draft-layout-of-target", "draft rows that name the target's layout",
        replace(_GOOD.pack(), chunks=[*chunks(), *(
            replace(one, layout=None) for one in _GOOD.bound(full(), swa()))])),
    refused("layout_mismatch chunk.7", released=5)(
        "draft-target-of-draft", "a session state that names the draft",
        _GOOD.pack(full(), swa(), state())),
    refused("identity_mismatch chunk.7")(
        "draft-signed-other", "a signed draft chunk that names the target, without a root",
        replace(_GOOD.pack(signer=SIGNER), chunks=[*chunks(), *(
            replace(one, identity=None) for one in _GOOD.bound(full(), swa()))]), signed=True),
]  # fmt: skip
