"""Pieces that several groups use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.vector_kit import wire
from tests.vector_kit.chunks import Chunk
from tests.vector_kit.drafts import Draft
from tests.vector_kit.packs import Pack, chunks, identity
from tests.vector_kit.vector import Vector

OTHER = b"\x07" * 32


def state(**changes: Any) -> Chunk:
    """A session state: no rule about shapes touches it."""
    return replace(Chunk(7, [], 9, 0, b"\x01state of a session"), **changes)


def with_state(**changes: Any) -> Pack:
    """The pack of 9 tokens and one more chunk."""
    return Pack([*chunks(), state(**changes)])


def change(number: int, **changes: Any) -> list[Chunk]:
    """The chunks of 9 tokens, one of them changed."""
    found = chunks()
    found[number] = replace(found[number], **changes)
    return found


def shaped(shape: bytes, **changes: Any) -> Pack:
    """A pack of nothing that has this layout."""
    return Pack([], 0, identity=identity(shape), shape=shape, **changes)


def named(name: str, value: str) -> bytes:
    """One named text of a fingerprint."""
    return wire.data(1, wire.data(1, name) + wire.data(2, value))


def run(calls: int, tokens: int, dropped: int = 0) -> bytes:
    """A schedule of one run, as the manifest's field 5."""
    fields = wire.number(1, tokens) + wire.number(2, calls) + wire.number(3, dropped)
    return wire.data(5, wire.data(1, fields))


def parent(position: int = 256, depth: int = 1, epoch: int = 1) -> bytes:
    """A parent, as the manifest's field 7."""
    fields = [wire.data(1, OTHER), wire.number(2, epoch), wire.number(3, position)]
    return wire.data(7, b"".join([*fields, wire.number(4, depth)]))


def component(kind: int, digest: bytes = OTHER) -> bytes:
    """A component, as the manifest's field 6; of a draft with its model."""
    model = wire.data(3, Draft().model()) if kind == 2 else b""
    return wire.data(6, wire.number(1, kind) + wire.data(2, digest) + model)


def refused(expect: str, released: int = 0) -> Any:
    """A maker of vectors that all end alike."""

    def make(name: str, comment: str, pack: Pack, **more: Any) -> Vector:
        return Vector(name, expect, comment, pack, **{"released": released, **more})

    return make
