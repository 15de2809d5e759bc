"""``kvnode prove`` as people run it: real children, real models; and faults that it must find."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from prove_support import GROUPS, HERE, groups_of, kvnode, prove_json, tiny

from engine import ARCHITECTURES
from node.prove.main import ProveRequest
from node.prove.main import prove as run_prove

FIRST_CLASS = ("muse_glimmer", "cohere2", "exaone4", "afmoe")


@pytest.mark.parametrize("arch", FIRST_CLASS)
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
