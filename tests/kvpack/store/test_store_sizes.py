"""The two bounds of the store, with real files: a shared prefix is kept once, cuts cost a window.

The geometry is the reference one (52 layers, three of four with a window of 2,048), with rows of 64
bytes a layer instead of 1,024: a sixteenth of all bytes, and sixteen times the share of headers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
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
_SWA = LayerLayout(LayerKind.SWA, WINDOW, 1, 16, 16)
_FULL = LayerLayout(LayerKind.FULL, None, 1, 16, 16)
LAYOUT = CacheLayout((_SWA, _SWA, _SWA, _FULL) * 13, Encoding.F16LE, 131_072)
HEADER = Header.of(replace(IDENTITY, layout=LAYOUT), 1)
ROW = 64
FULL_TOKEN = 13 * ROW
ALL_TOKEN = 52 * ROW
WINDOW_BYTES = 39 * ROW * WINDOW


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
            data = _NOISE[len(name) : spec.data_bytes(LAYOUT)]
            chunks.append(seal_tile(self.context, Tile(spec, name + data)))
        return chunks


_NOISE = os.urandom(1 << 20)


@pytest.fixture
def disk(tmp_path: Path) -> CountingDisk:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    made = CountingDisk(folder)
    initialise(made, "store")
    return made


def publish(
    store: LocalStore, session: Session, position: int, lineage: bytes, kind: HoldKind, now: int
) -> Manifest:
    """Grow in calls of 512 tokens, as prefill does, and cut at ``position``."""
    room = (position - session.position) * (ALL_TOKEN + 64) + WINDOW_BYTES
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


def test_one_long_session_with_a_cut_every_2048_tokens(disk: CountingDisk) -> None:
    length = 65_536
    store = LocalStore(disk, "store")
    cadence = cut_cadence_tokens(LAYOUT)
    assert cadence == 2048
    session = Noise(ids(length, 1), header=HEADER)
    for position in range(cadence, length + 1, cadence):
        kind = HoldKind.TURN if position == length else HoldKind.CADENCE
        publish(store, session, position, b"l" * 16, kind, NOW + position)
    assert disk.written_bytes <= 1.05 * ALL_TOKEN * length
    now = NOW + 100_000
    apply_gc(
        store, plan_gc(store, now, GcPolicy(Budget(1 << 40, 0))), now, b"c" * 16, lambda: None
    )  # fmt: skip
    retained = sorted(cut.position for cut in list_cuts(store, KEYRING))
    assert retained == [2048, 4096, 8192, 16384, 32768, 65536]
    kept = measure(store, [], now).used_bytes
    bound = FULL_TOKEN * length + WINDOW_BYTES * len(retained)
    assert kept <= 1.01 * bound, kept / bound
    # The bound is tight from below, or it would not say that anything is kept at all.
    assert kept >= FULL_TOKEN * length + WINDOW_BYTES * (len(retained) - 1)


def test_forty_sessions_keep_one_prefix(disk: CountingDisk) -> None:
    prefix, suffix = 16_384, 512
    store = LocalStore(disk, "store")
    shared = ids(prefix, 1)
    first = Noise(shared, header=HEADER)
    cut = publish(store, first, prefix, b"p" * 16, HoldKind.TURN, NOW)
    once = measure(store, [], NOW).used_bytes
    for number in range(40):
        own = (*shared, *ids(suffix, 1000 + number))
        session = Noise.restored(own, cut, HEADER)
        session.salt = bytes([number, 1])
        publish(store, session, prefix + suffix, bytes([number]) * 16, HoldKind.TURN, NOW)
    kept = measure(store, [], NOW).used_bytes
    prefix_bytes = FULL_TOKEN * prefix + 39 * ROW * prefix
    bound = prefix_bytes + 40 * suffix * ALL_TOKEN
    assert once <= 1.01 * prefix_bytes
    assert kept <= 1.01 * bound, kept / bound
    now = NOW + 10
    apply_gc(
        store, plan_gc(store, now, GcPolicy(Budget(1 << 40, 0))), now, b"c" * 16, lambda: None
    )  # fmt: skip
    # Only the last window of the prefix is still needed by anybody.
    kept = measure(store, [], now).used_bytes
    bound = FULL_TOKEN * prefix + WINDOW_BYTES + 40 * suffix * ALL_TOKEN
    assert kept <= 1.01 * bound, kept / bound
    assert len(list(list_cuts(store))) == 41
    findings = [f for f in check_store(store, KEYRING) if f.severity is Severity.DAMAGE]
    assert findings == []
