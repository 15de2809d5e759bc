"""Rows out of a GPU's planes and back: rate against plain copies of the same run, and every byte.

    python -m bench.gpu.snapshot --context 32768 --out snapshot.json

A model of the reference geometry (52 layers, window 2,048, 2 heads of keys and values of 128) with
random weights computes ``--context`` tokens. Then, in turns, ``--rounds`` times:

- plain copies, device to host, of as many bytes as the cut has: to page-locked memory, to ordinary
  memory that is there, to ordinary memory as it comes; PyTorch's too, where PyTorch is;
- *stream*: every tile of the cut, ``--batch`` at a time and then dropped, as a transfer does; also
  4 at a time, which is what a live session is held for;
- *cut*: every tile of the cut, all of them kept.

Then *install*: the cut's tiles into a new generation, against plain copies host to device; its next
64 steps are compared with the source's, bit for bit. Then once, because it is slow, tiles by MLX's
host views: their bytes are compared with those of the copies. Decode steps are timed before any
reading, after the copies, after the views, and after an install by either.

Small, on a CPU: ``--layers 4 --window 64 --hidden 64 --query-heads 4 --context 600 --rounds 3``.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

import engine
from bench.engine.reference import reference_folder
from bench.gpu.common import (
    Limit,
    geometry,
    parser,
    peak_host_bytes,
    summary,
    timed,
    token_ids,
    write,
)
from bench.gpu.copies import PlainCopies, copier_here, memory_here, torch_copies
from engine import Generation, Model
from engine.device_route import going_by
from kvpack.identity import CallRun, CallSchedule
from kvpack.snapshot import Tile, TileSpec, cut_tile_specs

STEPS = 24
REPLAY_STEPS = 64
SMALL_BATCH = 4
GB = 1e9

#: What is timed, and how many bytes it moves.
Works = dict[str, tuple[Callable[[], object], int]]


def main() -> None:
    """Measure and write."""
    options = _options()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    limit = Limit(options.limit_s)
    with reference_folder(geometry(options)) as folder:
        model = engine.load_model(folder)
        limit.say("model loaded")
        results = Snapshots(model, options, limit).measure()
    write(options.out, "snapshot", options, limit, results)


def _options() -> argparse.Namespace:
    made = parser("snapshot", __doc__, 240.0)
    made.add_argument("--context", type=int, default=32_768, help="tokens (default: 32,768)")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--batch", type=int, default=16, help="tiles read at once (default: 16)")
    made.add_argument("--view-bytes", type=int, default=1 << 30, help="at most, by host views")
    return made.parse_args()


@dataclass
class Rates:
    """Gigabytes a second, round by round; the first round apart: later ones find its memory."""

    rounds: dict[str, list[float]]
    first: dict[str, float]

    def ratio(self, ours: str, theirs: str) -> dict[str, float | int]:
        pairs = zip(self.rounds[ours], self.rounds[theirs], strict=True)
        return summary([a / b for a, b in pairs])

    def as_json(self) -> dict[str, object]:
        return {
            "gbytes_per_s": {name: summary(found) for name, found in self.rounds.items()},
            "first_round_gbytes_per_s": self.first,
        }


class Snapshots:
    """One session, and everything that is measured on it."""

    def __init__(self, model: Model, options: argparse.Namespace, limit: Limit) -> None:
        self.model = model
        self.options = options
        self.limit = limit
        # Room for the steps that follow.
        tokens = min(options.context, model.layout.max_context_tokens - 600)
        self.generation = model.new_generation()
        self.results: dict[str, object] = {"context_tokens": tokens}
        seconds = timed(lambda: self._prefill(token_ids(tokens, model.vocab_size)))
        self.results["prefill_s"] = seconds
        limit.say(f"{tokens} tokens computed in {seconds:.2f} s")
        self.steps: dict[str, list[float]] = {}

    def _prefill(self, ids: Sequence[int]) -> None:
        done = 0
        for calls in engine.prefill_calls(0, len(ids)):
            self.generation.prefill(ids[done : done + calls])
            done += calls

    def measure(self) -> dict[str, object]:
        self._time_steps("before", self.generation)
        self.copies = copier_here(memory_here())
        self.results["copied_by"] = self.copies.name
        self._out()
        self._time_steps("after_copies", self.generation)
        tiles = self._in()
        if self.limit.allows("host views", 5.0):
            self._views(tiles)
        self.results["step_s"] = {
            name: {"first": seconds[0], **summary(seconds[1:])}
            for name, seconds in self.steps.items()
        }
        self.results["peak_device_bytes"] = mx.get_peak_memory()
        self.results["peak_host_bytes"] = peak_host_bytes()
        return self.results

    def _specs(self) -> list[TileSpec]:
        return list(cut_tile_specs(self.generation.layout, self.generation.position))

    def _time_steps(self, name: str, generation: Generation) -> None:
        tokens = token_ids(STEPS, self.model.vocab_size)
        self.steps[name] = [timed(lambda t=t: generation.step(t)) for t in tokens]
        self.limit.say(f"a step, {name}: {1e3 * summary(self.steps[name][1:])['median']:.2f} ms")

    def _out(self) -> None:
        """Device to host."""
        specs = self._specs()
        total = sum(spec.data_bytes(self.generation.layout) for spec in specs)
        self.results |= {"cut_bytes": total, "tiles": len(specs)}
        plain = PlainCopies(memory_here(), total)
        works: Works = {
            "plain_to_pinned": (plain.to_pinned, plain.total_bytes),
            "plain_to_pageable": (plain.to_pageable, plain.total_bytes),
            "plain_to_fresh": (plain.to_fresh, plain.total_bytes),
            "stream": (lambda: self._stream(specs, self.options.batch), total),
            "stream_of_4": (lambda: self._stream(specs, SMALL_BATCH), total),
            "cut": (lambda: self.generation.read_tiles(specs), total),
        }
        works |= {name: (work, total) for name, work in torch_copies(total).items()}
        with going_by(self.copies):
            rates = self._in_turns("device to host", works)
        self.results["device_to_host"] = rates.as_json() | {
            "stream_over_plain_pinned": rates.ratio("stream", "plain_to_pinned"),
            "stream_of_4_over_plain_pinned": rates.ratio("stream_of_4", "plain_to_pinned"),
            "stream_over_plain_pageable": rates.ratio("stream", "plain_to_pageable"),
            "cut_over_plain_pageable": rates.ratio("cut", "plain_to_pageable"),
            "cut_over_plain_fresh": rates.ratio("cut", "plain_to_fresh"),
        }

    def _stream(self, specs: Sequence[TileSpec], batch_tiles: int) -> None:
        for first in range(0, len(specs), batch_tiles):
            self.generation.read_tiles(specs[first : first + batch_tiles])

    def _in_turns(self, name: str, works: Works) -> Rates:
        found = Rates({key: [] for key in works}, {})
        for turn in range(self.options.rounds + 1):
            if turn > 1 and not self.limit.allows(f"{name}, round {turn}"):
                break
            for key, (work, size) in works.items():
                rate = size / timed(work) / GB
                if turn == 0:
                    found.first[key] = rate
                else:
                    found.rounds[key].append(rate)
                gc.collect()
        for key, rates in found.rounds.items():
            self.limit.say(f"{name}, {key}: {summary(rates)['median']:.2f} GB/s")
        return found

    def _in(self) -> list[Tile]:
        """Host to device, and what the installed generation says next."""
        with going_by(self.copies):
            tiles = [
                Tile(spec, bytes(tile.data))
                for spec in self._specs()
                for tile in self.generation.read_tiles([spec])
            ]
            total = sum(len(tile.data) for tile in tiles)
            plain = PlainCopies(memory_here(), total)
            works: Works = {
                "plain_from_pinned": (plain.from_pinned, plain.total_bytes),
                "plain_from_pageable": (plain.from_pageable, plain.total_bytes),
                "install": (lambda: self._installed(tiles), total),
            }
            rates = self._in_turns("host to device", works)
            installed = self._installed(tiles)
        self.results["host_to_device"] = rates.as_json() | {
            "install_over_plain_pageable": rates.ratio("install", "plain_from_pageable")
        }
        tokens = token_ids(REPLAY_STEPS, self.model.vocab_size)
        position = self.generation.position
        twin = [self.generation.step(token).data for token in tokens]
        ours = [installed.step(token).data for token in tokens]
        equal = sum(a == b for a, b in zip(ours, twin, strict=True))
        self.results["replay"] = {"position": position, "equal": equal, "steps": REPLAY_STEPS}
        self.limit.say(f"installed: {equal} of {REPLAY_STEPS} steps equal")
        self._time_steps("installed_by_copies", installed)
        return tiles

    def _installed(self, tiles: Sequence[Tile]) -> Generation:
        position = max(tile.spec.end_position for tile in tiles)
        installer = self.model.installer(position)
        for tile in tiles:
            installer.scatter(tile)
        return installer.finish(CallSchedule((CallRun(position, 1),)))

    def _views(self, tiles: Sequence[Tile]) -> None:
        """By MLX's host views: as many tiles as there are bytes for, windows first."""
        budget, sample = self.options.view_bytes, []
        for spec in reversed(self._specs()):
            budget -= spec.data_bytes(self.generation.layout)
            if sample and budget < 0:
                break
            sample.append(spec)
        with going_by(self.copies):
            copied = [bytes(self.generation.read_tile(spec).data) for spec in sample]
        found: list[Tile] = []
        with going_by(None):
            seconds = timed(lambda: found.extend(self.generation.read_tiles(sample)))
        size = sum(len(data) for data in copied)
        equal = sum(bytes(tile.data) == data for tile, data in zip(found, copied, strict=True))
        views: dict[str, object] = {
            "read_gbytes_per_s": size / seconds / GB,
            "bytes": size,
            "tiles": len(sample),
            "equal_tiles": equal,
        }
        self.results["views"] = views
        self.limit.say(f"views: {size / seconds / GB:.2f} GB/s, {equal} of {len(sample)} equal")
        self._time_steps("after_views", self.generation)
        if self.limit.allows("install by views", 10.0):
            installed: list[Generation] = []
            with going_by(None):
                seconds = timed(lambda: installed.append(self._installed(tiles)))
            total = sum(len(tile.data) for tile in tiles)
            views["install_gbytes_per_s"] = total / seconds / GB
            self._time_steps("installed_by_views", installed[0])


if __name__ == "__main__":
    main()
