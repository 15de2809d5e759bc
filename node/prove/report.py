"""The report: a table for people, an object for programs, and one line for a bug report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import kvpack
from node.prove.result import DtypeRun, GroupResult, Verdict

#: Not a case that was left out: there is nothing to run.
_NOTES: Final = ("batch of 1 against 2: the engine computes one session per call",)


def all_hold(runs: Sequence[DtypeRun]) -> bool:
    """Everything that is promised was seen to hold, in every dtype that was asked for."""
    return bool(runs) and all(run.ok for run in runs)


def as_json(runs: Sequence[DtypeRun], left_out: Sequence[str]) -> dict[str, Any]:
    """The report for programs. Times in seconds."""
    return {
        "ok": all_hold(runs),
        "verdict": _overall(runs),
        "kvpack": kvpack.__version__,
        "runs": [_run_json(run) for run in runs],
        "left_out": list(left_out),
        "line": bug_line(runs),
    }


def _run_json(run: DtypeRun) -> dict[str, Any]:
    facts = run.facts
    return {
        "ok": run.ok,
        "blame": run.blame,
        "model": facts.model,
        "dtype": facts.dtype,
        "windows": list(facts.windows),
        "sliding_layers": facts.sliding_layers,
        "full_layers": facts.full_layers,
        "numerics": facts.numerics,
        "numerics_digest": facts.numerics_digest,
        "groups": [_group_json(group) for group in run.groups],
        "left_out": [*run.left_out, *_NOTES],
        "seconds": run.seconds,
    }


def _group_json(result: GroupResult) -> dict[str, Any]:
    compared = result.compared
    drift = compared.max_drift
    return {
        "group": result.group.value,
        "title": result.group.title,
        "promised": result.group.is_promised,
        "cases": result.cases,
        "steps_compared": compared.steps,
        "steps_equal": compared.equal_steps,
        "tokens_equal": compared.equal_tokens,
        "states_compared": compared.states,
        "states_equal": compared.equal_states,
        # JSON has no infinity; "finite" says it.
        "max_drift": drift if math.isfinite(drift) else None,
        "finite": compared.finite,
        "verdict": result.verdict.value,
        "first_difference": compared.first_difference,
    }


def show(runs: Sequence[DtypeRun], left_out: Sequence[str], console: Console) -> None:
    """Print one table for each dtype, what was left out, and the line."""
    for run in runs:
        console.print(_table(run))
        for sentence in (*run.left_out, *_NOTES):
            console.print(f"not compared: {sentence}", markup=False)
        if run.blame is not None:
            console.print(f"FAILED: {run.blame}", markup=False)
    for sentence in left_out:
        console.print(f"not compared: {sentence}", markup=False)
    console.print(bug_line(runs), markup=False, soft_wrap=True)


def _table(run: DtypeRun) -> Table:
    facts = run.facts
    windows = ", ".join(map(str, facts.windows)) or "none"
    table = Table(title=f"{facts.model} {facts.dtype}, window {windows}, {run.seconds:.0f} s")
    table.add_column("case group", no_wrap=True)
    for name in ("cases", "states", "steps", "bitwise equal"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for result in run.groups:
        compared = result.compared
        table.add_row(
            result.group.title,
            f"{result.cases:,}",
            f"{compared.equal_states:,}/{compared.states:,}" if compared.states else "",
            f"{compared.steps:,}",
            f"{compared.equal_steps:,}",
            _verdict(result),
        )
    return table


def _verdict(result: GroupResult) -> str:
    compared, verdict = result.compared, result.verdict
    if verdict in (Verdict.EXACT, Verdict.NOT_RUN):
        return str(verdict.value)
    drift = f"max drift {compared.max_drift:.2g}"
    if verdict is Verdict.FAILED:
        return f"{verdict.value} ({drift}; {compared.first_difference})"
    tokens = f", tokens {compared.equal_tokens} of {compared.steps}"
    return f"{verdict.value} ({drift}{tokens})"


def _overall(runs: Sequence[DtypeRun]) -> str:
    return str((Verdict.EXACT if all_hold(runs) else Verdict.FAILED).value)


def bug_line(runs: Sequence[DtypeRun]) -> str:
    """One line that says what ran where and what came out: no path, no text, no token."""
    parts = [f"kvnode prove {kvpack.__version__}: {_overall(runs)}"]
    if runs:
        values = runs[0].facts.numerics
        parts.append(f"mlx {values['mlx']}, mlx-lm {values['mlx_lm']}")
        parts.append(f"{values['backend']} {values['device']}, {values['os']}")
    for run in runs:
        promised = [result for result in run.groups if result.group.is_promised]
        steps = sum(result.compared.steps for result in promised)
        equal = sum(result.compared.equal_steps for result in promised)
        windows = "/".join(map(str, run.facts.windows)) or "none"
        failed = [r.group.value for r in run.groups if not r.holds]
        parts.append(
            f"{run.facts.model} {run.facts.dtype} W={windows} "
            f"numerics {run.facts.numerics_digest[:16]} steps {equal}/{steps}"
            + (f" failed: {', '.join(failed)}" if failed else "")
        )
    return " | ".join(parts)
