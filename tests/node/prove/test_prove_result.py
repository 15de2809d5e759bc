"""Comparisons, verdicts, blame, the ledger: functions of their inputs."""

from __future__ import annotations

import dataclasses
import json
import math
import struct

import pytest
from prove_support import GROUPS

from engine import Logits
from kvpack.layout import Encoding
from node.prove.cases import Group, ModelShape, make_plan
from node.prove.compare import Comparison, Twin, compare_logits, compare_state
from node.prove.cost import SPOOL_BYTES_MAX, Cost, Ledger, rollback_cost, station_cost
from node.prove.messages import Facts
from node.prove.report import all_hold, as_json, bug_line
from node.prove.result import DtypeRun, GroupResult, Verdict, first_difference

FACTS = Facts(
    windows=(64,), context_tokens=4096, sliding_layers=6, full_layers=2, full_row_bytes=512,
    window_bytes=98_304, model="muse_glimmer", dtype="float16",
    numerics={"mlx": "1", "mlx_lm": "2", "backend": "cpu", "device": "chip", "os": "Linux 1"},
    numerics_digest="ab" * 32, load_s=1.0, step_s=0.002, token_s=0.0005,
)  # fmt: skip


def logits(*values: float) -> Logits:
    return Logits(Encoding.F16LE, struct.pack(f"<{len(values)}e", *values))


def run_of(**changed: Comparison) -> DtypeRun:
    good = Comparison(steps=4, equal_steps=4, equal_tokens=4)
    groups = tuple(
        GroupResult(group).plus(changed.get(group.name.lower(), good)) for group in Group
    )
    return DtypeRun(FACTS, groups, (), None, 1.5)


DIFFERS = Comparison(steps=4, equal_steps=3, max_drift=0.25, first_difference="T=9: step 2")


def test_equal_bytes_are_exact() -> None:
    one = logits(1, 2)
    found = compare_logits(one.data + one.data, [one, one])
    assert found == Comparison(steps=2, equal_steps=2, equal_tokens=2) and found.exact


def test_a_flipped_last_bit_is_not() -> None:
    twin = logits(1, 2)
    near = Logits(Encoding.F16LE, bytes([twin.data[0] ^ 1]) + twin.data[1:])
    found = compare_logits(twin.data, [near])
    assert not found.exact and 0 < found.max_drift < 0.01 and found.equal_tokens == 1
    assert found.at("T=9").first_difference == "T=9: step 1"


def test_another_greedy_token_is_counted() -> None:
    assert compare_logits(logits(1, 2).data, [logits(2, 1)]).equal_tokens == 0


def test_signed_zero_is_not_zero() -> None:
    found = compare_logits(logits(0.0).data, [logits(-0.0)])
    assert not found.exact and found.max_drift == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_equal_nonsense_is_a_failure(bad: float) -> None:
    for position in range(3):
        values = [0.0, 1.0, 2.0]
        values[position] = bad
        found = compare_logits(logits(*values).data, [logits(*values)])
        assert found.equal_steps == 1 and not found.finite and not found.exact


def test_a_missing_step_is_not_fewer_to_compare() -> None:
    one = logits(1, 2)
    for data in (b"", one.data, one.data * 3):
        found = compare_logits(data, [one, one])
        assert found.steps == 2 and not found.exact and found.first_difference


def test_a_twin_survives_its_file(tmp_path) -> None:
    twin = Twin(b"s" * 32, b"e" * 32, b"logits")
    twin.write(tmp_path / "twin")
    assert Twin.read(tmp_path / "twin") == twin


def test_rows_and_logits_are_counted_apart() -> None:
    one = logits(1.0)
    twin = Twin(b"s" * 32, b"e" * 32, one.data)
    assert twin.compare(twin.start, [one], twin.end).exact
    found = twin.compare(b"x" * 32, [one], twin.end)
    assert (found.states, found.equal_states) == (2, 1)
    assert found.first_difference == "rows at the cut"


def test_sums_keep_the_first_difference_and_the_largest_drift() -> None:
    total = DIFFERS + Comparison(steps=1, max_drift=0.5, first_difference="later")
    assert (total.steps, total.max_drift) == (5, 0.5)
    assert total.first_difference == "T=9: step 2"
    assert Comparison.from_json(json.loads(json.dumps(total.as_json()))) == total


@pytest.mark.parametrize("group", Group)
def test_verdicts(group: Group) -> None:
    assert GroupResult(group).verdict is Verdict.NOT_RUN and not GroupResult(group).holds
    equal = GroupResult(group).plus(Comparison(steps=1, equal_steps=1))
    assert equal.verdict is Verdict.EXACT and equal.holds
    differs = GroupResult(group).plus(DIFFERS)
    assert differs.verdict is (Verdict.FAILED if GROUPS[group.value] else Verdict.COMPATIBLE)
    nonsense = GroupResult(group).plus(Comparison(steps=1, equal_steps=1, finite=False))
    assert nonsense.verdict is Verdict.FAILED and not nonsense.holds


def test_rows_alone_fail_a_group() -> None:
    rows = Comparison(steps=4, equal_steps=4) + compare_state(b"a", b"b", "at the cut")
    assert not run_of(pack=rows).ok


def test_blame_falls_on_the_backend_first() -> None:
    assert run_of().ok and run_of().blame is None
    assert "does not repeat its own bits" in run_of(control=DIFFERS, pack=DIFFERS).blame
    only = run_of(pack=DIFFERS).blame
    assert "the control holds" in only and "from a pack" in only and "snapshot" not in only
    assert run_of(blocks=DIFFERS).ok, "nothing is promised for unequal shapes"
    assert "--budget" in run_of(tiles=Comparison()).blame


def test_processes_that_differ_in_numerics_fail() -> None:
    other = first_difference(FACTS.numerics, {**FACTS.numerics, "mlx": "3"})
    assert other == ("mlx", "1", "3") and first_difference(FACTS.numerics, FACTS.numerics) is None
    run = dataclasses.replace(run_of(), other_numerics=other)
    assert not run.ok and "differ in mlx: 1 and 3" in run.blame


def test_report_has_every_group_and_no_infinity() -> None:
    infinite = Comparison(steps=1, max_drift=math.inf, finite=False, first_difference="step 1")
    report = as_json([run_of(used=infinite)], ["bfloat16: not here"])
    text = json.dumps(report, allow_nan=False)
    assert json.loads(text)["runs"][0]["groups"][4]["max_drift"] is None
    assert {g["group"]: g["promised"] for g in report["runs"][0]["groups"]} == GROUPS
    assert report["verdict"] == "FAILED" and report["left_out"] == ["bfloat16: not here"]
    assert "failed: used" in report["line"]


def test_the_line_is_one_line_with_what_a_report_needs() -> None:
    line = bug_line([run_of()])
    assert "\n" not in line and "exact" in line
    for part in ("mlx 1", "mlx-lm 2", "cpu chip", "Linux 1", "abab", "W=64", "24/24"):
        assert part in line
    assert not all_hold([]), "nothing was proved"


def test_the_ledger_refuses_what_does_not_fit() -> None:
    ledger = Ledger(budget_s=10.0)
    assert ledger.why_not(Cost(4.0, 4.0, 10), elapsed_s=1.0) is None
    assert ledger.why_not(Cost(4.0, 6.0, 10), elapsed_s=1.0) == "time"
    ledger.read_s = 5.0
    assert ledger.why_not(Cost(4.0, 4.0, 10), elapsed_s=1.0) == "time"
    assert ledger.why_not(Cost(0.0, 0.0, SPOOL_BYTES_MAX + 1), elapsed_s=1.0) == "room on disk"


def test_costs_grow_with_what_is_done() -> None:
    plan = make_plan(ModelShape((64,), 4096), quick=False)
    by_position = sorted(plan.stations, key=lambda s: (s.history.single_calls, s.history.position))
    first, last = (station_cost(FACTS, by_position[index]) for index in (0, -1))
    assert 0 < first.write_s < last.write_s and first.file_bytes < last.file_bytes
    blocks = rollback_cost(FACTS, plan.rollbacks[0])
    assert blocks.read_s > 46 * FACTS.step_s
