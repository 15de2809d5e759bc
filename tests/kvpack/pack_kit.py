"""Small packs for the tests of the format: every byte of them is a function of the arguments."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from kvpack.bundle import (
    BundleReader,
    Depth,
    DraftSnapshot,
    ForwardReader,
    Header,
    write_snapshot,
)
from kvpack.chunk import ChunkClass, Codec, SealContext, SealedChunk, seal_component
from kvpack.errors import KvpackError
from kvpack.identity import CallRun, CallSchedule, Identity, NumericsFingerprint
from kvpack.keys import EpochKey, Keyring
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, Producer, RopeLayout
from kvpack.manifest import DraftModel
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec, cut_tile_specs

KEY = EpochKey("acme", 1, bytes(range(32)))
KEYRING = Keyring([KEY])
ROPE = RopeLayout(theta_bits=0x411E848000000000, dims=2, interleaved=True)
SWA = LayerLayout(LayerKind.SWA, 5, 1, 2, 3, ROPE)
FULL = LayerLayout(LayerKind.FULL, None, 1, 2, 3)
LAYOUT = CacheLayout((SWA, FULL, SWA), Encoding.F16LE, 4096)
IDENTITY = Identity(
    tenant="acme",
    weights_digest=bytes([1]) * 32,
    quantisation="none",
    adapter_digest=bytes(32),
    tokenizer_digest=bytes([2]) * 32,
    chat_template_digest=bytes(32),
    engine_abi="abi/1",
    layout=LAYOUT,
    constants=(("logit_scale", 0x3FF0000000000000), ("zero", 0)),
)
HEADER = Header.of(IDENTITY, 1)
NUMERICS = NumericsFingerprint((("backend", "cpu"), ("mlx", "0.32.4")))
#: A draft of another shape, with the target's tokenizer: the token ids are those of both.
DRAFT_LAYOUT = CacheLayout((FULL, SWA), Encoding.F16LE, 4096)
DRAFT_IDENTITY = replace(IDENTITY, weights_digest=bytes([9]) * 32, layout=DRAFT_LAYOUT)
CONTEXT = SealContext(KEY, HEADER.identity_digest, HEADER.layout_digest)


def import_path(*first: str | Path) -> str:
    """``PYTHONPATH`` of a child: these, then what was there before, for packages may lie there."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, first), *([inherited] if inherited else [])])


def draft_model(position: int, identity: Identity = DRAFT_IDENTITY) -> DraftModel:
    """The draft as a manifest describes it, its rows computed in one call."""
    calls = CallSchedule((CallRun(position, 1),) if position else ())
    return DraftModel(identity, NumericsFingerprint((("backend", "cpu"),)), calls)


DRAFT_MODEL = draft_model(9)


def draft_snapshot(position: int = 9, identity: Identity = DRAFT_IDENTITY) -> DraftSnapshot:
    """A draft's state after ``position`` tokens."""
    return DraftSnapshot(draft_model(position, identity), snapshot(position, identity.layout))


def rows(spec: TileSpec, layout: CacheLayout = LAYOUT, seed: bytes = b"") -> Tile:
    """The rows of ``spec``: noise that depends on ``seed`` and on which rows they are."""
    name = repr((spec.kind, spec.layers, spec.first_position, spec.token_count)).encode()
    return Tile(spec, blake3(seed + name).digest(length=spec.data_bytes(layout)))


def snapshot(
    position: int, layout: CacheLayout = LAYOUT, producer: Producer = Producer.ENGINE
) -> SessionCacheSnapshot:
    """A whole state after ``position`` tokens."""
    tiles = tuple(rows(spec, layout) for spec in cut_tile_specs(layout, position))
    ids = tuple((index * 7) % 1000 for index in range(position))
    return SessionCacheSnapshot(layout, producer, position, ids, tiles)


def schedule(position: int) -> CallSchedule:
    """One call for everything."""
    return CallSchedule((CallRun(position, 1),) if position else ())


def header_for(layout: CacheLayout) -> Header:
    return Header.of(replace(IDENTITY, layout=layout), 1)


def session_chunk(position: int, data: bytes = b"\x01state") -> SealedChunk:
    return seal_component(CONTEXT, ChunkClass.SESSION, position, 0, data)


def logits_chunk(position: int) -> SealedChunk:
    return seal_component(CONTEXT, ChunkClass.FINAL_LOGITS, position - 1, 1, b"\x01" + bytes(8))


def pack(
    position: int = 9,
    layout: CacheLayout = LAYOUT,
    components: tuple[SealedChunk, ...] = (),
    codec: Codec = Codec.RAW,
    draft: DraftSnapshot | None = None,
) -> bytes:
    """A whole bundle."""
    sink = io.BytesIO()
    write_snapshot(
        sink, KEY, header_for(layout), snapshot(position, layout), NUMERICS, schedule(position),
        components=components, codec=codec, draft=draft,
    )  # fmt: skip
    return sink.getvalue()


@dataclass(frozen=True)
class Verdict:
    """What a reader said: ``reason`` is empty where it accepted."""

    reason: str = ""
    exit_code: int = 0
    message: str = ""

    @property
    def accepted(self) -> bool:
        return not self.reason


def _judge(read: Callable[[], object]) -> Verdict:
    try:
        read()
    except KvpackError as error:
        return Verdict(error.reason, error.exit_code, str(error))
    return Verdict()


def random_access(data: bytes, keyring: Keyring = KEYRING, depth: Depth = Depth.FULL) -> Verdict:
    """The verdict from the footer."""
    return _judge(lambda: BundleReader(io.BytesIO(data), keyring).check(depth))


def opened(data: bytes, keyring: Keyring = KEYRING) -> Verdict:
    """The verdict of reading every chunk by random access."""
    return _judge(lambda: list(BundleReader(io.BytesIO(data), keyring).chunks()))


def forward(data: bytes, keyring: Keyring = KEYRING, depth: Depth = Depth.FULL) -> Verdict:
    """The verdict forwards."""
    return _judge(lambda: ForwardReader(io.BytesIO(data), keyring, depth=depth))


class Pipe(io.RawIOBase):
    """Hands out a few bytes at a time, as a pipe may."""

    def __init__(self, data: bytes, piece: int = 1) -> None:
        super().__init__()
        self._data = data
        self._piece = piece
        self._offset = 0

    def readinto(self, buffer: memoryview) -> int:
        count = min(len(buffer), self._piece, len(self._data) - self._offset)
        buffer[:count] = self._data[self._offset : self._offset + count]
        self._offset += count
        return count
