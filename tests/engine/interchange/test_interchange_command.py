"""kvpack import and kvpack export, as people run them on files of mlx-lm's own commands."""

from __future__ import annotations

import importlib.metadata
import json
import os
import struct
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_file_kit import POSITION, W, blank_file, encoded, set_metadata
from engine_support import ModelCase
from mlx_lm_sessions import MlxLmSession, network_of, saved_bytes, tokens

from kvpack.cli import main
from kvpack.interchange import GROUP

ROOT = Path(__file__).parents[3]
CASE = ModelCase("muse_glimmer", "float16", window=W)
PROMPT = "The ring has room for eight tokens, and this prompt has many more of them than that."


def entry_points() -> str:
    """The entry points as the package declares them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    offered = project["entry-points"][GROUP]
    return f"[{GROUP}]\n" + "".join(f"{name} = {value}\n" for name, value in offered.items())


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the package were installed: its metadata lies on the path."""
    folder = tmp_path_factory.mktemp("installed")
    metadata = folder / "kvpack-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpack\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(entry_points())
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def here(
    tmp_path: Path, model_folder: Callable[[ModelCase], Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with a model, a key, a cache and its ids, which is also the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model_folder(CASE))
    assert main(["keygen", "k.key"]) == 0
    Path("c.safetensors").write_bytes(encoded(blank_file()))
    Path("ids.json").write_text(json.dumps(tokens(POSITION)))
    return tmp_path


def run_import(*arguments: str, file: str = "c.safetensors", out: str = "p.kvpack") -> int:
    fixed = ["import", "--from", "mlx-lm", "--model", "model", "--key", "k.key", "--out", out]
    return main([*fixed, *arguments, file])


def run_export(pack: str = "p.kvpack", out: str = "back.safetensors", *arguments: str) -> int:
    fixed = ["export", "--to", "mlx-lm", "--model", "model", "--key", "k.key", "--out", out]
    return main([*fixed, *arguments, pack])


def test_there_and_back(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run_import("--tokens", "ids.json") == 0
    said = capsys.readouterr()
    assert said.out.startswith("p.kvpack: 21 tokens from mlx-lm, ")
    assert said.out.endswith(" bytes; state exact, continues as compatible\n")
    assert said.err == ""
    assert main(["verify", "--deep", "--key", "k.key", "p.kvpack"]) == 0
    capsys.readouterr()
    assert run_export("p.kvpack", "back.safetensors", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "back.safetensors",
        "position": POSITION,
        "producer": "mlx-lm",
        "state": "exact",
        "continuation": None,
        "file_bytes": Path("back.safetensors").stat().st_size,
    }
    assert run_import("--tokens", "ids.json", file="back.safetensors", out="again.kvpack") == 0
    assert Path("again.kvpack").read_bytes() == Path("p.kvpack").read_bytes()
    assert Path("p.kvpack").stat().st_mode & 0o777 == 0o600
    assert Path("back.safetensors").stat().st_mode & 0o777 == 0o600


def test_ids_may_be_four_bytes_each(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("ids.u32").write_bytes(struct.pack(f"<{POSITION}I", *tokens(POSITION)))
    assert (
        run_import(
            "--tokens",
            "ids.json",
            out="a.kvpack",
        )
        == 0
    )
    assert run_import("--tokens", "ids.u32", "--json", out="b.kvpack") == 0
    assert Path("a.kvpack").read_bytes() == Path("b.kvpack").read_bytes()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["continuation"] == "compatible"


def mlx_lm(*arguments: str) -> bytes:
    """What one of mlx-lm's own commands prints."""
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lm", *arguments],
        check=True,
        timeout=120,
        env=dict(os.environ, HF_HUB_OFFLINE="1"),
        capture_output=True,
    )
    return done.stdout


def test_a_prompt_is_fed_as_mlx_lm_feeds_it(here: Path) -> None:
    """The cache of mlx_lm.cache_prompt, from its prompt alone; mlx_lm.generate takes it back."""
    Path("prompt.txt").write_text(PROMPT)
    own, model = ["--prompt-cache-file", "own.safetensors"], ["--model", "model"]
    mlx_lm("cache_prompt", *model, "--prompt", PROMPT, *own)
    assert run_import("--prompt-file", "prompt.txt", file="own.safetensors") == 0
    assert run_export() == 0
    asked = [*model, "--prompt", " More?", "--max-tokens", "12", "--temp", "0"]
    answers = [
        mlx_lm("generate", *asked, "--verbose", "False", "--prompt-cache-file", file)
        for file in ("own.safetensors", "back.safetensors")
    ]
    assert answers[0] == answers[1] and len(answers[0]) > 5


def test_without_ids_it_says_what_to_give(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--tokens", "ids.json", "--prompt-file", "ids.json"]):
        capsys.readouterr()
        assert run_import(*arguments) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "holds no token ids: give either --tokens IDS or --prompt-file TEXT" in said.err
        assert "kvpack: hint:" in said.err


REFUSED = {
    "not json": ("--tokens", b"[1, 2", 10, "JSON list"),
    "an object": ("--tokens", b'{"a": 1}', 10, "JSON list"),
    "text in it": ("--tokens", b'[1, "2"]', 10, "JSON list"),
    "true in it": ("--tokens", b"[true]", 10, "JSON list"),
    "float in it": ("--tokens", b"[1.0]", 10, "JSON list"),
    "nested": ("--tokens", b"[" * 100_000, 10, "JSON list"),
    "no ids": ("--tokens", b"[]", 10, "tokens: expected 1 to"),
    "too few": ("--tokens", b"[1, 2]", 12, "token_ids: expected 21"),
    "above the vocabulary": ("--tokens", json.dumps([9999] * POSITION).encode(), 10, "id outside"),
    "not text": ("--prompt-file", b"\xff\xfe", 10, "UTF-8"),
    "another prompt": ("--prompt-file", b"hi", 12, "token_ids: expected 21"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_ids_are_refused(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    option, data, code, message = REFUSED[name]
    Path("given").write_bytes(data)
    capsys.readouterr()
    assert run_import(option, "given") == code
    said = capsys.readouterr()
    assert said.out == "" and message in said.err and "kvpack: hint:" in said.err
    assert not Path("p.kvpack").exists()


def test_a_torn_id_file_is_refused(here: Path) -> None:
    Path("ids.u32").write_bytes(bytes(4 * POSITION - 1))
    assert run_import("--tokens", "ids.u32") == 10


def test_files_that_are_no_caches_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = blank_file()
    set_metadata("1.3", "QuantizedKVCache")(parts)
    Path("quantised").write_bytes(encoded(parts))
    Path("cut").write_bytes(Path("c.safetensors").read_bytes()[:-1])
    Path("empty").write_bytes(b"")
    os.mkfifo("fifo")
    Path("folder").mkdir()
    with Path("sparse").open("wb") as file:
        file.truncate(1 << 40)
    for name, code, message in [
        ("quantised", 10, "'QuantizedKVCache'"),
        ("cut", 10, "tensors: expected"),
        ("empty", 10, "header"),
        ("fifo", 10, "a regular file"),
        ("folder", 10, "a regular file"),
        ("sparse", 10, "file: expected at most"),
        ("missing", 1, "No such file"),
    ]:
        capsys.readouterr()
        assert run_import("--tokens", "ids.json", file=name) == code, name
        said = capsys.readouterr()
        assert said.out == "" and message in said.err, (name, said.err)
        assert not Path("p.kvpack").exists()


def test_nothing_is_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_import("--tokens", "ids.json") == 0
    before = Path("p.kvpack").read_bytes()
    assert run_import("--tokens", "ids.json") == 1
    assert "nothing is ever replaced" in capsys.readouterr().err
    assert Path("p.kvpack").read_bytes() == before
    for out in ("c.safetensors", "p.kvpack"):
        assert run_export(out=out) == 1
    assert sorted(path.name for path in here.iterdir() if path.name.startswith(".")) == []


def test_another_model_is_refused_by_the_field(
    here: Path, model_folder: Callable[[ModelCase], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_import("--tokens", "ids.json") == 0
    other = model_folder(ModelCase("muse_glimmer", "float16", window=W, seed=8))
    fixed = ["--model", str(other), "--key", "k.key"]
    assert main(["export", "--to", "mlx-lm", *fixed, "--out", "x.safetensors", "p.kvpack"]) == 12
    assert "weights_digest" in capsys.readouterr().err
    assert not Path("x.safetensors").exists()


def test_packs_are_proved_before_they_are_exported(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_import("--tokens", "ids.json") == 0
    data = bytearray(Path("p.kvpack").read_bytes())
    data[len(data) // 2] ^= 1
    Path("bad.kvpack").write_bytes(data)
    assert run_export("bad.kvpack") == 11
    assert not Path("back.safetensors").exists()
    assert run_export("c.safetensors") == 10


def test_a_live_session_of_mlx_lm_comes_in(
    here: Path, model_folder: Callable[[ModelCase], Path]
) -> None:
    session = MlxLmSession(network_of(model_folder(CASE)))
    session.feed(tokens(POSITION), [15, *[1] * 6])
    Path("live.safetensors").write_bytes(saved_bytes(session))
    assert run_import("--tokens", "ids.json", file="live.safetensors") == 0
    assert main(["verify", "--key", "k.key", "p.kvpack"]) == 0


@pytest.mark.parametrize("command", [run_import, run_export])
def test_without_the_engine_it_says_what_to_install(
    command: Callable[..., int],
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways of missing it: no engine at all, or one whose own packages are not there."""
    assert run_import("--tokens", "ids.json", out="q.kvpack") == 0
    arguments = ("--tokens", "ids.json") if command is run_import else ("q.kvpack",)
    lame = importlib.metadata.EntryPoint("mlx-lm", "there_is_no_such_module:X", GROUP)
    for offered, said_of_it in [((), "no engine that reads it"), ((lame,), "no_such_module")]:
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda found=offered, **_: found)
        capsys.readouterr()
        assert command(*arguments) == 1
        said = capsys.readouterr()
        assert said.out == "" and said_of_it in said.err
        assert "kvpack: hint: pip install 'kvpack[mlx]'" in said.err


def test_an_unknown_engine_is_a_usage_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "--from", "vllm", "--model", "m", "--key", "k", "--out", "o", "f"]) == 2
    assert "mlx-lm" in capsys.readouterr().err


def test_the_command_itself_loads_no_engine() -> None:
    """Help and parsing work without MLX; only a run loads it."""
    child = "import sys, kvpack.cli; print(sorted({n.partition('.')[0] for n in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", child], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert "'engine'" not in done.stdout and "'mlx'" not in done.stdout
