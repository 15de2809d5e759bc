"""A folder described without MLX says, byte for byte, what the loaded model says of itself."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine import ModelFolderError, load_model, tiny_model_files
from engine.arguments import WRITTEN_DOWN, arguments_from
from engine.described import describe_folder
from node.shipped import find_shipped

#: Imports everything that a producer without MLX needs of the engine, with MLX out of reach.
_WITHOUT_MLX = """
import importlib.abc, sys
class Barred(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mlx", "mlx_lm"):
            raise ImportError(name)
sys.meta_path.insert(0, Barred())
from pathlib import Path
from engine import DecodingState, Logits, SamplerState, TextStream, prefill_calls
from engine.described import describe_folder
import engine.oracle
print(describe_folder(Path(sys.argv[1])).identity(None).weights_digest.hex())
"""


def folder_of(path: Path, arch: str, **changes) -> Path:
    """A tiny model of ``arch`` whose config has ``changes``; None takes a field out."""
    path.mkdir()
    files = tiny_model_files(arch, seed=3, window=24, layers=5, dtype="bfloat16")
    for name, data in files.items():
        (path / name).write_bytes(data)
    config = json.loads(files["config.json"])
    for name, value in changes.items():
        config[name] = value
        if value is None:
            del config[name]
    (path / "config.json").write_text(json.dumps(config))
    return path


def assert_same(folder: Path) -> None:
    model, described = load_model(folder), describe_folder(folder)
    template = (folder / "chat_template.jinja").read_text()
    assert described.layout == model.layout
    assert described.vocab_size == model.vocab_size
    assert described.name == model.name
    found = dataclasses.replace(described.identity(template), tenant="t")
    assert found == model.identity("t")


@pytest.mark.parametrize("arch", WRITTEN_DOWN)
def test_a_folder_says_what_its_model_says(tmp_path: Path, arch: str) -> None:
    assert_same(folder_of(tmp_path / "m", arch))


def test_the_trained_model_says_the_same() -> None:
    assert_same(find_shipped("models", "muse-novels-6m"))


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("muse_glimmer", {"rope_theta": None, "rope_parameters": {"rope_theta": 9e5}}),
        ("muse_glimmer", {"layer_types": None}),
        ("cohere2", {"sliding_window_pattern": None}),
    ],
)
def test_defaults_are_mlx_lms(tmp_path: Path, arch: str, changes) -> None:
    assert_same(folder_of(tmp_path / "m", arch, **changes))


@pytest.mark.parametrize("arch", WRITTEN_DOWN)
def test_every_argument_of_mlx_lm_is_written_down(arch: str) -> None:
    module = __import__(f"mlx_lm.models.{arch}", fromlist=["ModelArgs"])
    expected = module.ModelArgs.from_dict({"model_type": arch})
    assert arguments_from({"model_type": arch}) == dataclasses.asdict(expected)


def test_it_needs_no_mlx(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "cohere2")
    command = [sys.executable, "-c", _WITHOUT_MLX, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    expected = describe_folder(folder).identity(None).weights_digest.hex()
    assert done.stdout.strip() == expected


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "cohere2", quantization={"bits": 4, "group_size": 64})
    with pytest.raises(ModelFolderError, match="quantization: expected none"):
        describe_folder(folder)


def test_an_architecture_that_is_not_written_down_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "exaone4")
    with pytest.raises(ModelFolderError, match="expected cohere2 or muse_glimmer, found 'exaone4'"):
        describe_folder(folder)
