"""A store of any number of chunks, its files written straight, each chunk one that opens.

Sessions of 8,192 tokens begin with one prompt of 1,024. A block of 256 tokens is 8 chunks, as it
is 7 in the reference geometry, but a chunk is 1,202 bytes and takes one block of the file system:
what is measured is how cost grows with the number of objects, not with their bytes.

With stubs, chunks have made-up ids, and their names are links to one file of the right length: a
store of a million takes no room, and everything but opening a chunk costs what it costs. A check of
it finds every chunk damaged.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvpack.bundle import Header, encode_header
from kvpack.chunk import ChunkClass, ChunkReference, Codec, SealContext, SealedChunk, seal_tile
from kvpack.chunk.seal import seal_token_ids
from kvpack.identity import CallRun, CallSchedule, Identity, NumericsFingerprint
from kvpack.keys import EpochKey, Keyring
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, Producer
from kvpack.limits import GRID_TOKENS
from kvpack.manifest import Component, ComponentKind, Manifest, manifest_id, seal_manifest
from kvpack.snapshot import Tile, TileSpec
from kvpack.store import Hold, HoldKind, names, open_store
from kvpack.store.cut import join_cut
from kvpack.store.index import index_names

KEY = EpochKey("bench", 1, bytes(range(32)))
KEYRING = Keyring([KEY])
LAYERS = 8
_FULL = LayerLayout(LayerKind.FULL, None, 1, 1, 1)
LAYOUT = CacheLayout((_FULL,) * LAYERS, Encoding.F16LE, 1 << 20)
IDENTITY = Identity(
    tenant=KEY.tenant,
    weights_digest=bytes([1]) * 32,
    quantisation="none",
    adapter_digest=bytes(32),
    tokenizer_digest=bytes([2]) * 32,
    chat_template_digest=bytes(32),
    engine_abi="bench/1",
    layout=LAYOUT,
    constants=(),
)
HEADER = Header.of(IDENTITY, KEY.epoch)
HEADER_BYTES = encode_header(HEADER)
NUMERICS = NumericsFingerprint((("backend", "none"),))
CONTEXT = SealContext(KEY, HEADER.identity_digest, HEADER.layout_digest)

SHARED_TOKENS = 1024
HALF_TOKENS = 4096
SESSION_TOKENS = 8192
#: Chunks that each session adds: those of its own blocks, and its token ids in two pieces.
SESSION_CHUNKS = LAYERS * (SESSION_TOKENS - SHARED_TOKENS) // GRID_TOKENS + 2
#: Cuts that lie in one block after the shared prompt, 50 tokens on, for a thousand chunks.
FORKS_PER_THOUSAND = 1
FORK_TOKENS = 50
FIRST_STAMP = 1_000_000
#: ext4 gives a file no more names than 65,000.
LINKS_MAX = 60_000

_SHARED_SEED = 1 << 30
_NOISE = random.Random(1).randbytes(1 << 20)


def ids_of(seed: int, tokens: int = SESSION_TOKENS) -> tuple[int, ...]:
    """The text of session ``seed``: the shared prompt, then its own ids."""
    return tuple(
        (index * 31 + (_SHARED_SEED if index < SHARED_TOKENS else seed * 7919)) % 50_000
        for index in range(tokens)
    )


def block_chunks(seed: int, first: int, count: int) -> list[SealedChunk]:
    """Rows of one block of session ``seed``, a chunk a layer; equal where the texts are."""
    owner = _SHARED_SEED if first < SHARED_TOKENS else seed
    made = []
    for layer in range(LAYERS):
        spec = TileSpec(LayerKind.FULL, (layer,), first, count)
        length = spec.data_bytes(LAYOUT)
        start = (owner * 7919 + first * 13 + layer * 101) % (len(_NOISE) - length)
        data = owner.to_bytes(4, "little") + _NOISE[start + 4 : start + length]
        made.append(seal_tile(CONTEXT, Tile(spec, data)))
    return made


def manifest_of(position: int, references: Sequence[ChunkReference]) -> Manifest:
    """A cut that holds ``references``."""
    return Manifest(
        producer=Producer.ENGINE,
        position=position,
        numerics=NUMERICS,
        schedule=CallSchedule((CallRun(position, 1),)),
        references=tuple(references),
        components=(Component(ComponentKind.TARGET, HEADER.identity_digest),),
    )


def lineage_of(seed: int) -> bytes:
    """Whose cuts."""
    return seed.to_bytes(16, "little")


@dataclass(frozen=True)
class World:
    """What was made.

    Attributes:
        path: The store's folder.
        chunks: How many chunks it holds.
        cuts: How many cuts.
        sessions: Seeds of whole sessions are 0 to this, exclusive.
        forks: Seeds of forks follow, so many.
        nodes: How many prefix nodes there are.
    """

    path: Path
    chunks: int
    cuts: int
    sessions: int
    forks: int
    nodes: int


def stub_references(seed: int, first: int, count: int) -> list[ChunkReference]:
    """What :func:`block_chunks` would have for references, with ids that nobody sealed."""
    owner = _SHARED_SEED if first < SHARED_TOKENS else seed
    return [
        ChunkReference(
            ChunkClass.FULL, (layer,), first, count,
            blake3(b"content %d %d %d" % (owner, first, layer)).digest(),
            blake3(b"seal %d %d %d" % (owner, first, layer)).digest(),
            Codec.RAW, CONTEXT.aead, KEY.epoch, 4 * count, 4 * count,
        )
        for layer in range(LAYERS)
    ]  # fmt: skip


def make_world(path: Path, chunks: int, *, stubs: bool = False) -> World:
    """A store of about ``chunks`` chunks in the new folder ``path``."""
    open_store(path, create=True).close()
    maker = _Maker(path, stubs=stubs)
    forks = max(2, chunks * FORKS_PER_THOUSAND // 1000)
    shared = maker.blocks(0, 0, SHARED_TOKENS)
    left = chunks - maker.chunks - forks * (LAYERS + 2)
    sessions = max(1, left // SESSION_CHUNKS)
    for seed in range(sessions):
        half = [*shared, *maker.blocks(seed, SHARED_TOKENS, HALF_TOKENS)]
        ids = ids_of(seed)
        first = maker.ids(ids[:HALF_TOKENS], 0)
        maker.cut(seed, ids[:HALF_TOKENS], [*half, *first], HoldKind.TURN)
        whole = [*half, *maker.blocks(seed, HALF_TOKENS, SESSION_TOKENS)]
        more = maker.ids(ids[HALF_TOKENS:], HALF_TOKENS)
        maker.cut(seed, ids, [*whole, *first, *more], HoldKind.TURN)
    for seed in range(sessions, sessions + forks):
        ids = ids_of(seed, SHARED_TOKENS + FORK_TOKENS)
        tail = maker.blocks(seed, SHARED_TOKENS, len(ids))
        maker.cut(seed, ids, [*shared, *tail, *maker.ids(ids, 0)], HoldKind.PROMPT)
    return World(path, maker.chunks, maker.cuts, sessions, forks, len(maker.nodes))


class _Maker:
    """Writes objects under their names: what the store's own writer does, but for the flushes."""

    def __init__(self, path: Path, *, stubs: bool) -> None:
        self._path = path
        self._stubs = stubs
        self._linked: dict[int, tuple[str, int]] = {}
        self.chunks = 0
        self.cuts = 0
        self.nodes: set[str] = set()

    def put(self, name: str, data: bytes = b"") -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(self._path / name, flags, 0o600)
        if data:
            os.write(descriptor, data)
        os.close(descriptor)

    def _add(self, made: list[SealedChunk]) -> Iterator[ChunkReference]:
        for chunk in made:
            self.put(names.chunk_name(chunk.reference.seal_id), chunk.object)
            self.chunks += 1
            yield chunk.reference

    def blocks(self, seed: int, first: int, end: int) -> list[ChunkReference]:
        found: list[ChunkReference] = []
        for start in range(first, end, GRID_TOKENS):
            count = min(GRID_TOKENS, end - start)
            if self._stubs:
                found.extend(self._link(stub_references(seed, start, count)))
            else:
                found.extend(self._add(block_chunks(seed, start, count)))
        return found

    def _link(self, references: list[ChunkReference]) -> Iterator[ChunkReference]:
        for reference in references:
            name = names.chunk_name(reference.seal_id)
            source, links = self._linked.get(reference.object_bytes, ("", LINKS_MAX))
            if links == LINKS_MAX:
                self.put(name, bytes(reference.object_bytes))
                self._linked[reference.object_bytes] = name, 1
            else:
                os.link(self._path / source, self._path / name)
                self._linked[reference.object_bytes] = source, links + 1
            self.chunks += 1
            yield reference

    def ids(self, ids: Sequence[int], first: int) -> list[ChunkReference]:
        return list(self._add(seal_token_ids(CONTEXT, ids, first)))

    def cut(
        self, seed: int, ids: Sequence[int], references: Sequence[ChunkReference], kind: HoldKind
    ) -> None:
        blob = seal_manifest(KEY, HEADER_BYTES, manifest_of(len(ids), references), in_store=True)
        cut_id = manifest_id(blob)
        self.put(names.cut_name(cut_id), join_cut(HEADER_BYTES, blob))
        hold = Hold(FIRST_STAMP + self.cuts, len(ids), lineage_of(seed), kind, cut_id)
        self.put(hold.name)
        *nodes, entry = index_names(KEY, HEADER, ids, cut_id)
        for node in nodes:
            if node not in self.nodes:
                self.nodes.add(node)
                self.put(node)
        self.put(entry)
        self.cuts += 1
