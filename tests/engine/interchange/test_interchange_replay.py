"""The promise: a cache of mlx-lm that went through a pack continues in mlx-lm bit for bit.

A fresh process with nothing but mlx-lm loads what came back; the twin never left its session and
makes the same calls. And: our engine continues the same pack, close, and calls it compatible.
"""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine_support import ModelCase, import_path
from interchange_support import KEYRING, from_pack, to_pack
from mlx_lm_sessions import (
    FEWER,
    HISTORIES,
    MAIN,
    RAW_STEPS,
    STEPS_AFTER_CHUNK,
    MlxLmSession,
    W,
    network_of,
    saved_bytes,
    tokens,
)

import engine
from engine.interchange import MlxLmModel
from kvpack.bundle import BundleReader, read_snapshot
from kvpack.errors import LayoutMismatchError
from kvpack.identity import CallRun, CallSchedule
from kvpack.interchange import Continuation, continuation_of
from kvpack.layout import LayerKind, Producer
from kvpack.manifest import ForeignRingHead
from kvpack.snapshot import SessionCacheSnapshot, cut_tile_specs

STEPS = RAW_STEPS + 1 + STEPS_AFTER_CHUNK
CASES = [
    ModelCase(arch, dtype, window=W)
    for arch in ("muse_glimmer", "cohere2")
    for dtype in ("float16", "bfloat16")
]
GLIMMER = CASES[0]
#: Float32 rows, two windows' worth of other code: the format is not only that of the reference.
OTHERS = [ModelCase("afmoe", window=W), ModelCase("gemma3", "bfloat16", window=W)]

#: Every state that a ring of mlx-lm can be in between two calls.
RING_STATES = {
    ("filling", "tight", "head at 0"),
    ("filling", "spare rows", "head at 0"),
    ("wide", "tight", "head at 0"),
    ("ring", "tight", "head at 0"),
    ("ring", "tight", "head elsewhere"),
}

#: Rounding of f16 rows in another order gives up to 0.03; a wrong row gives 10.
DRIFT_MAX = 0.1

Load = Callable[[ModelCase], engine.Model]
Folder = Callable[[ModelCase], Path]


def sessions(network: Any, names: list[str]) -> dict[str, MlxLmSession]:
    made = {}
    for name in names:
        made[name] = MlxLmSession(network)
        made[name].feed(tokens(sum(HISTORIES[name])), HISTORIES[name])
    return made


def file_name(name: str) -> str:
    return f"history-{list(HISTORIES).index(name)}"


def in_fresh_process(model_folder: Path, caches: Path) -> None:
    here = Path(__file__).parent
    environment = dict(os.environ, PYTHONPATH=import_path(here))
    command = [sys.executable, str(here / "interchange_child.py"), str(model_folder), str(caches)]
    subprocess.run(command, check=True, env=environment, timeout=200, cwd=caches)


ROUND_TRIPS = {
    GLIMMER: MAIN,
    CASES[-1]: FEWER,
    **dict.fromkeys(OTHERS, FEWER[2:]),
}
#: What these show, the others show already.
AGAIN = [(GLIMMER, list(HISTORIES)), *((case, FEWER) for case in CASES[1:3])]


@pytest.mark.parametrize(
    ("case", "names"),
    [
        *ROUND_TRIPS.items(),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in AGAIN),
    ],
    ids=lambda value: value.label if isinstance(value, ModelCase) else f"{len(value)} histories",
)
def test_the_round_trip_replays_in_mlx_lm(
    case: ModelCase, names: list[str], load: Load, model_folder: Folder, tmp_path: Path
) -> None:
    model, network = MlxLmModel(load(case)), network_of(model_folder(case))
    live = sessions(network, names)
    for name, session in live.items():
        pack = to_pack(model, saved_bytes(session), tokens(sum(HISTORIES[name])))
        (tmp_path / f"{file_name(name)}.safetensors").write_bytes(from_pack(model, pack))
    if case == GLIMMER:
        assert {ring_state(session.cache[0]) for session in live.values()} == RING_STATES
    in_fresh_process(model_folder(case), tmp_path)
    twins = {name: session.continuation() for name, session in live.items()}
    for name, twin in twins.items():
        assert (tmp_path / f"{file_name(name)}.logits").read_bytes() == twin, name
        layout = load(case).layout
        assert len(twin) == STEPS * load(case).vocab_size * layout.encoding.element_bytes
    # The stream must be able to show a fault: another position, another answer.
    assert len(set(twins.values())) >= len({sum(HISTORIES[name]) for name in names})


def ring_state(ring: Any) -> tuple[str, ...]:
    """What there is to know about a rotating cache of mlx-lm, apart from its rows."""
    rows, words = ring.keys.shape[2], []
    words.append("filling" if ring.offset < W else "wide" if rows > W else "ring")
    words.append("spare rows" if rows > ring.offset else "tight")
    words.append("head at 0" if ring._idx % W == 0 or words[0] != "ring" else "head elsewhere")
    return tuple(words)


def test_heads_travel_and_a_wrong_one_would_show(load: Load, model_folder: Folder) -> None:
    network, name = network_of(model_folder(GLIMMER)), "ring, after decodes"
    model, session = MlxLmModel(load(GLIMMER)), sessions(network, [name])[name]
    pack = to_pack(model, saved_bytes(session), tokens(190))
    reader = BundleReader(io.BytesIO(pack), KEYRING)
    manifest, layout = reader.index.manifest, load(GLIMMER).layout
    assert manifest.producer is Producer.MLX_LM
    assert manifest.schedule == CallSchedule()
    # 150 tokens by one call leave the head at 0; 40 steps later it has moved 40 rows.
    swa = layout.layers_of(LayerKind.SWA)
    assert manifest.foreign_ring_heads == tuple(ForeignRingHead(layer, 40) for layer in swa)
    snapshot, twin = read_snapshot(reader), session.continuation()
    for shift in (0, 1, -40):
        heads = [ForeignRingHead(layer, 40 + shift) for layer in swa]
        moved = reload(network, b"".join(model.write(snapshot, heads, "here")))
        assert (moved.continuation() == twin) == (shift == 0), shift


def reload(network: Any, data: bytes) -> MlxLmSession:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "back.safetensors"
        path.write_bytes(data)
        session = MlxLmSession.loaded(network, path)
        # mlx-lm reads lazily: everything must be there before the file goes.
        mx.eval([part for cache in session.cache for part in cache.state[:2]])
    return session


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in MAIN else pytest.mark.slow) for n in HISTORIES],
)
def test_the_rows_are_those_of_the_file_whatever_its_buffers(
    name: str, load: Load, model_folder: Folder
) -> None:
    """Import, export, import: the same content ids and heads, and tight buffers in between."""
    network, count = network_of(model_folder(GLIMMER)), sum(HISTORIES[name])
    model, session = MlxLmModel(load(GLIMMER)), sessions(network, [name])[name]
    first = to_pack(model, saved_bytes(session), tokens(count))
    exported = from_pack(model, first)
    again = to_pack(model, exported, tokens(count))
    assert again == first
    held = sum(load(GLIMMER).layout.state_bytes(kind, count) for kind in LayerKind)
    assert held < len(exported) < held + 8192


def test_rows_that_were_taken_back_do_not_travel(load: Load, model_folder: Folder) -> None:
    """mlx-lm keeps the rows of trimmed tokens in its file; a pack holds none of them."""
    network = network_of(model_folder(GLIMMER))
    model = MlxLmModel(load(GLIMMER))
    plain, trimmed = MlxLmSession(network), MlxLmSession(network)
    plain.feed(tokens(30), [30])
    trimmed.feed([*tokens(30), *tokens(20, salt=8)], [30, 20])
    for cache in trimmed.cache:
        cache.trim(20)
    files = [saved_bytes(session) for session in (plain, trimmed)]
    secret = load(GLIMMER).layout.row_bytes(0) // 4
    row = np.array(trimmed.cache[0].keys[0, 0, 40].view(mx.uint16)).tobytes()
    assert len(row) == secret and row in files[1]
    packs = [to_pack(model, data, tokens(30)) for data in files]
    assert packs[0] == packs[1]
    assert row not in from_pack(model, packs[1])


def engine_session(model: engine.Model, position: int) -> engine.Generation:
    ids, generation = tokens(position), model.new_generation()
    for size in engine.prefill_calls(0, position - 1, 24):
        generation.prefill(ids[generation.position : generation.position + size])
    generation.step(ids[-1])
    return generation


def drift(left: bytes, right: bytes, dtype: str = "<f2") -> float:
    a, b = (np.frombuffer(data, dtype).astype(np.float64) for data in (left, right))
    assert a.shape == b.shape and np.isfinite(a).all() and np.isfinite(b).all()
    return float(np.abs(a - b).max())


def engine_steps(generation: engine.Generation) -> bytes:
    return b"".join(generation.step(token).data for token in tokens(RAW_STEPS, salt=3))


@pytest.mark.parametrize("position", [30, W - 1, W, W + 1, 5 * W + 3])
def test_a_pack_of_our_engine_continues_in_mlx_lm(
    position: int, load: Load, model_folder: Folder
) -> None:
    """Its rings begin where the position says: in mlx-lm, too."""
    model, network = load(GLIMMER), network_of(model_folder(GLIMMER))
    generation = engine_session(model, position)
    data = b"".join(MlxLmModel(model).write(generation.snapshot(tokens(position)), (), "here"))
    session = reload(network, data)
    assert [cache.offset for cache in session.cache] == [position] * 4
    heads = [cache._idx for cache in session.cache if hasattr(cache, "_idx")]
    assert heads == [position if position < W else position % W or W] * 3
    theirs = b"".join(session.call([token]).tobytes() for token in tokens(RAW_STEPS, salt=3))
    assert drift(engine_steps(generation), theirs) < DRIFT_MAX


@pytest.mark.parametrize("name", FEWER)
def test_our_engine_continues_an_imported_pack_as_compatible(
    name: str, load: Load, model_folder: Folder
) -> None:
    network, count = network_of(model_folder(GLIMMER)), sum(HISTORIES[name])
    model, session = load(GLIMMER), sessions(network, [name])[name]
    cache = MlxLmModel(model).read(saved_bytes(session), tokens(count))
    verdict = continuation_of(cache.producer, cache.numerics, model.numerics())
    assert verdict is Continuation.COMPATIBLE
    installer = model.installer(count)
    for spec in cut_tile_specs(model.layout, count):
        installer.scatter(cache.read_tile(spec))
    generation = installer.finish(CallSchedule((CallRun(count, 1),)))
    theirs = b"".join(session.call([token]).tobytes() for token in tokens(RAW_STEPS, salt=3))
    assert drift(engine_steps(generation), theirs) < DRIFT_MAX


def test_the_verdict_asks_producer_and_numerics(load: Load) -> None:
    ours = load(GLIMMER).numerics()
    other = dataclasses.replace(ours, values=(*ours.values, ("zz", "1")))
    assert continuation_of(Producer.ENGINE, ours, ours) is Continuation.EXACT
    assert continuation_of(Producer.ENGINE, other, ours) is Continuation.COMPATIBLE
    for producer in (Producer.MLX_LM, Producer.TRANSFORMERS):
        for numerics in (ours, other):
            assert continuation_of(producer, numerics, ours) is Continuation.COMPATIBLE
    with pytest.raises(LayoutMismatchError, match="producer: expected any but oracle"):
        continuation_of(Producer.ORACLE, ours, ours)


def test_what_mlx_lm_cannot_continue_is_not_exported(load: Load) -> None:
    model = load(GLIMMER)
    empty = SessionCacheSnapshot(model.layout, Producer.ENGINE, 0, (), ())
    with pytest.raises(LayoutMismatchError, match="position"):
        MlxLmModel(model).write(empty, (), "here")
    foreign = dataclasses.replace(
        engine_session(model, 5).snapshot(tokens(5)), producer=Producer.MLX_LM
    )
    with pytest.raises(LayoutMismatchError, match=r"layers\[0\]\.foreign_ring_head"):
        MlxLmModel(model).write(foreign, (), "here")
    other = load(dataclasses.replace(GLIMMER, window=W - 1))
    with pytest.raises(LayoutMismatchError, match="window_tokens"):
        MlxLmModel(other).write(engine_session(model, 5).snapshot(tokens(5)), (), "here")
    afmoe = load(OTHERS[0])
    rows = engine_session(afmoe, 5).snapshot(tokens(5))
    with pytest.raises(LayoutMismatchError, match="producer"):
        MlxLmModel(afmoe).write(dataclasses.replace(rows, producer=Producer.ORACLE), (), "here")
