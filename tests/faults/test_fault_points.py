"""The switch itself: off unless two things come together, and no point that is never reached."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from node import cli, fault_points
from node.errors import UsageError
from node.fault_points import EXIT_CODE, PARK_POINTS, POINTS, FaultAction, FaultError, FaultOrder

from .lab import ROOT

REACHED = re.compile(r"fault_points\.reach\(\s*\"([a-z.]+)\"\s*\)")


def in_a_process(code: str, order: str) -> subprocess.CompletedProcess:
    """Run ``code`` with an order in the environment."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KVPACK_FAULT": order}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def test_the_environment_alone_arms_nothing():
    code = (
        "from node import fault_points\n"
        "before = fault_points.reach\n"
        "import node.config, node.cli\n"
        "fault_points.reach('source.commit.before')\n"
        "print(fault_points.reach is before is fault_points._nothing)\n"
    )
    ran = in_a_process(code, "source.commit.before=exit")
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "True", "")


def serve(monkeypatch, tmp_path, order: str, *options: str):
    """What ``reach`` is once ``kvnode serve`` would begin to serve."""
    found = []
    monkeypatch.setenv("KVPACK_FAULT", order)
    monkeypatch.setattr(fault_points, "reach", fault_points._nothing)
    monkeypatch.setattr("node.daemon.serve", lambda *_, **__: found.append(fault_points.reach))
    monkeypatch.setattr("node.shipped.require_model", lambda _: tmp_path)
    arguments = [
        "serve", "--grpc", "127.0.0.1:0", "--data-dir", str(tmp_path),
        "--credentials", str(tmp_path), "--directory", "sqlite:x", *options,
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code, found


def test_a_served_node_is_armed_by_option_and_environment_together_only(monkeypatch, tmp_path):
    order = "source.commit.before=raise"
    assert serve(monkeypatch, tmp_path, order) == (0, [fault_points._nothing])
    assert serve(monkeypatch, tmp_path, "", "--fault-points") == (0, [fault_points._nothing])
    code, (reach,) = serve(monkeypatch, tmp_path, order, "--fault-points")
    assert code == 0 and reach is not fault_points._nothing
    reach("source.seal.before")
    with pytest.raises(FaultError):
        reach("source.commit.before")
    reach("source.commit.before")


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("source.nowhere=kill", "there is none of that name"),
        ("source.commit.before=pause", "expected POINT"),
        ("source.commit.before:0=kill", "expected POINT"),
        ("source.commit.before", "expected POINT"),
    ],
)
def test_an_order_that_cannot_be_carried_out_refuses_to_start(
    monkeypatch, tmp_path, capsys, order, expected
):
    assert serve(monkeypatch, tmp_path, order, "--fault-points") == (2, [])
    assert expected in capsys.readouterr().err


def test_the_option_is_in_no_help_text():
    ran = in_a_process("from node.cli import main\nmain(['serve', '--help'])", "")
    assert "fault-points" not in ran.stdout
    assert ran.returncode == 0 and "transfer-lease" not in ran.stdout


def test_the_points_in_the_code_are_those_that_are_named():
    found: list[str] = []
    for path in (ROOT / "node").rglob("*.py"):
        found += REACHED.findall(path.read_text())
    named = POINTS + PARK_POINTS
    assert set(found) == set(named)
    assert len(named) == len(set(named))


def test_orders_are_read_and_counted():
    order = FaultOrder.parse("target.chunk.taken:3=stop")
    assert order == FaultOrder("target.chunk.taken", 3, FaultAction.STOP)
    assert FaultOrder.parse(str(order)) == order
    assert FaultOrder.parse("target.cas.after=kill").nth == 1
    with pytest.raises(UsageError):
        FaultOrder("target.cas.after", 0, FaultAction.KILL)


@pytest.mark.parametrize(("action", "code"), [("kill", -9), ("exit", EXIT_CODE)])
def test_a_point_ends_the_process_at_the_nth_time(action, code):
    text = (
        "from node import fault_points\n"
        f"fault_points.arm('target.chunk.taken:3={action}')\n"
        "for n in range(9):\n"
        "    print(n, flush=True)\n"
        "    fault_points.reach('target.chunk.taken')\n"
    )
    ran = in_a_process(text, "")
    assert ran.returncode == code and ran.stdout.split() == ["0", "1", "2"]


def test_an_order_in_a_file_holds_once_each_time_it_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(fault_points, "reach", fault_points._nothing)
    path: Path = tmp_path / "order"
    path.write_text("")
    fault_points.arm(f"@{path}")
    fault_points.reach("target.cas.after")
    for written_ns in (1, 2):
        path.write_text("target.cas.after:2=raise\n")
        os.utime(path, ns=(written_ns, written_ns))
        fault_points.reach("target.cas.after")
        with pytest.raises(FaultError):
            fault_points.reach("target.cas.after")
        fault_points.reach("target.cas.after")
    assert (tmp_path / "order.trace").read_text().split() == ["target.cas.after"] * 7
