"""The parent with a child that has no model: budget, refusals, crashes, hangs; and no orphans."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prove_support import HERE, environment, tiny
from test_prove_result import FACTS

from kvpack.errors import EXIT_INTERRUPTED
from node.prove import cost, main, runner
from node.prove.main import ProveRequest
from node.prove.messages import encode
from node.prove.process import COMMAND, ModelRefusedError, ProveChildError
from node.prove.result import DtypeRun, Verdict


def prove(mode: str, operation: str, *, facts: object = FACTS, budget_s: float = 600.0) -> DtypeRun:
    stub = str(HERE / "stub_child.py")
    said = json.dumps(dataclasses.asdict(facts))
    command = (sys.executable, stub, mode, operation, said)
    options = runner.ProveOptions(Path("nowhere"), None, False, budget_s, command)

    async def bounded() -> DtypeRun:
        async with asyncio.timeout(60):
            return await runner.prove_dtype(options, lambda *_: None)

    return asyncio.run(bounded())


def failed(run: DtypeRun) -> list[str]:
    return [r.group.value for r in run.groups if r.verdict is Verdict.FAILED]


def test_a_good_child_proves_everything() -> None:
    run = prove("good", "none")
    assert run.ok and not failed(run)
    assert [r.group.value for r in run.groups if not r.cases] == []
    assert not any("want of" in sentence for sentence in run.left_out)


@pytest.mark.parametrize(
    ("operation", "group"),
    [
        ("restore", ["snapshot", "pack", "tiles", "used"]),
        ("rollback", ["rollback"]),
        ("read control", ["control"]),
    ],
)
@pytest.mark.parametrize("mode", ["refuse", "differ"])
def test_one_bad_answer_fails_its_group(operation: str, group: list[str], mode: str) -> None:
    run = prove(mode, operation)
    assert failed(run) == group and not run.ok
    worst = next(r for r in run.groups if r.group.value == group[-1])
    assert worst.compared.first_difference.startswith("T=")
    if mode == "refuse":
        assert "layers[0].rows" in worst.compared.first_difference


def test_unequal_shapes_that_differ_are_compatible() -> None:
    run = prove("differ", "shapes")
    assert run.ok
    assert {r.verdict for r in run.groups if not r.group.is_promised} == {Verdict.COMPATIBLE}


def test_a_model_that_is_refused_says_why() -> None:
    with pytest.raises(ModelRefusedError, match=r"layers\[0\]\.rows"):
        prove("refuse", "load")


@pytest.mark.parametrize("operation", ["load", "write station", "restore", "shapes"])
def test_a_child_that_crashes_ends_the_run(operation: str) -> None:
    with pytest.raises(ProveChildError, match="the child ended: RuntimeError: out of memory"):
        prove("crash", operation)


def test_a_child_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    # What it answers before it hangs is to be in time on a busy machine, too.
    monkeypatch.setattr(cost, "_PATIENCE_S", 4.0)
    monkeypatch.setattr(cost, "_PATIENCE", 0.0)
    monkeypatch.setattr("node.prove.process._STOP_S", 0.5)
    start = time.monotonic()
    with pytest.raises(ProveChildError, match="write rollback: no answer in"):
        prove("hang", "write rollback")
    assert time.monotonic() - start < 50


def test_a_small_budget_leaves_out_by_name_and_keeps_every_group() -> None:
    slow = dataclasses.replace(FACTS, step_s=0.5)
    run = prove("good", "none", facts=slow, budget_s=1.0)
    assert run.ok and all(result.cases for result in run.groups)
    (sentence,) = [s for s in run.left_out if s.startswith("for want of time: T=")]
    assert "more" in sentence
    assert sum(r.cases for r in run.groups) < sum(r.cases for r in prove("good", "none").groups)


def test_a_large_model_does_not_fill_the_disk() -> None:
    huge = dataclasses.replace(FACTS, full_row_bytes=200 << 20)
    run = prove("good", "none", facts=huge, budget_s=1e9)
    assert any(sentence.startswith("for want of room on disk") for sentence in run.left_out)


def test_a_dtype_that_a_backend_lacks_is_left_out_only_of_all(tmp_path: Path) -> None:
    stub = (sys.executable, str(HERE / "stub_child.py"), "refuse", "load", "{}")
    for dtype in ("f16", "all"):
        request = ProveRequest(tmp_path, dtype, True, 10.0, True, stub)
        with pytest.raises(ModelRefusedError):
            main.prove(request)


def test_a_private_folder_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prove("good", "none")
    with pytest.raises(ProveChildError):
        prove("crash", "restore")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("busy", [False, True])
def test_the_real_child_ends_with_its_input(busy: bool, tmp_path: Path) -> None:
    """Also while it computes: a parent that is killed leaves nothing running."""
    child = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=tmp_path,
    )
    try:
        if busy:
            folder = tiny(tmp_path / "model")
            request = {"op": "load", "model": str(folder), "dtype": None, "folder": str(tmp_path)}
            child.stdin.write(encode(request))
            child.stdin.flush()
            # Loading takes seconds: it is in the middle of it.
            time.sleep(0.3)
        child.stdin.close()
        assert child.wait(timeout=30) == EXIT_INTERRUPTED
        assert child.stdout.read() == b""
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()
