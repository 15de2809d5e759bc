"""Random changes under true MACs and tags: what only the scan, the gate and the codec can refuse.

A change of stored bytes dies at a MAC. Here the kit changes a message, an identity, a sealed field
or a frame first and authenticates the result, as a hostile holder of the key could.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from vector_support import (
    keyring,
    kvpack_from_footer,
    kvpack_piped,
    reference_forwards,
    reference_from_footer,
)

from tests.vector_kit.cases.shared import parent, state, with_state
from tests.vector_kit.chunks import Chunk, frame, root, u32
from tests.vector_kit.drafts import Draft, draft_state, full, swa
from tests.vector_kit.packs import Pack, chunks, identity, layout

_SEED = 3_141
_ROOTS = {("acme", epoch): root(epoch) for epoch in (1, 2)}
_VALUES = (0, 1, 2, 3, 4, 5, 8, 9, 10, 127, 128, 255, 256, 257, 2**16, 2**24, 2**24 + 1, 2**31)
_PLAIN = b"planes of bytes " * 16


def _bytes(data: bytes, draw: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(draw.randint(1, 2)):
        place = draw.randrange(len(out))
        kind = draw.randrange(4)
        if kind == 0:
            out[place] = draw.choice((0, 1, 2, 8, 0x12, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        elif kind == 1:
            out[place] ^= 1 << draw.randrange(8)
        elif kind == 2 and len(out) > 1:
            del out[place]
        else:
            out.insert(place, draw.choice((0, 1, 0x80, out[place])))
    return bytes(out)


def _message(draw: random.Random) -> Pack:
    def edit(blob: bytes) -> bytes:
        message = _bytes(blob[12:], draw)
        return blob[:8] + u32(len(message)) + message

    packs = [
        Pack(), Pack([], 0), with_state(), Pack(chunks(265, 256), 265, manifest={7: parent()}),
        Draft().pack(full(), swa()), Draft().pack(full(), swa(), draft_state()),
    ]  # fmt: skip
    return replace(draw.choice(packs), blob_edit=edit)


def _identity(draw: random.Random) -> Pack:
    if draw.randrange(2):
        shape = _bytes(layout(), draw)
        return Pack([], 0, identity=identity(shape), shape=shape)
    return Pack([], 0, identity=[_bytes(b"".join(identity()), draw)])


def _sealed(draw: random.Random) -> Pack:
    found = [*chunks(), state(), Chunk(4, [], 8, 1, b"\x01l"), *Draft().bound(full(), swa())]
    number, value = draw.randrange(len(found)), draw.choice(_VALUES)
    name = draw.choice(("kind", "first", "count", "part", "epoch", "layers", "aead", "role"))
    small = value if name in ("first", "count") else value % 10
    changed = sorted(draw.sample(range(5), draw.randrange(4))) if name == "layers" else small
    if draw.randrange(4):
        found[number] = replace(found[number], **{name: changed})
    keep, drafted = draw.choice((3, 4, 5, 5, 7, 7)), draw.randrange(2)
    found = found[:keep]
    draw.shuffle(found)
    order = Draft().order if drafted else list
    return Pack(found, epoch=draw.choice((1, 2)), order=order)


def _frame(draw: random.Random) -> Pack:
    encoded = _bytes(frame(_PLAIN, draw.choice((2, 4))), draw)
    return with_state(plain=_PLAIN, codec=2, encoded=encoded)


@pytest.mark.parametrize("first", [2**24 - 1, 2**24, 2**24 + 1])
@pytest.mark.parametrize("number", range(6))
def test_a_range_at_the_last_positions_has_one_verdict(number: int, first: int) -> None:
    found, keys = [*chunks(), state(), *Draft().bound(full(), swa())], keyring(_ROOTS)
    found[number] = replace(found[number], first=first)
    data, _ = Pack(found, order=Draft().order).build()
    ours = [kvpack_from_footer(data, keys), kvpack_piped(data, keys)]
    second = [reference_from_footer(data, _ROOTS), reference_forwards(data, _ROOTS)]
    assert len({verdict.exit_code for verdict in (*ours, *second)}) == 1, (ours, second)


@pytest.mark.parametrize("executions", [500, pytest.param(5_000, marks=pytest.mark.slow)])
def test_changes_under_true_macs_have_one_verdict(executions: int) -> None:
    print(f"seed {_SEED}")
    draw, keys, accepted = random.Random(_SEED), keyring(_ROOTS), 0
    for number in range(executions):
        pack = draw.choice((_message, _message, _identity, _sealed, _frame))(draw)
        data, _ = pack.build()
        ours = [kvpack_from_footer(data, keys), kvpack_piped(data, keys)]
        second = [reference_from_footer(data, _ROOTS), reference_forwards(data, _ROOTS)]
        good = {verdict.exit_code in (0, 14) for verdict in (*ours, *second)}
        assert len(good) == 1, (number, ours, second)
        codes = [[verdict.exit_code for verdict in found] for found in (ours, second)]
        assert codes[0] == codes[1], (number, ours, second)
        accepted += good == {True}
    assert 0 < accepted < executions, "changes that are all good or all bad compare nothing"
