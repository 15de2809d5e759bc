"""Taking back a block of 16 tokens after 2 windows and after 100: time and memory are the same.

A block's attention over a long context leaves other caches behind than one over a short context.
That is no part of taking it back, so both begin each timed part with the processor's caches full of
something else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import engine
from bench.engine.measure import Timed, in_turns
from bench.engine.models import token_ids
from engine import Generation, Model

BLOCK_TOKENS = 16
KEPT_TOKENS = 5
NEAR_WINDOWS, FAR_WINDOWS = 2, 100

#: Larger than the caches of one core.
_ELSEWHERE = np.ones(16 << 20, np.uint8)


@dataclass(frozen=True)
class Rollback:
    """What was measured.

    Attributes:
        timed: Seconds of mark and accept: after 100 windows against after 2.
        near_rows: Rows that the checkpoint retained after 2 windows.
        far_rows: After 100.
    """

    timed: Timed
    near_rows: int
    far_rows: int


class Session:
    """A session that computes a block and takes most of it back, always at the same place."""

    def __init__(self, model: Model, windows: int) -> None:
        count = windows * model.window_tokens + 3
        self.generation: Generation = model.new_generation()
        ids, done = token_ids(count), 0
        for call_tokens in engine.prefill_calls(0, count, 256):
            self.generation.prefill(ids[done : done + call_tokens])
            done += call_tokens
        self.retained_rows = 0

    def once(self) -> float:
        """Seconds to mark the state and to settle the block; its computation is not counted."""
        int(_ELSEWHERE.sum())
        start = time.perf_counter()
        checkpoint = self.generation.checkpoint(BLOCK_TOKENS)
        marked = time.perf_counter()
        self.generation.block(token_ids(BLOCK_TOKENS))
        int(_ELSEWHERE.sum())
        computed = time.perf_counter()
        self.retained_rows = checkpoint.retained_rows
        checkpoint.accept(KEPT_TOKENS)
        settled = time.perf_counter()
        return (marked - start) + (settled - computed)


def rollback_by_context(folder: Path, rounds: int) -> Rollback:
    """Two sessions of one model, in turns."""
    model = engine.load_model(folder)
    far, near = (Session(model, windows) for windows in (FAR_WINDOWS, NEAR_WINDOWS))
    timed = in_turns(far.once, near.once, rounds)
    return Rollback(timed, near.retained_rows, far.retained_rows)
