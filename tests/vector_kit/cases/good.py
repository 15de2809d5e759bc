"""Packs that are good: what a stricter reader would refuse wrongly."""

from __future__ import annotations

from dataclasses import replace

from tests.vector_kit import wire
from tests.vector_kit.cases.shared import (
    OTHER,
    parent,
    refused,
    run,
    shaped,
    state,
    with_state,
)
from tests.vector_kit.chunks import Chunk, frame
from tests.vector_kit.packs import FULL, ROW, SWA, Pack, chunks, identity, layout, noise

_ok = refused("ok")
_incomplete = refused("incomplete parent", released=3)
_BOTH = (("acme", 1, 0), ("acme", 2, 0))
_LAST = 2**31 - 1
_NAME = "n" * 256


def _split() -> list[Chunk]:
    whole = chunks()
    plain = noise("grouped otherwise", ROW * 5)
    return [Chunk(2, [0], 4, 5, plain), Chunk(2, [2], 4, 5, plain), *whole[1:]]


def _wide() -> bytes:
    layer = [wire.number(1, 2), wire.number(3, 4), wire.number(4, 1024), wire.number(5, 1024)]
    return layout([layer])


#: Printable, and just before or after code points that are not.
_EDGES = [
    0x20, 0x7E, 0xA1, 0xAC, 0xAE, 0x61B, 0x61D, 0x167F, 0x1681, 0x180D, 0x180F, 0x1FFF, 0x2010,
    0x2027, 0x2030, 0x205E, 0x2070, 0x2FFF, 0x3001, 0xD7FF, 0xF900, 0xFDCF, 0xFDF0, 0xFEFE, 0xFF00,
    0xFFF8, 0xFFFC, 0xFFFD, 0x10000, 0x1BC9F, 0x1BCA4, 0x1D172, 0x1D17B, 0x1FFFD, 0x20000, 0xDFFFD,
]  # fmt: skip


def _abi(text: str) -> list[bytes]:
    """An identity whose engine_abi is ``text``."""
    fields = identity()
    fields[6] = wire.data(7, text)
    return fields


VECTORS = [
    _ok("good-plain", "nine tokens, raw, AES-256-GCM", Pack()),
    _ok("good-nothing", "position 0 needs no chunk", Pack([], 0)),
    _ok("good-chacha20", "the other AEAD", Pack([replace(c, aead=2) for c in chunks()])),
    _ok("good-zstd-2", "codec 2, two planes", with_state(plain=bytes(400), codec=2)),
    _ok("good-zstd-4", "codec 2, four planes",
        with_state(plain=bytes(400), codec=2, encoded=frame(bytes(400), 4))),
    _ok("good-older-epoch", "objects of epoch 1 in a pack of epoch 2", Pack(epoch=2), keys=_BOTH),
    _ok("good-epoch-cap", "the last epoch", Pack(
        [replace(c, epoch=_LAST) for c in chunks()], epoch=_LAST), keys=(("acme", _LAST, 0),)),
    _ok("good-tenant-cap", "a tenant of 256 bytes",
        Pack([], 0, _NAME, identity=identity(tenant=_NAME)), keys=((_NAME, 1, 0),)),
    _ok("good-grouped-otherwise", "each layer in a chunk of its own", Pack(_split())),
    _ok("good-file-order", "rows and ids in another order", Pack(chunks()[::-1])),
    _ok("good-parts", "a payload of two parts", Pack([*chunks(), state(), state(part=1)])),
    _ok("good-states", "logits, sampler and session state", Pack([
        *chunks(), Chunk(4, [], 8, 1, b"\x01logits"), Chunk(5, [], 9, 0, b"\x01s"), state()])),
    _ok("good-chunk-cap", "plaintext of 4,194,304 bytes",
        with_state(plain=bytes(4_194_304), codec=2)),
    _ok("good-dropped", "a call of 10 that dropped one", Pack(manifest={5: run(1, 10, 1)})),
    _ok("good-dropped-cap", "a call of 16 that dropped seven", Pack(manifest={5: run(1, 16, 7)})),
    _ok("good-no-schedule", "an importer that knows no calls",
        Pack(manifest={2: wire.number(2, 3), 5: wire.data(5, b"")})),
    _ok("good-no-numerics", "an empty fingerprint", Pack(manifest={4: wire.data(4, b"")})),
    _ok("good-ring-head", "the last row of a ring of an mlx-lm cache", Pack(manifest={
        2: wire.number(2, 4), 8: wire.data(8, wire.number(2, 4))})),
    _ok("good-oracle", "an oracle of f32", shaped(
        layout(encoding=3), manifest={2: wire.number(2, 2)})),
    _ok("good-layers-cap", "512 layers", shaped(layout([FULL] * 512))),
    _ok("good-layer-index-cap", "a chunk of layers 0 to 511", Pack(
        [Chunk(1, list(range(512)), 0, 1, noise("512 layers", 512 * ROW)),
         Chunk(3, [], 0, 1, b"\x07\0\0\0")],
        1, identity=identity(layout([FULL] * 512)), shape=layout([FULL] * 512))),
    _ok("good-text-edges", "the code points beside every refused range",
        Pack([], 0, identity=_abi("".join(map(chr, _EDGES))))),
    _ok("good-text-unassigned", "code points that no Unicode table had assigned yet",
        Pack([], 0, identity=_abi("\u0378\u2fe0\U0003fffd"))),
    _ok("good-window-cap", "a window of 16,777,216 tokens",
        shaped(layout([[SWA[0], wire.number(2, 2**24), *SWA[2:]]]))),
    _ok("good-row-cap", "a row of 16,384 bytes", shaped(_wide())),
    _ok("good-context-cap", "a context of 16,777,216 tokens", shaped(layout(tokens=2**24))),
    _ok("good-no-constants", "an identity without constants",
        Pack([], 0, identity=identity()[:8])),
    _ok("good-content-id-untrue", "a false content id is found by deep verification only",
        with_state(content=OTHER)),
    _ok("good-token-id-unread", "a token id of 2^31: verification reads no token ids",
        Pack([*chunks()[:2], Chunk(3, [], 0, 9, b"\0\0\0\x80" * 9)])),
    _ok("good-payload-unread", "a payload of an unknown version: only its users read it",
        with_state(plain=b"\xffstate")),
    _ok("good-session-of-nothing", "a session state at position 0", Pack([state(first=0)], 0)),
    _ok("good-runs-unmerged", "equal runs one after the other", Pack(manifest={5: wire.data(
        5, wire.data(1, wire.number(1, 3) + wire.number(2, 1)) * 3)})),
    _ok("good-parts-apart", "parts of two payloads in turns", Pack([
        *chunks(), state(), state(kind=5), state(part=1), state(kind=5, part=1)])),
    _incomplete("delta-ring-head", "a ring head among rows of the parent", Pack(
        chunks(258, 256), 258,
        manifest={2: wire.number(2, 4), 7: parent(), 8: wire.data(8, wire.number(2, 4))})),
    _incomplete("delta-parent-newer", "a parent of a later epoch",
                Pack(chunks(265, 256), 265, manifest={7: parent(epoch=5)})),
    _incomplete("delta-alone", "good, but its parent is needed",
                Pack(chunks(265, 256), 265, manifest={7: parent()})),
    _incomplete("delta-depth-cap", "the seventh level",
                Pack(chunks(265, 256), 265, manifest={7: parent(depth=7)})),
]  # fmt: skip
