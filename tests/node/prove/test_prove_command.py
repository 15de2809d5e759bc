"""``kvnode prove`` as people run it: real children, real models; and faults that it must find."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from prove_support import GROUPS, HERE, groups_of, kvnode, prove_json, tiny

from engine import ARCHITECTURES, ModelFolderError, load_model
from node.prove.main import ProveRequest
from node.prove.main import prove as run_prove
from node.shipped import require_model

FIRST_CLASS = ("muse_glimmer", "cohere2", "exaone4", "afmoe")


@pytest.mark.parametrize(
    "arch", ["muse_glimmer", *(pytest.param(a, marks=pytest.mark.slow) for a in FIRST_CLASS[1:])]
)
def test_quick_holds_on_each_architecture(arch: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "a model", arch)
    report = prove_json("--quick", "--model", str(folder), cwd=tmp_path)
    assert report["ok"] and report["verdict"] == "exact"
    (run,) = report["runs"]
    groups = groups_of(run)
    assert list(groups) == list(GROUPS)
    for name, group in groups.items():
        assert group["cases"] > 0 and group["steps_compared"] > 0
        if GROUPS[name]:
            assert group["verdict"] == "exact"
            assert group["steps_equal"] == group["steps_compared"]
            assert group["states_equal"] == group["states_compared"] > 0
    assert run["model"] == arch and len(run["numerics_digest"]) == 64
    assert any("--quick" in sentence for sentence in run["left_out"])
    for secret in (str(tmp_path), "a model"):
        assert secret not in report["line"]


def broken(fault: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    command = (sys.executable, str(HERE / "broken_child.py"), fault)
    code = run_prove(ProveRequest(folder, None, True, 60.0, False, command))
    return code, capsys.readouterr().out


def test_a_wrong_rotation_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The planted bug: install lays rows down from slot 0 on. The rows are right, the bits not."""
    code, said = broken("rotation", tiny(tmp_path / "model"), capsys)
    assert code == 1 and "FAILED" in said
    assert "the control holds, so the fault is in: from a snapshot; from a pack" in said
    assert "kvnode prove" in said.splitlines()[-1] and "failed: snapshot, pack" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("rollback", "so the fault is in: rollback, k of n"),
        ("torn", "the control holds, so the fault is in: from a snapshot"),
        ("backend", "does not repeat its own bits without any cache"),
    ],
)
def test_other_faults_are_found_and_blamed(
    fault: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = broken(fault, tiny(tmp_path / "model", window=16), capsys)
    assert code == 1 and sentence in " ".join(said.split())


def test_mistakes_are_named(tmp_path: Path) -> None:
    nowhere = kvnode("prove", "--model", str(tmp_path / "nowhere"), cwd=tmp_path)
    assert nowhere.returncode == 1 and nowhere.stdout == ""
    assert nowhere.stderr.startswith("kvnode: error: ") and "not a folder" in nowhere.stderr
    usage = kvnode("prove", "--model", str(tmp_path), "--budget", "0", cwd=tmp_path)
    assert usage.returncode == 2 and usage.stdout == ""


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(folder: Path) -> Path:
    """A Hugging Face cache with one model, as the hub's own library lays it out."""
    repository = folder / "models--kvpack-tests--tiny"
    tiny(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return folder


@pytest.mark.slow
def test_a_model_in_the_local_hub_cache_goes_by_its_id(tmp_path: Path) -> None:
    cache = hub_cache(tmp_path / "hub")
    ran = kvnode(
        "prove", "--json", "--quick", "--budget", "1", "--model", "kvpack-tests/tiny",
        cwd=tmp_path, HF_HUB_CACHE=str(cache), HF_ENDPOINT="http://127.0.0.1:9",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["ok"]


def test_an_id_that_the_local_hub_cache_does_not_have_is_named(tmp_path: Path) -> None:
    cache = hub_cache(tmp_path / "hub")
    absent = kvnode("prove", "--model", "kvpack-tests/other", cwd=tmp_path, HF_HUB_CACHE=str(cache))
    assert absent.returncode == 1 and absent.stdout == ""
    assert "kvpack-tests/other: not a folder, and not in the local Hugging Face" in absent.stderr


def test_serve_takes_the_id_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``serve`` hands to its engine is what the engine's loader finds in the same cache."""
    cache = hub_cache(tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    model = require_model(Path("kvpack-tests/tiny"))
    assert load_model(model).name == "kvpack-tests/tiny"
    with pytest.raises(ModelFolderError, match="nothing is downloaded"):
        require_model(Path("kvpack-tests/other"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("window", [8, 16, 64])
def test_the_whole_matrix_holds(arch: str, window: int, tmp_path: Path) -> None:
    """Every position, history, route, continuation and block, in each dtype there is."""
    folder = tiny(tmp_path / "model", arch, window)
    arguments = ["prove", "--json", "--dtype", "all", "--budget", "3000", "--model", str(folder)]
    ran = kvnode(*arguments, cwd=tmp_path, seconds=1700)
    assert ran.returncode == 0, ran.stdout + ran.stderr
