"""Cuts as files between two processes: the bare snapshot, and the pack of it.

The bare form is the prover's own, on purpose not the pack's: where only one of the two fails, the
other's code is not to blame. Both lie in a folder that nobody else can read and that is removed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from kvpack.bundle import BundleReader, Header, read_snapshot, write_snapshot
from kvpack.errors import FormatError
from kvpack.identity import CallRun, CallSchedule, require_same_identity
from kvpack.keys import Keyring, generate_key, load_key_file, write_key_file
from kvpack.layout import LayerKind, Producer
from kvpack.publish import publish_new
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec

if TYPE_CHECKING:
    from engine import Model

#: Names the throwaway key and the identity under which proving seals.
TENANT: Final = "prove"


@dataclass(frozen=True, slots=True, repr=False)
class Cut:
    """A snapshot and the calls that computed it."""

    snapshot: SessionCacheSnapshot
    schedule: CallSchedule


def write_cut(path: Path, cut: Cut) -> int:
    """Write the bare form, and return how many bytes.

    Raises:
        OSError: The disk refuses.
    """
    tiles = cut.snapshot.tiles
    head = {
        "token_ids": cut.snapshot.token_ids,
        "schedule": [[r.call_tokens, r.calls, r.dropped_tokens] for r in cut.schedule.runs],
        "tiles": [
            [t.spec.kind.value, t.spec.layers, t.spec.first_position, t.spec.token_count]
            for t in tiles
        ],
    }
    with path.open("xb") as file:
        file.write(json.dumps(head, separators=(",", ":")).encode() + b"\n")
        for tile in tiles:
            file.write(tile.data)
        return file.tell()


def read_cut(path: Path, model: Model) -> Cut:
    """Read what :func:`write_cut` wrote; the snapshot passes the gate of ``model``'s layout.

    Raises:
        OSError: It is not there.
        LayoutMismatchError: It is not a cut of this layout.
    """
    with path.open("rb") as file:
        head = json.loads(file.readline())
        tiles = tuple(_read_tile(file, model, spec) for spec in map(_spec, head["tiles"]))
    token_ids = tuple(head["token_ids"])
    snapshot = SessionCacheSnapshot(model.layout, Producer.ENGINE, len(token_ids), token_ids, tiles)
    return Cut(snapshot, CallSchedule(tuple(CallRun(*run) for run in head["schedule"])))


def _spec(value: Sequence[object]) -> TileSpec:
    match value:
        case [str(kind), list(layers), int(first), int(count)]:
            return TileSpec(LayerKind(kind), tuple(layers), first, count)
    raise FormatError("cut.tiles", "kind, layers, first, count", type(value).__name__)


def _read_tile(file: BinaryIO, model: Model, spec: TileSpec) -> Tile:
    return Tile(spec, file.read(spec.data_bytes(model.layout)))


def make_key(folder: Path) -> None:
    """A throwaway key for this run's packs.

    Raises:
        PublishError: It cannot be written.
    """
    write_key_file(_key_path(folder), generate_key(TENANT))


def write_pack(path: Path, folder: Path, model: Model, cut: Cut) -> int:
    """Seal the cut into a new pack, and return its bytes.

    Raises:
        PublishError: It cannot be written.
    """
    key = load_key_file(_key_path(folder))
    header = Header.of(model.identity(TENANT), key.epoch)
    with publish_new(path) as sink:
        write_snapshot(sink, key, header, cut.snapshot, model.numerics(), cut.schedule)
        return sink.written_bytes


def read_pack(path: Path, folder: Path, model: Model) -> Cut:
    """Open a pack: authentic, of this very model, every chunk checked.

    Raises:
        KvpackError: It is not; the message says what.
    """
    keyring = Keyring([load_key_file(_key_path(folder))])
    with BundleReader.open(path, keyring) as reader:
        require_same_identity(model.identity(TENANT), reader.header.identity)
        return Cut(read_snapshot(reader), reader.manifest.schedule)


def _key_path(folder: Path) -> Path:
    return folder / "prove.key"
