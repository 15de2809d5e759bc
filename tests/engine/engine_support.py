"""What several engine tests need: cases, token streams, call plans, tiles through a file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import engine
from engine import Generation, Logits, Model, PlaneLayout
from kvpack.identity import CallRun, CallSchedule
from kvpack.layout import LayerKind
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec

HEAD, TOKEN = PlaneLayout.HEAD_MAJOR, PlaneLayout.TOKEN_MAJOR


@dataclass(frozen=True)
class ModelCase:
    """One tiny model and how its planes are laid out."""

    arch: str = "muse_glimmer"
    dtype: str | None = None
    layout: PlaneLayout = HEAD
    window: int = 8
    layers: int = 4
    seed: int = 7

    @property
    def label(self) -> str:
        return f"{self.arch}-{self.dtype or 'default'}-{self.layout.value}-w{self.window}"

    def without_layout(self) -> ModelCase:
        return dataclasses.replace(self, layout=HEAD)


def write_model(folder: Path, case: ModelCase) -> Path:
    folder.mkdir(parents=True)
    files = engine.tiny_model_files(
        case.arch, seed=case.seed, window=case.window, layers=case.layers, dtype=case.dtype
    )
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def import_path(*first: Path) -> str:
    """``PYTHONPATH`` of a child: these, then what was there before, for MLX may lie there."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, first), *([inherited] if inherited else [])])


def tokens(count: int, salt: int = 0) -> list[int]:
    """A fixed stream of byte tokens without a short period."""
    return [(i * i * 31 + i * 17 + salt * 101 + 5) % 251 for i in range(count)]


def run_calls(generation: Generation, token_ids: Sequence[int], calls: Iterable[int]) -> None:
    """Prefill ``token_ids`` in calls of these sizes, from the generation's position."""
    done = 0
    for size in calls:
        generation.prefill(token_ids[done : done + size])
        done += size
    assert done == len(token_ids)


def greedy(generation: Generation, first: int, steps: int) -> list[Logits]:
    """Logits of ``steps`` single-token calls: ``first``, then always the greedy token."""
    out: list[Logits] = []
    token = first
    for _ in range(steps):
        out.append(generation.step(token))
        token = out[-1].argmax()
    return out


def reinstall(model: Model, generation: Generation, order: int = 1) -> Generation:
    """A detached copy by way of tiles; ``order`` -1 scatters them backwards."""
    snapshot = generation.snapshot([0] * generation.position)
    installer = model.installer(generation.position)
    for tile in snapshot.tiles[::order]:
        installer.scatter(tile)
    return installer.finish(generation.schedule)


def save(path: Path, snapshot: SessionCacheSnapshot, schedule: CallSchedule) -> None:
    """A cut as one JSON line and raw tiles: the test's own format, on purpose not kvpack's."""
    head = {
        "position": snapshot.position,
        "schedule": [[run.call_tokens, run.calls] for run in schedule.runs],
        "tiles": [
            [t.spec.kind.value, t.spec.layers, t.spec.first_position, t.spec.token_count]
            for t in snapshot.tiles
        ],
    }
    with path.open("wb") as file:
        file.write(json.dumps(head).encode() + b"\n")
        for tile in snapshot.tiles:
            file.write(tile.data)


def restore(path: Path, model: Model) -> Generation:
    """The generation that :func:`save` wrote, installed into ``model``."""
    with path.open("rb") as file:
        head = json.loads(file.readline())
        installer = model.installer(head["position"])
        for kind, layers, first, count in head["tiles"]:
            spec = TileSpec(LayerKind(kind), tuple(layers), first, count)
            installer.scatter(Tile(spec, file.read(spec.data_bytes(model.layout))))
        assert not file.read(1)
    return installer.finish(CallSchedule(tuple(CallRun(*run) for run in head["schedule"])))
