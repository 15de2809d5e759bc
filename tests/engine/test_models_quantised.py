"""Packed weights, as most published folders have them: loaded, told apart, and replayed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from engine_support import HEAD, ModelCase, greedy, reinstall, run_calls, tokens, write_model
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_network

import engine
from engine import ModelFolderError
from kvpack.errors import IdentityMismatchError
from kvpack.identity import require_same_identity
from kvpack.layout import Encoding

RULE = {"group_size": 32, "bits": 4}
W = 8


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model whose projections and embedding are packed to four bits."""
    folders: dict[str, Path] = {}

    def folder_of(arch: str) -> Path:
        if arch not in folders:
            folder = write_model(tmp_path_factory.mktemp("packed") / arch, ModelCase(arch))
            # As mlx-lm has it: the engine's own keeps sums in place of some weights.
            network, _ = load_network(folder)
            nn.quantize(network, **RULE)
            weights = dict(tree_flatten(network.parameters()))
            mx.save_safetensors(str(folder / "model.safetensors"), weights)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "quantization": RULE}))
            folders[arch] = folder
        return folders[arch]

    return folder_of


@pytest.mark.parametrize("arch", ["llama", "gemma3", "olmo3", "muse_glimmer", "gpt_oss"])
def test_packed_weights_load_and_replay(
    arch: str, packed: Callable[[str], Path], load: Callable[[ModelCase], engine.Model]
) -> None:
    model = engine.load_model(packed(arch))
    assert model.identity("acme").quantisation == "affine bits=4 group=32"
    assert model.layout == load(ModelCase(arch, None, HEAD)).layout
    generation = model.new_generation()
    run_calls(generation, tokens(3 * W + 5), [W + 3, 2 * W + 2])
    moved = reinstall(model, generation)
    left, right = (greedy(session, 65, 2 * W) for session in (generation, moved))
    assert [logits.data for logits in left] == [logits.data for logits in right]
    assert all(np.isfinite(logits.values()).all() for logits in left)


def test_packed_and_plain_weights_refuse_each_other(
    packed: Callable[[str], Path], load: Callable[[ModelCase], engine.Model]
) -> None:
    ours = load(ModelCase("llama")).identity("acme")
    with pytest.raises(IdentityMismatchError, match="weights_digest"):
        require_same_identity(ours, engine.load_model(packed("llama")).identity("acme"))


def test_packed_weights_under_a_config_that_does_not_say_so(
    packed: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for file in packed("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["quantization"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=r"dtype: expected F32 or F16 or BF16, found U32"):
        engine.load_model(folder)


def test_a_dtype_may_be_asked_for(packed: Callable[[str], Path]) -> None:
    """Scales and norms follow; the packed words themselves have no float to cast."""
    model = engine.load_model(packed("llama"), dtype="bfloat16")
    assert model.layout.encoding is Encoding.BF16LE
    assert np.isfinite(model.new_generation().step(1).values()).all()
