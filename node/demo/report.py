"""What the demo shows: a table for people, an object for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpack.errors import EXIT_GOOD
from kvpack.layout import LayerKind
from node.demo.run import DemoResult, failures
from node.demo.seam import for_terminal


def as_json(result: DemoResult) -> dict[str, Any]:
    """The result for programs. Times in seconds, sizes in bytes."""
    move, phases = result.move, result.move.phases
    failed = failures(result)
    return {
        "ok": not failed,
        "failed": failed,
        "model": result.model,
        "text": result.text.name,
        "text_tokens": result.text_tokens,
        "prompt_tokens": result.prompt_tokens,
        "window_tokens": result.window_tokens,
        "ring_wraps": result.ring_wraps,
        "source_pid": result.source.pid,
        "target_pid": result.target.pid,
        "bytes": {
            "nope": move.nope_bytes,
            "nope_expected": result.expected_bytes(LayerKind.FULL),
            "swa": move.swa_bytes,
            "swa_expected": result.expected_bytes(LayerKind.SWA),
            "token_ids": move.token_bytes,
            "session": move.session_bytes,
            "payload": move.payload_bytes,
            "payload_after_prefill": move.payload_bytes_after_zero,
            "wire_total": move.wire_bytes,
        },
        "objects": move.objects,
        "prefill_s": move.prefill_s,
        "exposed_handover_s": move.exposed_handover_s,
        "hidden_fraction": move.hidden_fraction,
        "phases": {
            "boundary_s": phases.boundary_s,
            "pushed_s": phases.pushed_s,
            "sealed_s": phases.sealed_s,
            "committed_s": phases.committed_s,
            "target_probe_s": phases.target_probe_s,
            "target_durable_s": phases.target_durable_s,
            "target_transfer_s": phases.target_transfer_s,
            "target_swap_s": phases.target_swap_s,
        },
        "state": move.state_verdict,
        "continuation": move.continuation_verdict,
        "replay": {"steps": result.steps, "bitwise_equal_steps": result.equal_steps},
        "text_before": result.seam.before,
        "text_after": result.seam.after,
        "pack": {
            "path": str(result.pack),
            "key": str(result.key),
            "bytes": result.pack.stat().st_size,
            "verify": _verdict(result),
        },
        "tamper": {
            "refused": result.tampered.exit_code != EXIT_GOOD,
            "reason": result.tampered.reason,
            "exit_code": result.tampered.exit_code,
        },
        "seconds": result.seconds,
    }


def show(result: DemoResult, console: Console) -> None:
    """Print the table, and below it what did not hold."""
    move = result.move
    table = Table(title="A session moved between two processes", show_header=False)
    table.add_column("what")
    table.add_column("value")
    rows = (
        ("model", f"{result.model}, window {result.window_tokens}"),
        ("prompt", _prompt(result)),
        ("processes", f"source {result.source.pid}, target {result.target.pid}"),
        ("NoPE rows", f"{move.nope_bytes:,} B, as the geometry says"),
        ("SWA windows", f"{move.swa_bytes:,} B, as the geometry says"),
        ("on the wire", _wire(result)),
        ("prefill", f"{move.prefill_s:.3f} s"),
        ("hidden behind prefill", f"{100 * move.hidden_fraction:.1f} % of the payload"),
        ("end of prefill to first token", f"{1000 * move.exposed_handover_s:.1f} ms"),
        ("state, continuation", f"{move.state_verdict}, {move.continuation_verdict}"),
        ("bitwise-equal steps", f"{result.equal_steps} of {result.steps}"),
        ("text before the move", f"...{for_terminal(result.seam.before)}"),
        ("after it, on the target", f"{for_terminal(result.seam.after)}..."),
        ("pack", f"{result.pack} ({result.pack.stat().st_size:,} B)"),
        ("kvpack verify", _verdict(result)),
        ("one byte flipped", _tamper(result)),
        ("whole demo", f"{result.seconds:.1f} s"),
    )
    failed = failures(result)
    for name, value in rows:
        # Not as markup: a text, a path or a model's name may hold brackets.
        table.add_row(name, Text(value))
    console.print(table)
    for line in failed:
        console.print(f"did not hold: {line}", markup=False)


def _prompt(result: DemoResult) -> str:
    used = f"{result.prompt_tokens:,} tokens of {result.text.name}"
    left = result.text_tokens - result.prompt_tokens
    cut = f" (cut: {left:,} more tokens were left out)" if left or result.text.was_cut else ""
    return f"{used}, {result.ring_wraps} times round the ring{cut}"


def _wire(result: DemoResult) -> str:
    move = result.move
    over = 100 * (move.wire_bytes / max(1, move.payload_bytes) - 1)
    return f"{move.wire_bytes:,} B for {move.payload_bytes:,} B of payload (+{over:.1f} %)"


def _verdict(result: DemoResult) -> str:
    return "ok" if result.verified.exit_code == EXIT_GOOD else f"refused: {result.verified.reason}"


def _tamper(result: DemoResult) -> str:
    if result.tampered.exit_code == EXIT_GOOD:
        return "accepted"
    return f"refused: {result.tampered.reason} (exit {result.tampered.exit_code})"
