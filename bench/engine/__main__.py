"""``python -m bench.engine``: every measurement of the engine, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.engine.cut import cut_stall
from bench.engine.decode import decode_against_mlx_lm
from bench.engine.layouts import chunks_by_layout, decode_by_layout
from bench.engine.measure import Timed
from bench.engine.models import tiny_folder
from bench.engine.rollback import rollback_by_context
from engine import PlaneLayout

PARTS = ("decode", "rollback", "cut", "layouts")
ARCHITECTURES = ("muse_glimmer", "cohere2", "exaone4")


@dataclass(frozen=True)
class Row:
    """One measurement: what, against what, the bound that is wanted, and what was found."""

    name: str
    against: str
    wanted: str
    timed: Timed
    note: str = ""

    def as_json(self) -> dict[str, object]:
        ours_s, theirs_s = self.timed.medians_s
        return {
            "name": self.name,
            "against": self.against,
            "wanted": self.wanted,
            "ratio": self.timed.ratio,
            "middle_half": self.timed.spread,
            "best_ratio": self.timed.best_ratio,
            "ours_s": ours_s,
            "theirs_s": theirs_s,
            "rounds": len(self.timed.ours_s),
            "note": self.note,
        }

    def markdown(self) -> str:
        low, high = self.timed.spread
        ours_s, theirs_s = self.timed.medians_s
        return (
            f"| {self.name} | {self.against} | {self.timed.ratio:.2f} ({low:.2f} to {high:.2f}) | "
            f"{self.timed.best_ratio:.2f} | {1e3 * ours_s:.2f} / {1e3 * theirs_s:.2f} | "
            f"{self.wanted} | {self.note} |"
        )


def measure(parts: list[str], folder: Path | None, scale: float) -> Iterator[Row]:
    """Run what was asked for."""

    def rounds(count: int) -> int:
        return max(3, int(count * scale))

    if "decode" in parts:
        yield from _decode(folder, rounds(40))
    if "rollback" in parts:
        with tiny_folder() as tiny:
            found = rollback_by_context(tiny, rounds(150))
        rows = f"rows retained: {found.far_rows} and {found.near_rows}"
        yield Row("rollback, 100 windows", "2 windows", "<= 1.10", found.timed, rows)
    if "cut" in parts:
        for layout in PlaneLayout:
            stall = cut_stall(rounds(15), layout)
            note = f"{stall.ring_bytes:,} B"
            yield Row(f"cut, {layout.value}", "plain copy", "<= 1.30", stall.timed, note)
    if "layouts" in parts:
        yield from _layouts(rounds(15))


def _decode(folder: Path | None, rounds: int) -> Iterator[Row]:
    if folder is not None:
        timed = decode_against_mlx_lm(folder, rounds)
        yield Row("decode, --model", "mlx-lm's loop", "<= 1.00", timed)
    for arch in ARCHITECTURES:
        with tiny_folder(arch) as tiny:
            timed = decode_against_mlx_lm(tiny, rounds)
        yield Row(f"decode, tiny {arch}", "mlx-lm's loop", "<= 1.00", timed)


def _layouts(rounds: int) -> Iterator[Row]:
    for window, context in ((64, 512), (1024, 2048)):
        with tiny_folder(window=window) as tiny:
            name = f"window {window}, context {context}"
            steps = decode_by_layout(tiny, context, rounds)
            chunks = chunks_by_layout(tiny, context, rounds)
        yield Row(f"decode head-major, {name}", "token-major", "", steps)
        yield Row(f"chunk of 128 head-major, {name}", "token-major", "", chunks)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all")
    parser.add_argument(
        "--model", type=Path, help="a model folder for decode, beside the tiny ones"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual rounds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(options.only or list(PARTS), options.model, options.scale)
    if options.json:
        json.dump([row.as_json() for row in rows], sys.stdout)
        sys.stdout.write("\n")
        return
    print("| what | against | ratio, median (middle half) | quickest | ms | wanted | |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(row.markdown(), flush=True)


if __name__ == "__main__":
    main()
