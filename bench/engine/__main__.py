"""``python -m bench.engine``: every measurement of the engine, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import engine
from bench.engine.cut import cut_stall
from bench.engine.decode import decode_against_mlx_lm
from bench.engine.layouts import chunks_by_layout, decode_by_layout
from bench.engine.measure import Timed
from bench.engine.models import tiny_folder
from bench.engine.reference import Geometry, reference_decode, reference_rollback
from bench.engine.rollback import Rollback, rollback_by_context
from engine import PlaneLayout, backend

#: What is measured unless something is asked for.
USUAL = ("decode", "rollback", "cut", "layouts")
PARTS = (*USUAL, "reference")
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
            "cpu_ratio": self.timed.cpu_ratio,
            "rounds": len(self.timed.ours_s),
            "rounds_s": {"ours": self.timed.ours_s, "theirs": self.timed.theirs_s},
            "note": self.note,
        }

    def markdown(self) -> str:
        low, high = self.timed.spread
        ours_s, theirs_s = self.timed.medians_s
        return (
            f"| {self.name} | {self.against} | {self.timed.ratio:.2f} ({low:.2f} to {high:.2f}) | "
            f"{self.timed.best_ratio:.2f} | {self.timed.cpu_ratio:.2f} | "
            f"{1e3 * ours_s:.2f} / {1e3 * theirs_s:.2f} | "
            f"{self.wanted} | {self.note} |"
        )


def measure(
    parts: list[str], folder: Path | None, scale: float, geometry: Geometry
) -> Iterator[Row]:
    """Run what was asked for."""

    def rounds(count: int) -> int:
        return max(3, int(count * scale))

    if "decode" in parts:
        yield from _decode(folder, rounds(40))
    if "rollback" in parts:
        small = Geometry(window=64)
        yield _rollback("planes of 52 layers", reference_rollback(small, rounds(100)))
        with tiny_folder() as tiny:
            found = rollback_by_context(engine.load_model(tiny), rounds(100))
        yield _rollback("tiny muse_glimmer", found, wanted="")
    if "reference" in parts:
        yield from _reference(geometry, rounds)
    if "cut" in parts:
        for layout in PlaneLayout:
            stall = cut_stall(rounds(15), layout)
            note = f"{stall.ring_bytes:,} B"
            yield Row(f"cut, {layout.value}", "plain copy", "<= 1.30", stall.timed, note)
    if "layouts" in parts:
        yield from _layouts(rounds(15))


def _decode(folder: Path | None, rounds: int) -> Iterator[Row]:
    if folder is not None:
        timed, same = decode_against_mlx_lm(folder, rounds)
        yield Row("decode, --model", "mlx-lm's loop", "<= 1.00", timed, same)
    for arch in ARCHITECTURES:
        with tiny_folder(arch) as tiny:
            timed, same = decode_against_mlx_lm(tiny, rounds)
        yield Row(f"decode, tiny {arch}", "mlx-lm's loop", "<= 1.00", timed, same)


def _rollback(name: str, found: Rollback, wanted: str = "<= 1.10") -> Row:
    note = (
        f"rows retained: {found.far_rows} and {found.near_rows}; "
        f"memory: {found.far_bytes:,} and {found.near_bytes:,} B; the block's own call, apart: "
        f"{1e3 * found.far_block_s:.2f} and {1e3 * found.near_block_s:.2f} ms"
    )
    return Row(f"rollback, {name}, 100 windows", "2 windows", wanted, found.timed, note)


def _reference(geometry: Geometry, rounds: Callable[[int], int]) -> Iterator[Row]:
    loops = reference_decode(geometry, rounds(40))
    name = f"decode, {geometry.layers} layers, window {geometry.window}, hidden {geometry.hidden}"
    ahead = ("", ", not built ahead") if loops.builds_ahead else ("", ", built ahead")
    against = "mlx-lm's loop"
    yield Row(name, against, "<= 1.00", loops.as_is, loops.agreement)
    yield Row(f"{name}, logits read", against, "", loops.read)
    yield Row(f"{name}{ahead[1]}", against, "", loops.other)
    found = reference_rollback(geometry, rounds(60))
    yield _rollback(f"planes of {geometry.layers} layers, window {geometry.window}", found)


def _layouts(rounds: int) -> Iterator[Row]:
    for window, context in ((64, 512), (1024, 2048)):
        with tiny_folder(window=window) as tiny:
            name = f"window {window}, context {context}"
            steps = decode_by_layout(tiny, context, rounds)
            chunks = chunks_by_layout(tiny, context, rounds)
        yield Row(f"decode head-major, {name}", "token-major", "", steps)
        yield Row(f"chunk of 128 head-major, {name}", "token-major", "", chunks)


def _told(rows: Iterator[Row]) -> Iterator[Row]:
    """Each row as soon as it is there, on standard error: a run that is cut short has said it."""
    for row in rows:
        print(row.markdown(), file=sys.stderr, flush=True)
        yield row


def machine() -> dict[str, str]:
    """What was measured on, as far as a ratio needs it."""
    versions = {name: version(name) for name in ("mlx", "mlx-lm")}
    return {"device": backend.device_description(), "backend": backend.backend_name(), **versions}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all")
    parser.add_argument(
        "--model", type=Path, help="a model folder for decode, beside the tiny ones"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual rounds")
    parser.add_argument("--json", action="store_true")
    default = Geometry()
    shape = parser.add_argument_group("geometry of --only reference")
    shape.add_argument("--layers", type=int, default=default.layers)
    shape.add_argument("--window", type=int, default=default.window)
    shape.add_argument("--hidden", type=int, default=default.hidden)
    shape.add_argument("--query-heads", type=int, default=default.query_heads)
    shape.add_argument("--limit-s", type=float, default=default.limit_s, help="of each part")
    options = parser.parse_args()
    geometry = Geometry(
        options.layers, options.window, options.hidden, options.query_heads, options.limit_s
    )
    rows = measure(options.only or list(USUAL), options.model, options.scale, geometry)
    if options.json:
        found = {"machine": machine(), "rows": [row.as_json() for row in _told(rows)]}
        json.dump(found, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    print("| what | against | ratio, median (middle half) | quickest | processor | ms | wanted | |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(row.markdown(), flush=True)


if __name__ == "__main__":
    main()
