"""A whole context through a pack: GPU, pack, GPU again, bit for bit; and a CPU that goes on.

    python -m bench.gpu.replay --context 32768 --out replay.json

A process computes ``--context`` tokens of the reference geometry (random weights) and then 64 steps
that nothing interrupts; beside that, by the same calls, a session that it writes as a pack. A fresh
process restores the pack and takes the same 64 steps: their logits have to be the same bytes. A
third process restores the same pack with ``--device cpu`` and takes ``--cpu-steps`` steps: the rows
are the same, the continuation is ``compatible``, and how far its logits drift is measured.

With ``--prove``, ``kvnode prove --quick`` also runs where MLX computes by itself, on
``--prove-model`` or on the small model that ships: every way to restore, in a fresh process.

Small, on a CPU: ``--layers 4 --window 64 --hidden 64 --query-heads 4 --context 600``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.engine.reference import reference_folder
from bench.gpu.common import Limit, geometry, parser, write
from node.config import child_environment
from node.shipped import require_model

STEPS = 64
ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> None:
    """Measure and write."""
    options = _options()
    limit = Limit(options.limit_s)
    results: dict[str, object] = {"context_tokens": options.context}
    with reference_folder(geometry(options)) as model, tempfile.TemporaryDirectory() as name:
        limit.say("model written")
        given = [str(model), name]
        results["computed"] = _child(
            limit, "compute", *given, "--context", str(options.context), "--steps", str(STEPS)
        )
        again = _child(limit, "restore", *given, "--steps", str(STEPS))
        results["restored"] = again
        limit.say(f"restored: {again['bitwise_equal']} of {again['steps']} steps bitwise equal")
        if limit.allows("restored on the CPU", 20.0):
            found = _child(
                limit, "restore", *given, "--steps", str(options.cpu_steps), "--device", "cpu"
            )
            found["continuation"] = (
                "exact" if found["numerics"] == again["numerics"] else "compatible"
            )
            results["restored_on_cpu"] = found
            limit.say(
                f"on the CPU: {found['continuation']}, {found['equal_tokens']} of "
                f"{found['steps']} tokens equal, drift at most {found['most_drift']:.2e}"
            )
    if options.prove and limit.allows("kvnode prove", 30.0):
        results["prove"] = _prove(limit, options.prove_model)
    write(options.out, "replay", options, limit, results)


def _options() -> argparse.Namespace:
    made = parser("replay", __doc__, 400.0)
    made.add_argument("--context", type=int, default=32_768, help="tokens (default: 32,768)")
    made.add_argument("--cpu-steps", type=int, default=8, help="on the CPU (default: 8)")
    made.add_argument("--prove", action="store_true", help="kvnode prove --quick, too")
    made.add_argument("--prove-model", type=Path, help="default: the model that ships")
    made.set_defaults(query_heads=8)
    return made.parse_args()


def _child(limit: Limit, what: str, *arguments: str) -> dict[str, Any]:
    """Run one process to its end; its last line is what it found.

    Raises:
        subprocess.SubprocessError: It failed, or there was no time left.
    """
    limit.say(f"{what} begins")
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.replay_child", what, *arguments],
        cwd=ROOT,
        env=child_environment(ROOT),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=max(10.0, limit.left_s),
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _prove(limit: Limit, folder: Path | None) -> dict[str, Any]:
    """What ``kvnode prove`` says; its table goes to standard error as well."""
    budget = max(10.0, limit.left_s - 15.0)
    arguments = ["prove", "--quick", "--budget", f"{budget:.0f}", "--json"]
    command = [sys.executable, "-m", "node", *arguments, "--model", str(require_model(folder))]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=child_environment(ROOT),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=limit.left_s,
        )
    except subprocess.TimeoutExpired:
        return {"command": ["kvnode", *arguments], "exit_code": None}
    found: dict[str, Any] = {"command": ["kvnode", *arguments], "exit_code": done.returncode}
    try:
        found["said"] = json.loads(done.stdout)
    except ValueError:
        found["said"] = done.stdout[-2000:]
    limit.say(f"kvnode prove: exit code {done.returncode}")
    return found


if __name__ == "__main__":
    main()
