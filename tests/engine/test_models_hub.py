"""A model by its repository id: looked up in the local Hugging Face cache, never asked for."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_support import ModelCase, import_path
from huggingface_hub import constants

import engine
from engine import ModelFolderError, mlxlm
from engine.hub_cache import find_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
ID = "kvpack-tests/tiny-olmo3"
CACHE = "local Hugging Face cache"


@pytest.fixture
def cache(
    tmp_path: Path, model_folder: Callable[[ModelCase], Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A cache as the hub's own library lays it out: files are links into ``blobs``."""
    hub = tmp_path / "hub"
    repository = hub / "models--kvpack-tests--tiny-olmo3"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in model_folder(ModelCase("olmo3")).iterdir():
        blob = repository / "blobs" / f"blob-of-{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (repository / "refs" / "pr").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "refs" / "pr" / "1").write_text(COMMIT + "\n")
    (repository / "refs" / "gone").write_text(OTHER)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.chdir(tmp_path)
    return hub


def refuse(*_: object) -> None:
    raise AssertionError("nothing may be asked elsewhere")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("cache", "no_network")
@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}", "@pr/1"])
def test_an_id_is_the_folder_in_the_cache(
    revision: str, load: Callable[[ModelCase], engine.Model]
) -> None:
    model = engine.load_model(f"{ID}{revision}")
    assert model.name == ID
    # Neither path nor name is identity: the same files are the same model.
    assert model.identity("acme") == load(ModelCase("olmo3")).identity("acme")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("kvpack-tests/absent", f"not in the {CACHE}: no {{hub}}/models--kvpack-tests--absent "),
        (f"{ID}@dev", f"revision dev is not in the {CACHE}: no {{hub}}/models--"),
        (f"{ID}@gone", f"the {CACHE} has no {{hub}}/models--kvpack-tests--tiny-olmo3/snapshots/f"),
        (f"{ID}@{OTHER}", f"the {CACHE} has no {{hub}}/models--kvpack-tests--tiny-olmo3/snapsh"),
        ("one-word", "one-word: not a folder"),
        ("../hub/models--kvpack-tests--tiny-olmo3", "not a folder"),
        ("a/b/c", "a/b/c: not a folder"),
        ("-a/b", "-a/b: not a folder"),
        (f"{ID}@../../../etc", "not a folder"),
        ("/no/where", "/no/where: not a folder"),
    ],
)
def test_what_is_not_there_is_one_line_that_says_where_it_was_looked_for(
    model: str, message: str, cache: Path
) -> None:
    with pytest.raises(ModelFolderError) as caught:
        engine.load_model(model)
    text = str(caught.value)
    assert message.format(hub=cache) in text and model in text and "\n" not in text


def test_a_ref_cannot_lead_out_of_the_cache(cache: Path) -> None:
    reference = cache / "models--kvpack-tests--tiny-olmo3" / "refs" / "main"
    for content in ("../../../elsewhere", "", COMMIT[:-1], "é" * 40):
        reference.write_text(content, "utf-8")
        with pytest.raises(ModelFolderError, match=r"expected a commit|is not in the local"):
            find_model(Path(ID), cache)


def test_a_download_that_was_broken_off_is_named(cache: Path) -> None:
    snapshot = cache / "models--kvpack-tests--tiny-olmo3" / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"weights .* are missing"):
        engine.load_model(ID)
    (snapshot / "model.safetensors").symlink_to("../../blobs/never-came")
    with pytest.raises(ModelFolderError, match=r"model.safetensors: cannot be read"):
        engine.load_model(ID)


def test_a_folder_wins_over_an_id(cache: Path, model_folder: Callable[[ModelCase], Path]) -> None:
    local = Path(ID)
    shutil.copytree(model_folder(ModelCase("llama")), local)
    assert find_model(local, cache).folder == local
    assert engine.load_model(ID).name == "tiny-olmo3"


@pytest.mark.usefixtures("cache")
def test_the_hub_library_is_offline_while_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a tokenizer ever want to look something up, it is refused before a socket is made."""
    seen: list[bool] = []
    load_files, load_network = mlxlm._load_tokenizer_files, mlxlm.load_network

    def tokenizer(*arguments: Any) -> Any:
        seen.append(constants.is_offline_mode())
        return load_files(*arguments)

    def network(*arguments: Any, **options: Any) -> Any:
        seen.append(constants.is_offline_mode())
        return load_network(*arguments, **options)

    monkeypatch.setattr(mlxlm, "_load_tokenizer_files", tokenizer)
    monkeypatch.setattr(mlxlm, "load_network", network)
    before = constants.is_offline_mode()
    engine.load_model(ID)
    assert seen == [True, True] and constants.is_offline_mode() is before is False


def test_the_environment_says_where_the_cache_is(cache: Path) -> None:
    """As for every other tool that uses the cache: ``HF_HUB_CACHE``, ``HF_HOME`` and so on."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "PYTHONPATH": import_path(root)}
    script = f"import engine; print(engine.load_model({ID!r}).name)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, ID), done.stderr
