"""Rows that a model computed: the other payload, beside random ones.

``examples/models/muse-novels-6m`` reads ``examples/prompt.txt``, by this engine. The reference
geometry's rows are twice as wide as that model's, so one is made of two: of all rows of a kind of
layer, one layer after another, those of the second half stand beside those of the first, and none
is there twice. ``kvnode bench move --rows`` takes the file::

    python -m bench.real rows.npz
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.child import bench_json
from kvpack.layout import CacheLayout, LayerKind
from kvpack.snapshot import SessionCacheSnapshot, Tile, cut_tile_specs
from node.bench.rows import SampleRows

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODEL = _EXAMPLES / "models" / "muse-novels-6m"
TEXT = _EXAMPLES / "prompt.txt"
TITLE = "rows of muse-novels-6m"
_LIMIT_S = 90.0

#: The fewest whose rows fill a chunk, whatever layers it has, without one being there twice; with
#: halves a prefill takes MLX's CPU backend some ten seconds.
_TOKENS = 1_280

_Halves = npt.NDArray[np.uint16]


def real_rows(folder: Path) -> Path:
    """The file, made once a run by a process of its own, which is gone with its memory.

    Raises:
        NoFigureError: There is no MLX here, or it failed.
    """
    path = folder.parent / "rows.npz"
    if not path.exists():
        bench_json("bench.real", str(path), limit_s=_LIMIT_S)
    return path


def tiles_of(layout: CacheLayout, position: int, rows: Path) -> tuple[Tile, ...]:
    """A cut after ``position`` tokens whose rows are the file's, repeated."""
    source, found = SampleRows(layout, rows), []
    for spec in cut_tile_specs(layout, position):
        data, at = np.empty(spec.data_bytes(layout), np.uint8), 0
        for layer in spec.layers:
            for role, size in enumerate(
                (layout.key_row_bytes(layer), layout.value_row_bytes(layer))
            ):
                part = data[at : at + spec.token_count * size]
                source.fill(layer, role, spec.first_position, part.reshape(-1, size))
                at += len(part)
        data.flags.writeable = False
        found.append(Tile(spec, data.data))
    return tuple(found)


def computed() -> dict[str, _Halves]:
    """Arrays ``full`` and ``swa``, ``[2, count, 256]``: keys, then values."""
    import engine

    model = engine.load_model(MODEL)
    ids = model.encode(TEXT.read_text("utf-8"))[:_TOKENS]
    generation, snapshots = model.new_generation(), []
    for size in engine.prefill_calls(0, len(ids)):
        generation.prefill(ids[generation.position : generation.position + size])
        snapshots.append(generation.snapshot(ids[: generation.position]))
    return {
        "full": _paired(model.layout, LayerKind.FULL, snapshots[-1:]),
        "swa": _paired(model.layout, LayerKind.SWA, snapshots),
    }


def _paired(layout: CacheLayout, kind: LayerKind, snapshots: list[SessionCacheSnapshot]) -> _Halves:
    """``[2, rows, elements]``."""
    by_layer = [_rows(layout, layer, one) for layer in layout.layers_of(kind) for one in snapshots]
    rows = np.concatenate(by_layer, axis=1)
    half = rows.shape[1] // 2
    return np.concatenate([rows[:, :half], rows[:, half : 2 * half]], axis=2)


def _rows(layout: CacheLayout, layer: int, snapshot: SessionCacheSnapshot) -> _Halves:
    """``[2, rows, elements]`` of one layer, the oldest first."""
    parts = [
        np.stack(
            [
                np.frombuffer(rows, np.uint16).reshape(tile.spec.token_count, -1)
                for rows in (keys, values)
            ]
        )
        for tile in snapshot.tiles
        for index, keys, values in tile.planes(layout)
        if index == layer
    ]
    return np.concatenate(parts, axis=1)


if __name__ == "__main__":
    arrays = computed()
    np.savez(sys.argv[1], **arrays)
    print(json.dumps({name: list(array.shape) for name, array in arrays.items()}))
