"""The two bounds of the store, with real files: a shared prefix is kept once, cuts cost a window.

The geometry is the reference one (52 layers, three of four with a window of 2,048). Every run has
rows of 64 bytes a layer: a sixteenth of all bytes, and sixteen times the share of headers.
``make test-slow`` has the 1,024 bytes of the reference: 4 GB on the disk, one call in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from store_kit import IDENTITY, KEYRING, NOW, Session, tools

from kvpack.bundle import encode_header
from kvpack.chunk import SealedChunk, seal_tile
from kvpack.header import Header
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout
from kvpack.manifest import Manifest
from kvpack.snapshot import Tile, TileSpec
from kvpack.store import (
    Budget,
    CutWriter,
    GcPolicy,
    HoldKind,
    LocalStore,
    Severity,
    apply_gc,
    check_store,
    cut_cadence_tokens,
    list_cuts,
    plan_gc,
)
from kvpack.store.budget import measure
from kvpack.store.disk import PosixDisk
from kvpack.store.opening import initialise

WINDOW = 2048
_NOISE = os.urandom(5 << 20)


@dataclass(frozen=True)
class Geometry:
    """52 layers with rows of ``row`` bytes each, keys and values together."""

    row: int

    @property
    def header(self) -> Header:
        dim = self.row // 4
        swa = LayerLayout(LayerKind.SWA, WINDOW, 1, dim, dim)
        full = LayerLayout(LayerKind.FULL, None, 1, dim, dim)
        layout = CacheLayout((swa, swa, swa, full) * 13, Encoding.F16LE, 131_072)
        return Header.of(replace(IDENTITY, layout=layout), 1)

    @property
    def full_token(self) -> int:
        return 13 * self.row

    @property
    def all_token(self) -> int:
        return 52 * self.row

    @property
    def window_bytes(self) -> int:
        return 39 * self.row * WINDOW


SMALL, REFERENCE = Geometry(64), Geometry(1024)
GEOMETRIES = [
    pytest.param(SMALL, id="sixteenth"),
    pytest.param(REFERENCE, id="reference", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
]


def test_the_reference_geometry_is_that_of_the_design() -> None:
    found = REFERENCE.full_token, REFERENCE.all_token, REFERENCE.window_bytes
    assert found == (13_312, 53_248, 81_788_928)


class CountingDisk(PosixDisk):
    """A real folder that counts what is written; flushing would measure this machine's disk."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written_bytes = 0

    def write(self, handle: int, data: bytes | memoryview) -> None:
        self.written_bytes += len(data)
        super().write(handle, data)

    def flush(self, handle: int) -> None:
        return

    def flush_folder(self, folder: str) -> None:
        return


class Noise(Session):
    """A session whose rows are noise that depends on its salt, the kind and the position."""

    def seal(self, specs: Iterable[TileSpec]) -> list[SealedChunk]:
        chunks = []
        for spec in specs:
            name = f"{self.salt!r} {spec.kind} {spec.first_position}".encode()
            data = _NOISE[len(name) : spec.data_bytes(self.header.layout)]
            chunks.append(seal_tile(self.context, Tile(spec, name + data)))
        return chunks


@pytest.fixture
def disk(tmp_path: Path) -> CountingDisk:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    made = CountingDisk(folder)
    initialise(made, "store")
    return made


def publish(
    geometry: Geometry,
    store: LocalStore,
    session: Session,
    position: int,
    lineage: bytes,
    kind: HoldKind,
    now: int,
) -> Manifest:
    """Grow in calls of 512 tokens, as prefill does, and cut at ``position``."""
    room = (position - session.position) * (geometry.all_token + 64) + geometry.window_bytes
    with CutWriter(store, KEYRING, encode_header(session.header), tools(now)) as writer:
        writer.reserve(room)
        while session.position < position:
            writer.add(session.grow(min(session.position + 512, position)))
        chunks, manifest = session.cut()
        writer.add(chunks)
        writer.rely(manifest.references)
        writer.publish(manifest, lineage, kind, session.ids[:position])
    return manifest


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple((n * 2654435761 + seed) % 200_000 for n in range(count))


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_one_long_session_with_a_cut_every_2048_tokens(
    disk: CountingDisk, geometry: Geometry
) -> None:
    length = 65_536
    store, header = LocalStore(disk, "store"), geometry.header
    cadence = cut_cadence_tokens(header.layout)
    assert cadence == 2048
    session = Noise(ids(length, 1), header=header)
    for position in range(cadence, length + 1, cadence):
        kind = HoldKind.TURN if position == length else HoldKind.CADENCE
        publish(geometry, store, session, position, b"l" * 16, kind, NOW + position)
    assert disk.written_bytes <= 1.05 * geometry.all_token * length
    now = NOW + 100_000
    apply_gc(
        store, plan_gc(store, now, GcPolicy(Budget(1 << 40, 0))), now, b"c" * 16, lambda: None
    )  # fmt: skip
    retained = sorted(cut.position for cut in list_cuts(store, KEYRING))
    assert retained == [2048, 4096, 8192, 16384, 32768, 65536]
    kept = measure(store, [], now).used_bytes
    bound = geometry.full_token * length + geometry.window_bytes * len(retained)
    assert kept <= 1.01 * bound, kept / bound
    # The bound is tight from below, or it would not say that anything is kept at all.
    assert kept >= geometry.full_token * length + geometry.window_bytes * (len(retained) - 1)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_forty_sessions_keep_one_prefix(disk: CountingDisk, geometry: Geometry) -> None:
    prefix, suffix = 16_384, 512
    store, header = LocalStore(disk, "store"), geometry.header
    shared = ids(prefix, 1)
    first = Noise(shared, header=header)
    cut = publish(geometry, store, first, prefix, b"p" * 16, HoldKind.TURN, NOW)
    once = measure(store, [], NOW).used_bytes
    for number in range(40):
        own = (*shared, *ids(suffix, 1000 + number))
        session = Noise.restored(own, cut, header)
        session.salt = bytes([number, 1])
        publish(geometry, store, session, prefix + suffix, bytes([number]) * 16, HoldKind.TURN, NOW)
    kept = measure(store, [], NOW).used_bytes
    prefix_bytes = geometry.full_token * prefix + 39 * geometry.row * prefix
    bound = prefix_bytes + 40 * suffix * geometry.all_token
    assert once <= 1.01 * prefix_bytes
    assert kept <= 1.01 * bound, kept / bound
    now = NOW + 10
    apply_gc(
        store, plan_gc(store, now, GcPolicy(Budget(1 << 40, 0))), now, b"c" * 16, lambda: None
    )  # fmt: skip
    # Only the last window of the prefix is still needed by anybody.
    kept = measure(store, [], now).used_bytes
    bound = geometry.full_token * prefix + geometry.window_bytes + 40 * suffix * geometry.all_token
    assert kept <= 1.01 * bound, kept / bound
    assert len(list(list_cuts(store))) == 41
    findings = [f for f in check_store(store, KEYRING) if f.severity is Severity.DAMAGE]
    assert findings == []
