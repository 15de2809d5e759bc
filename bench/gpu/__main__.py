"""``python -m bench.gpu``: every measurement on a GPU, one after the other, within a time.

    python -m bench.gpu --seconds 1200 --card h200 --results docs/results

Each one is a process of its own, so that one that fails costs only itself, and writes
``gpu-DATE-CARD-NAME.json``. ``python -m bench.gpu.table FILE...`` makes a table of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from node.config import child_environment

ROOT = Path(__file__).resolve().parent.parent.parent

#: What a small run on a CPU is made with.
TINY = ("--layers", "4", "--window", "64", "--hidden", "64", "--query-heads", "4")


@dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
        name: Of its file.
        module: Of ``bench.gpu``.
        arguments: On a GPU.
        tiny: On a CPU, small.
        share: Of the time.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    tiny: tuple[str, ...]
    share: float


PARTS = (
    Part(
        "snapshot-32768", "snapshot",
        ("--context", "32768"), ("--context", "300", "--rounds", "2"), 1,
    ),
    Part(
        "snapshot-131072", "snapshot",
        ("--context", "131072", "--rounds", "3"), ("--context", "600", "--rounds", "2"), 2,
    ),
    Part(
        "replay", "replay",
        ("--context", "32768", "--prove"), ("--context", "300", "--cpu-steps", "2"), 2,
    ),
    Part(
        "handover", "handover",
        ("--contexts", "2048,8192,32768,131072"), ("--contexts", "300"), 3,
    ),
)  # fmt: skip


def main() -> None:
    """Run them; the exit code says whether all ended well."""
    made = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--seconds", type=float, default=1200.0, help="for all (default: 1,200)")
    made.add_argument("--card", default="gpu", help="short name, for the files")
    made.add_argument("--results", type=Path, default=ROOT / "docs" / "results")
    made.add_argument("--only", choices=sorted({p.module for p in PARTS}), action="append")
    made.add_argument("--tiny", action="store_true", help="small, on any machine")
    options = made.parse_args()
    parts = [p for p in PARTS if not options.only or p.module in options.only]
    end = time.monotonic() + options.seconds
    shares = sum(part.share for part in parts)
    failed = 0
    for part in parts:
        left = end - time.monotonic()
        failed += not run(part, options, max(20.0, left * part.share / shares))
        shares -= part.share
    raise SystemExit(min(failed, 1))


def run(part: Part, options: argparse.Namespace, seconds: float) -> bool:
    """Run one; whether it ended well and in time."""
    date = time.strftime("%Y-%m-%d")
    out = options.results.resolve() / f"gpu-{date}-{options.card}-{part.name}.json"
    arguments = (*TINY, *part.tiny) if options.tiny else part.arguments
    print(f"{part.name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-m", f"bench.gpu.{part.module}", *arguments),
                *("--limit-s", f"{0.9 * seconds:.0f}", "--out", str(out)),
            ],
            cwd=ROOT,
            env=child_environment(ROOT),
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        print(f"{part.name}: took longer", file=sys.stderr, flush=True)
        return False
    return done.returncode == 0


if __name__ == "__main__":
    main()
