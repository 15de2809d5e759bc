"""The engine against the oracle, from one model folder: the same logits to a bound per dtype.

The measure is the root mean square of the difference over all logits of a position, in standard
deviations of the oracle's logits. Found on x86-64, at worst: float16 0.012, bfloat16 0.094, float32
2e-6. A window that is off by one shows as 0.33 or more where half precision is used, 0.09 for
float32, so each bound tells the two apart.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest

import engine
from engine.oracle import (
    OracleModel,
    build_oracle,
    decode_safetensors,
    require_installable,
    restore_session,
    take_snapshot,
)
from kvpack.errors import LayoutMismatchError
from kvpack.layout import Encoding, Producer

BOUNDS = {Encoding.F16LE: 0.03, Encoding.BF16LE: 0.2, Encoding.F32LE: 1e-5}
CASES = [
    ("muse_glimmer", "float16"),
    ("muse_glimmer", "bfloat16"),
    ("cohere2", "float16"),
    ("cohere2", "bfloat16"),
    ("exaone4", "float16"),
    ("exaone4", "bfloat16"),
    ("afmoe", "float32"),
]
IDS = [(i * i * 31 + i * 17 + 5) % 251 for i in range(200)]


@functools.cache
def files_of(architecture: str, dtype: str, window: int) -> dict[str, bytes]:
    return engine.tiny_model_files(architecture, seed=3, window=window, layers=4, dtype=dtype)


#: One more window for one of each precision; for all the others behind the slow mark.
WIDER = (CASES[0], CASES[3], CASES[-1])
PAIRS = [
    *((*case, 8) for case in CASES),
    *(pytest.param((*case, 16), marks=() if case in WIDER else pytest.mark.slow) for case in CASES),
]


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[engine.Model, OracleModel, dict[str, bytes], int]:
    """The engine's model and the oracle of one folder, its files, and its window."""
    architecture, dtype, window = request.param
    files, folder = files_of(architecture, dtype, window), tmp_path_factory.mktemp("model")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return engine.load_model(folder), oracle_of(files), files, window


def oracle_of(files: dict[str, bytes], **changes: int) -> OracleModel:
    config = {**json.loads(files["config.json"]), **changes}
    return build_oracle(config, decode_safetensors(files["model.safetensors"]))


def lengths(window: int) -> list[int]:
    around = [window - 2, window - 1, window, window + 1, window + 2]
    return [1, *around, 2 * window - 1, 2 * window, 2 * window + 1, 5 * window + 3]


def distance(model: engine.Model, oracle: OracleModel, length: int) -> float:
    """Of the logits after ``length`` tokens: all but the last in one call, then a single step."""
    generation, session = model.new_generation(), oracle.new_session()
    if length > 1:
        generation.prefill(IDS[: length - 1])
        session.prefill(IDS[: length - 1])
    found = generation.step(IDS[length - 1]).values()
    expected = session.append([IDS[length - 1]])[0]
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


def test_logits_agree_at_every_length(
    pair: tuple[engine.Model, OracleModel, dict[str, bytes], int],
) -> None:
    model, oracle, _, window = pair
    for length in lengths(window):
        assert distance(model, oracle, length) < BOUNDS[model.layout.encoding], f"{length} tokens"


def test_a_window_that_is_off_by_one_is_outside_the_bound(
    pair: tuple[engine.Model, OracleModel, dict[str, bytes], int],
) -> None:
    model, _, files, window = pair
    for wrong in (window - 1, window + 1):
        oracle = oracle_of(files, sliding_window=wrong)
        worst = max(distance(model, oracle, length) for length in (2 * window, 5 * window + 3))
        assert worst > BOUNDS[model.layout.encoding]


def test_layouts_are_equal_but_for_the_encoding(
    pair: tuple[engine.Model, OracleModel, dict[str, bytes], int],
) -> None:
    model, oracle, _, _ = pair
    assert dataclasses.replace(model.layout, encoding=Encoding.F32LE) == oracle.layout()


def test_engine_and_oracle_refuse_each_other(
    pair: tuple[engine.Model, OracleModel, dict[str, bytes], int],
) -> None:
    """By encoding where the engine has half precision, by producer where it has not."""
    model, oracle, _, window = pair
    count = 2 * window + 1
    generation, session = model.new_generation(), oracle.new_session()
    generation.prefill(IDS[:count])
    session.prefill(IDS[:count])
    field = "producer" if model.layout.encoding is Encoding.F32LE else "encoding"
    with pytest.raises(LayoutMismatchError) as by_oracle:
        restore_session(oracle, generation.snapshot(IDS[:count]))
    with pytest.raises(LayoutMismatchError) as by_engine:
        require_installable(model.layout, Producer.ENGINE, take_snapshot(session))
    assert (by_oracle.value.field, by_engine.value.field) == (field, field)
