"""Small sessions, a store in memory, and the calls that every store test makes."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from kvpack.bundle import encode_header
from kvpack.chunk import ChunkClass, ChunkReference, SealContext, SealedChunk, seal_tile
from kvpack.chunk.seal import seal_component, seal_token_ids
from kvpack.codes import ComponentKind
from kvpack.header import Header
from kvpack.identity import CallRun, CallSchedule, Identity, NumericsFingerprint
from kvpack.keys import EpochKey, Keyring
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, Producer, RopeLayout
from kvpack.manifest import Component, Manifest
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec, cut_tile_specs
from kvpack.store import Budget, CutWriter, HoldKind, LocalStore, WriterTools, open_store
from kvpack.store.grid import SealedGrid, completed_tiles

KEY = EpochKey("acme", 1, bytes(range(32)))
KEYRING = Keyring([KEY])
ROPE = RopeLayout(theta_bits=0x411E848000000000, dims=2, interleaved=True)


def import_path(*first: str | Path) -> str:
    """``PYTHONPATH`` of a child: these, then what was there before, for packages may lie there."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, first), *([inherited] if inherited else [])])


def layout(window: int = 300) -> CacheLayout:
    """Two sliding-window layers and a full one; 10 bytes a row."""
    swa = LayerLayout(LayerKind.SWA, window, 1, 2, 3, ROPE)
    return CacheLayout((swa, LayerLayout(LayerKind.FULL, None, 1, 2, 3), swa), Encoding.F16LE, 8192)


LAYOUT = layout()
IDENTITY = Identity(
    tenant="acme",
    weights_digest=bytes([1]) * 32,
    quantisation="none",
    adapter_digest=bytes(32),
    tokenizer_digest=bytes([2]) * 32,
    chat_template_digest=bytes(32),
    engine_abi="abi/1",
    layout=LAYOUT,
)
HEADER = Header.of(IDENTITY, 1)
NUMERICS = NumericsFingerprint((("backend", "cpu"),))
LINEAGE = bytes([7]) * 16
NOW = 1_000_000


def token_ids(count: int, seed: int = 0) -> tuple[int, ...]:
    """Ids of a text; texts of two seeds differ from the first id on."""
    return tuple((index * 31 + seed * 7 + 1) % 50_000 for index in range(count))


def rows(
    spec: TileSpec, ids: Sequence[int], shape: CacheLayout = LAYOUT, salt: bytes = b""
) -> Tile:
    """Rows that depend on layer, position and the id at that position, and on nothing else."""
    pieces = []
    for layer in spec.layers:
        for row_bytes in (shape.key_row_bytes(layer), shape.value_row_bytes(layer)):
            for position in range(spec.first_position, spec.end_position):
                pieces.append(_row(row_bytes, layer, position, ids[position], salt))
    return Tile(spec, b"".join(pieces))


@functools.lru_cache(maxsize=1 << 16)
def _row(row_bytes: int, layer: int, position: int, token_id: int, salt: bytes) -> bytes:
    """Keys and values of the test layouts differ in length, so their rows differ too."""
    return blake3(repr((layer, position, token_id, salt)).encode()).digest(length=row_bytes)


@functools.lru_cache(maxsize=64)
def snapshot(ids: Sequence[int], shape: CacheLayout = LAYOUT) -> SessionCacheSnapshot:
    """The state after ``ids``."""
    tiles = tuple(rows(spec, ids, shape) for spec in cut_tile_specs(shape, len(ids)))
    return SessionCacheSnapshot(shape, Producer.ENGINE, len(ids), tuple(ids), tiles)


def state(found: SessionCacheSnapshot) -> tuple[object, ...]:
    """A snapshot as a value that does not depend on the order of its tiles."""
    tiles = sorted((repr(tile.spec), bytes(tile.data)) for tile in found.tiles)
    return found.layout, found.producer, found.position, found.token_ids, tiles


@dataclass
class Session:
    """A session as a node would run it: it seals blocks while they are live, and cuts.

    Attributes:
        ids: All tokens.
        header: Whose rows.
        salt: Another one gives other rows for the same tokens.
    """

    ids: tuple[int, ...]
    header: Header = HEADER
    key: EpochKey = KEY
    salt: bytes = b""
    position: int = 0
    cut_at: int = 0
    grid: SealedGrid = field(init=False)
    id_references: list[ChunkReference] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grid = SealedGrid(self.header.layout)
        self.context = SealContext(self.key, self.header.identity_digest, self.header.layout_digest)

    @classmethod
    def restored(
        cls, ids: Sequence[int], manifest: Manifest, header: Header = HEADER, key: EpochKey = KEY
    ) -> Session:
        """One that goes on from a stored cut: its chunks are relied on as they are."""
        session = cls(tuple(ids), header, key, position=manifest.position)
        session.cut_at = manifest.position
        session.grid = SealedGrid(header.layout, manifest.references)
        ids_of_cut = (r for r in manifest.references if r.chunk_class is ChunkClass.TOKEN_IDS)
        session.id_references = list(ids_of_cut)
        return session

    def seal(self, specs: Iterable[TileSpec]) -> list[SealedChunk]:
        return [
            seal_tile(self.context, rows(spec, self.ids, self.header.layout, self.salt))
            for spec in specs
        ]  # fmt: skip

    def grow(self, position: int) -> list[SealedChunk]:
        """Compute up to ``position``; returns the blocks that this completed."""
        chunks = self.seal(completed_tiles(self.header.layout, self.position, position))
        self.position = position
        for chunk in chunks:
            self.grid.add(chunk.reference)
        return chunks

    def cut(self, *, logits: bool = False) -> tuple[list[SealedChunk], Manifest]:
        """What this cut alone needs, and its manifest."""
        tiles = self.grid.cut(self.position)
        chunks = self.seal(tiles.to_seal)
        ids = seal_token_ids(self.context, self.ids[self.cut_at : self.position], self.cut_at)
        self.id_references.extend(chunk.reference for chunk in ids)
        self.cut_at = self.position
        extra = [self._logits()] if logits else []
        references = (
            *tiles.references,
            *(chunk.reference for chunk in chunks),
            *self.id_references,
            *(chunk.reference for chunk in extra),
        )
        return [*chunks, *ids, *extra], self.manifest(references)

    def _logits(self) -> SealedChunk:
        where = self.position - 1
        return seal_component(self.context, ChunkClass.FINAL_LOGITS, where, 1, b"\x01" + bytes(8))

    def manifest(self, references: Sequence[ChunkReference]) -> Manifest:
        return Manifest(
            producer=Producer.ENGINE,
            position=self.position,
            numerics=NUMERICS,
            schedule=CallSchedule((CallRun(self.position, 1),)),
            references=tuple(references),
            components=(Component(ComponentKind.TARGET, self.header.identity_digest),),
        )


def tools(now: float = NOW, budget: Budget | None = None, **changes: object) -> WriterTools:
    """A clock that stands still; no two writers of any process have one id."""
    made = WriterTools(
        writer_id=os.urandom(16),
        clock=lambda: now,
        pause=lambda: None,
        budget=Budget(1 << 40, 0) if budget is None else budget,
        pauses_max=2,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def memory_folder() -> Path:
    """A folder that costs no disk: for tests that end processes, not machines."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))


def new_store(path: Path) -> LocalStore:
    return open_store(path / "store", create=True)


def save(
    store: LocalStore,
    session: Session,
    position: int,
    *,
    lineage: bytes = LINEAGE,
    kind: HoldKind = HoldKind.TURN,
    now: float = NOW,
    logits: bool = False,
    indexed: bool = True,
    budget: Budget | None = None,
    keyring: Keyring = KEYRING,
) -> bytes:
    """Grow ``session`` to ``position``, store everything, publish the cut; returns its id."""
    header_bytes = encode_header(session.header)
    with CutWriter(store, keyring, header_bytes, tools(now, budget)) as writer:
        grown = session.grow(position)
        chunks, manifest = session.cut(logits=logits)
        writer.add([*grown, *chunks])
        missing = {ref.seal_id for ref in manifest.references}
        missing -= {chunk.reference.seal_id for chunk in (*grown, *chunks)}
        writer.rely([ref for ref in manifest.references if ref.seal_id in missing])
        ids = session.ids[:position] if indexed else None
        return writer.publish(manifest, lineage, kind, ids)
