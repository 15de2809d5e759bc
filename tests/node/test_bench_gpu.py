"""The measurements on a GPU run here, too, small: what is run once in a while must not rot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import engine
from bench.engine.reference import Geometry, reference_folder
from bench.gpu import replay_child
from kvpack.errors import KvpackError

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = ("--layers", "4", "--window", "16", "--hidden", "64", "--query-heads", "4")


def measured(module: str, out: Path, *arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.gpu.{module}", *TINY, *arguments, "--out", str(out)],
        cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    table = subprocess.run(
        [sys.executable, "-m", "bench.gpu.table", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert f"**{module}** on " in table.stdout and "\n|" in table.stdout
    return json.loads(out.read_text())["results"]


def test_snapshots_are_measured_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "snapshot.json"
    found = measured("snapshot", out, "--context", "70", "--rounds", "2")
    assert found["replay"]["equal"] == found["replay"]["steps"] == 64
    assert found["views"]["equal_tiles"] == found["views"]["tiles"] > 0
    assert found["device_to_host"]["stream_over_plain_pinned"]["rounds"] == 2


@pytest.mark.slow
def test_a_hand_over_is_measured(tmp_path: Path) -> None:
    found = measured("handover", tmp_path / "handover.json", "--contexts", "70", "--steps", "3")
    (one,) = found["contexts"]
    assert one["live"]["agreement"] == {
        "compared": 3, "equal_tokens": 3, "bitwise_equal": 3, "most_drift": 0.0,
    }  # fmt: skip
    assert one["known"]["move"]["state_verdict"] == "exact"
    assert one["bounds"]["exposed_most_s"] > 0


def test_what_a_replays_processes_do_agrees(tmp_path: Path) -> None:
    """In one process: the slow test has three."""
    with reference_folder(Geometry(4, 16, 64, 4)) as folder:
        model = engine.load_model(folder)
        replay_child.compute(model, tmp_path, 70, 6)
        found = replay_child.restore(model, tmp_path, 6)
    assert (found["position"], found["steps"], found["bitwise_equal"]) == (70, 6, 6)
    with pytest.raises(KvpackError):
        damaged = bytearray((tmp_path / replay_child.PACK).read_bytes())
        damaged[len(damaged) // 2] ^= 1
        (tmp_path / replay_child.PACK).write_bytes(damaged)
        replay_child.restore(model, tmp_path, 6)


@pytest.mark.slow
def test_a_pack_is_replayed_in_fresh_processes(tmp_path: Path) -> None:
    found = measured("replay", tmp_path / "replay.json", "--context", "70", "--cpu-steps", "2")
    assert found["restored"]["bitwise_equal"] == found["restored"]["steps"] == 64
    assert found["restored_on_cpu"]["steps"] == 2
