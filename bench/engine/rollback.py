"""Taking back a block of 16 tokens after 2 windows and after 100: time and memory are the same.

Three things are kept apart, because only two of them are the price of being able to take back:

- *mark*: ``Generation.checkpoint``, which copies the rows that the block may overwrite;
- *the block's own forward call*. Its attention reads the whole context in full layers, so it grows
  with the context, with or without a checkpoint. It is measured, but no part of the ratio;
- *settle*: ``accept`` of a part of the block.

A block of a real network leaves other things behind after a long context than after a short one:
the processor's caches full of old rows, its allocator full of score matrices. To keep that out, a
third session computes and takes back a block of its own before each timed part, the same for both.
The ratio is taken with planes of the asked geometry, and rows that nobody computed: planes cannot
tell. The same with a real network is a row of its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import mlx.core as mx

import engine
from bench.engine.measure import Timed, in_turns
from bench.engine.models import token_ids
from engine import Generation

T = TypeVar("T")

BLOCK_TOKENS = 16
KEPT_TOKENS = 5
NEAR_WINDOWS, FAR_WINDOWS = 2, 100
WEIGHINGS = 7


class Windowed(Protocol):
    """A network, real or not, and its smallest window."""

    @property
    def window_tokens(self) -> int: ...

    def new_generation(self) -> Generation: ...


@dataclass(frozen=True)
class Rollback:
    """What was measured, after 100 windows (far) and after 2 (near).

    Attributes:
        timed: Seconds of mark and settle: far against near.
        near_rows: Rows that the checkpoint retained.
        far_rows: Likewise.
        near_bytes: Most memory that mark and settle held beside what was there before them.
        far_bytes: Likewise.
        near_block_s: Quickest forward call of a block.
        far_block_s: Likewise.
    """

    timed: Timed
    near_rows: int
    far_rows: int
    near_bytes: int
    far_bytes: int
    near_block_s: float
    far_block_s: float


class Session:
    """A session that computes a block and takes most of it back, always at the same place."""

    def __init__(self, model: Windowed, windows: int, between: Session | None = None) -> None:
        """Feed ``windows`` windows; ``between`` computes before each timed part."""
        count = windows * model.window_tokens + 3
        self.generation: Generation = model.new_generation()
        ids, done = token_ids(count), 0
        for call_tokens in engine.prefill_calls(0, count, 4 * model.window_tokens):
            self.generation.prefill(ids[done : done + call_tokens])
            done += call_tokens
        self.between = between
        self.retained_rows = 0
        self.extra_bytes = 0
        self.block_s = float("inf")
        self.cpu_s: list[float] = []

    def once(self) -> float:
        """Seconds to mark the state and to settle the block; its computation is not counted."""
        self._look_elsewhere()
        cpu, start = time.process_time(), time.perf_counter()
        checkpoint = self.generation.checkpoint(BLOCK_TOKENS)
        marked, cpu_s = time.perf_counter(), time.process_time() - cpu
        self.generation.block(token_ids(BLOCK_TOKENS))
        self.block_s = min(self.block_s, time.perf_counter() - marked)
        self._look_elsewhere()
        cpu, computed = time.process_time(), time.perf_counter()
        self.retained_rows = checkpoint.retained_rows
        checkpoint.accept(KEPT_TOKENS)
        settled = time.perf_counter()
        self.cpu_s.append(cpu_s + time.process_time() - cpu)
        return (marked - start) + (settled - computed)

    def _look_elsewhere(self) -> None:
        if self.between is not None:
            with self.between.generation.checkpoint(BLOCK_TOKENS):
                self.between.generation.block(token_ids(BLOCK_TOKENS))

    def weigh(self) -> None:
        """Note the memory of a mark and of a settlement, above what was held before each.

        Asked for several times: the peak also holds what a thread has not given back yet.
        """
        mark, checkpoint = _peak_of(lambda: self.generation.checkpoint(BLOCK_TOKENS))
        self.generation.block(token_ids(BLOCK_TOKENS))
        settle, _ = _peak_of(lambda: checkpoint.accept(KEPT_TOKENS))
        self.extra_bytes = min(self.extra_bytes or 1 << 62, max(mark, settle))


def _peak_of(work: Callable[[], T]) -> tuple[int, T]:
    """Bytes that ``work`` held at most beyond what was held before, and its result."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = work()
    return max(0, mx.get_peak_memory() - before), result


def rollback_by_context(model: Windowed, rounds: int, limit_s: float = 600.0) -> Rollback:
    """Two sessions of one network, in turns."""
    between = Session(model, NEAR_WINDOWS)
    far, near = (Session(model, windows, between) for windows in (FAR_WINDOWS, NEAR_WINDOWS))
    timed = in_turns(far.once, near.once, rounds, limit_s=limit_s)
    # Of the timed parts alone, not of whole rounds, of which the blocks are the most.
    count = len(timed.ours_s)
    timed = dataclasses.replace(
        timed, ours_cpu_s=tuple(far.cpu_s[-count:]), theirs_cpu_s=tuple(near.cpu_s[-count:])
    )
    for session in (far, near) * WEIGHINGS:
        session.weigh()
    return Rollback(
        timed,
        near.retained_rows, far.retained_rows,
        near.extra_bytes, far.extra_bytes,
        near.block_s, far.block_s,
    )  # fmt: skip
