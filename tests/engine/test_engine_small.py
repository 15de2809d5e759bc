"""Tiny models, the prefill grid and logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from blake3 import blake3
from engine_support import ModelCase, greedy, tokens, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

import engine
from engine import Logits, Model, prefill_calls, tiny_model_files
from kvpack.errors import LayoutMismatchError, LimitError
from kvpack.layout import Encoding

Load = Callable[[ModelCase], Model]
WEIGHTS_DIGEST = "cf862a25d9b6534d21036a83b1c0cb1930bb76b52b0da46b5a8ea41c327d5027"
FILES = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}


@pytest.mark.parametrize("arch", engine.ARCHITECTURES)
def test_equal_arguments_give_equal_folders(arch: str) -> None:
    make = {"seed": 5, "window": 8, "layers": 4}
    files = tiny_model_files(arch, **make)
    assert set(files) == FILES
    assert files == tiny_model_files(arch, **make)
    other = tiny_model_files(arch, **{**make, "seed": 6})
    assert {name for name in FILES if files[name] != other[name]} == {"model.safetensors"}


def test_weights_are_pinned() -> None:
    """A folder made today and one made by another version of numpy hold the same weights."""
    weights = tiny_model_files("muse_glimmer", seed=0, window=64, layers=8)["model.safetensors"]
    assert len(weights) == 2_804_336
    assert blake3(weights).hexdigest() == WEIGHTS_DIGEST


@pytest.mark.parametrize("arch", engine.ARCHITECTURES)
def test_mlx_lm_loads_and_runs_the_folder(arch: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / arch, ModelCase(arch))
    network, tokenizer = mlx_lm.load(str(folder))
    logits = network(mx.array([tokenizer.encode("The sea was calm.")]))
    assert logits.shape == (1, 17, 320)
    assert bool(mx.isfinite(logits).all())
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|role|>user\nhi<|turn_end|>\n<|role|>assistant\n"


@pytest.mark.parametrize("arch", engine.ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_files_are_in_the_dtype_asked_for(arch: str, dtype: str) -> None:
    files = tiny_model_files(arch, seed=1, window=8, layers=4, dtype=dtype)
    weights = files["model.safetensors"]
    header = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
    header.pop("__metadata__")
    kinds = {entry["dtype"] for name, entry in header.items() if "expert_bias" not in name}
    assert kinds == {{"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[dtype]}
    ends = [entry["data_offsets"] for entry in header.values()]
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    assert json.loads(files["config.json"])["torch_dtype"] == dtype


@pytest.mark.parametrize(
    "change",
    [{"arch": "llama4"}, {"layers": 3}, {"window": 0}, {"dtype": "int8"}],
)
def test_impossible_models_are_refused(change: dict[str, object]) -> None:
    arguments = {"arch": "muse_glimmer", "seed": 1, "window": 8, "layers": 4, **change}
    with pytest.raises(ValueError, match="must be"):
        tiny_model_files(arguments.pop("arch"), **arguments)


@pytest.mark.parametrize("arch", engine.ARCHITECTURES)
def test_logits_are_not_degenerate(arch: str, load: Load) -> None:
    """A model that always says the same would make every comparison pass."""
    model = load(ModelCase(arch, window=64, layers=8))
    generation = model.new_generation()
    generation.prefill(tokens(100))
    logits = generation.step(66)
    assert 1.5 < logits.values().std() < 6
    said = [step.argmax() for step in greedy(generation, logits.argmax(), 64)]
    assert len(set(said)) > 16
    for order in (tokens(100)[::-1], [tokens(100)[1], tokens(100)[0], *tokens(100)[2:]]):
        other = model.new_generation()
        other.prefill(order)
        # Same last tokens, old ones moved: position and far history matter.
        assert other.step(66).data != logits.data


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(0, 2000), st.integers(1, 700))
def test_prefill_edges_lie_on_the_absolute_grid(start: int, more: int, call: int) -> None:
    calls = prefill_calls(start, start + more, call)
    edges = [start + sum(calls[:i]) for i in range(len(calls) + 1)]
    assert edges[-1] == start + more
    assert all(edge % call == 0 for edge in edges[1:-1])
    assert all(0 < size <= call for size in calls)
    # A run that continues at an inner edge makes the same calls from there on.
    for index, edge in enumerate(edges[1:-1], start=1):
        assert prefill_calls(edge, start + more, call) == calls[index:]


def test_prefill_calls_by_hand() -> None:
    assert prefill_calls(0, 2047) == [512, 512, 512, 511]
    assert prefill_calls(500, 1030) == [12, 512, 6]
    assert prefill_calls(7, 7) == []
    for bad in ((5, 4), (-1, 4), (0, 1 << 25)):
        with pytest.raises(LimitError):
            prefill_calls(*bad)
    with pytest.raises(LimitError):
        prefill_calls(0, 4, 0)


@pytest.mark.parametrize("encoding", list(Encoding))
def test_logits_values_and_argmax(encoding: Encoding) -> None:
    values = [0.5, -3.0, 7.25, 7.25, 1.0]
    kinds = {Encoding.F16LE: mx.float16, Encoding.BF16LE: mx.bfloat16, Encoding.F32LE: mx.float32}
    array = mx.array(values).astype(kinds[encoding])
    word = mx.uint32 if encoding is Encoding.F32LE else mx.uint16
    logits = Logits(encoding, np.array(array.view(word)).tobytes())
    assert logits.values().tolist() == values
    assert logits.argmax() == 2
    assert logits.digest() != Logits(encoding, logits.data[::-1]).digest()
    assert len(logits.digest()) == 32
    assert "7.25" not in repr(logits)


def test_logits_digests_tell_encodings_apart() -> None:
    data = bytes(8)
    digests = {Logits(encoding, data).digest() for encoding in Encoding}
    assert len(digests) == 3


@pytest.mark.parametrize("data", [b"", b"123"])
def test_logits_of_a_wrong_size_are_refused(data: bytes) -> None:
    with pytest.raises(LayoutMismatchError):
        Logits(Encoding.F16LE, data)
