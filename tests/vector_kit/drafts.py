"""A draft model beside the target: its identity, its rows, and what the manifest says of both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from blake3 import blake3

from tests.vector_kit import wire
from tests.vector_kit.chunks import Chunk
from tests.vector_kit.packs import FULL, ROW, SWA, Pack, chunks, identity, layout, noise

#: Full, then a window of 5: another number of layers and another order than the target has.
SHAPE = layout([FULL, SWA])


def draft_identity(shape: bytes = SHAPE, tenant: str = "acme", tokens: int = 2) -> bytes:
    """An Identity: other weights, the same tokenizer."""
    fields = identity(shape, tenant)
    fields[1] = wire.data(2, b"\x03" * 32)
    fields[4] = wire.data(5, bytes([tokens]) * 32)
    return b"".join(fields)


def digest(raw: bytes) -> bytes:
    """The digest of an identity."""
    return blake3(b"kvpack/v1/identity\0" + raw).digest()


@dataclass
class Draft:
    """A good draft of 9 tokens, unless told otherwise."""

    position: int = 9
    raw: bytes = field(default_factory=draft_identity)
    shape: bytes = SHAPE
    numerics: bytes = wire.data(2, b"")
    calls: int | None = None
    #: Instead of the true digest of the identity.
    digest: bytes = b""

    def model(self) -> bytes:
        """The DraftModel."""
        calls = self.position if self.calls is None else self.calls
        run = wire.data(1, wire.number(1, 1) + wire.number(2, calls)) if calls else b""
        return wire.data(1, self.raw) + self.numerics + wire.data(3, run)

    def component(self) -> bytes:
        """The component, as the manifest's field 6."""
        named = self.digest or digest(self.raw)
        fields = wire.number(1, 2) + wire.data(2, named) + wire.data(3, self.model())
        return wire.data(6, fields)

    def bound(self, *found: Chunk) -> list[Chunk]:
        """Chunks that are of this draft."""
        shape = blake3(b"kvpack/v1/layout\0" + self.shape).digest()
        return [replace(chunk, identity=digest(self.raw), layout=shape) for chunk in found]

    def pack(self, *found: Chunk, target: list[Chunk] | None = None, **more: object) -> Pack:
        """A pack with these chunks of the draft."""
        mine = chunks(self.position) if target is None else target
        return Pack([*mine, *self.bound(*found)], self.position, order=self.order, **more)

    def order(self, parts: list[bytes]) -> list[bytes]:
        """The manifest's parts with the component in its place."""
        return [*parts[:6], self.component(), *parts[6:]]


def full(first: int = 0, count: int = 9, layers: tuple[int, ...] = (0,)) -> Chunk:
    """Rows of the draft's full layer."""
    return Chunk(6, list(layers), first, count, noise(f"draft full {first}", ROW * count))


def swa(first: int = 4, count: int = 5, layers: tuple[int, ...] = (1,)) -> Chunk:
    """Rows of the draft's window."""
    return Chunk(6, list(layers), first, count, noise(f"draft swa {first}", ROW * count))


def draft_state(position: int = 9, **changes: object) -> Chunk:
    """A payload of the draft."""
    return replace(Chunk(6, [], position, 0, b"\x01state of a draft"), **changes)
