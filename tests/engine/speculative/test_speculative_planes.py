"""Checkpoints of planes against a plain list: every row ever written carries its own number."""

from __future__ import annotations

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from engine_support import HEAD, TOKEN
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache import PlaneCache
from engine.checkpoint import BLOCK_TOKENS_MAX, Checkpoint
from engine.origins import PlaneLayout
from engine.planes import Plane, PlaneShape
from kvpack.identity import CallSchedule
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout

WINDOW, CONTEXT, HEADS, KEY_DIM, VALUE_DIM = 5, 90, 2, 3, 1
LAYOUT = CacheLayout(
    (
        LayerLayout(LayerKind.SWA, WINDOW, HEADS, KEY_DIM, VALUE_DIM),
        LayerLayout(LayerKind.SWA, 3 * WINDOW, HEADS, KEY_DIM, VALUE_DIM),
        LayerLayout(LayerKind.FULL, None, HEADS, KEY_DIM, VALUE_DIM),
    ),
    Encoding.F32LE,
    CONTEXT,
)


def numbered(numbers: list[int], dim: int, sign: int) -> np.ndarray:
    """Rows ``[rows, heads, dim]`` whose elements tell number, head and dimension."""
    heads = np.arange(HEADS).reshape(1, -1, 1) * 4
    rows = np.array(numbers, np.float32).reshape(-1, 1, 1) * 8 + heads + np.arange(dim) + 1
    return (sign * rows).astype(np.float32)


def arrays(numbers: list[int]) -> tuple[mx.array, mx.array]:
    """The rows as attention's arrays ``[1, heads, rows, dim]``."""
    keys, values = numbered(numbers, KEY_DIM, 1), numbered(numbers, VALUE_DIM, -1)
    return mx.array(keys.transpose(1, 0, 2)[None]), mx.array(values.transpose(1, 0, 2)[None])


class CheckpointMachine(RuleBasedStateMachine):
    """Two rings and a full plane, fed alike; the model is the list of rows that were not undone."""

    layout = HEAD

    def __init__(self) -> None:
        super().__init__()
        shapes = [PlaneShape.of(LAYOUT, layer, self.layout) for layer in range(3)]
        self.planes = [Plane(shape) for shape in shapes]
        self.rows: list[int] = []
        self.written = 0
        self.open: Checkpoint | None = None
        self.schedule = CallSchedule()
        self.position = 0

    def fresh(self, count: int) -> list[int]:
        self.written += count
        return list(range(self.written - count, self.written))

    def hand_over(self, caches: list[PlaneCache], numbers: list[int]) -> None:
        keys, values = arrays(numbers)
        for cache in caches:
            span_keys, _ = cache.update_and_fetch(keys, values)
            # What attention reads ends with the call's own rows, overwritten ones included.
            seen = sorted(((np.array(span_keys)[0, 0, :, 0] - 1) / 8).astype(int).tolist())
            assert seen[-len(numbers) :] == numbers

    @precondition(lambda self: self.open is None and len(self.rows) < CONTEXT - 40)
    @rule(count=st.integers(1, 13))
    def append(self, count: int) -> None:
        numbers = self.fresh(count)
        windows = [layer.window_tokens for layer in LAYOUT.layers]
        caches = [PlaneCache(p, w) for p, w in zip(self.planes, windows, strict=True)]
        self.hand_over(caches, numbers)
        self.rows += numbers
        self.schedule = self.schedule.after_call(count)
        self.position = len(self.rows)

    @precondition(lambda self: self.open is None and len(self.rows) < CONTEXT - 16)
    @rule(count=st.integers(1, BLOCK_TOKENS_MAX))
    def mark(self, count: int) -> None:
        self.open = Checkpoint(self.planes, self.schedule, count, self.settled)
        self.undecided: list[int] = []
        held = [min(len(self.rows), plane.capacity) for plane in self.planes[:2]]
        lost = [
            min(rows, max(0, rows + count - plane.capacity))
            for rows, plane in zip(held, self.planes, strict=False)
        ]
        assert self.open.retained_rows == sum(lost) <= 2 * count

    @precondition(lambda self: self.open is not None and self.open.computed_tokens < 16)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        assert self.open is not None
        room = self.open.token_count - self.open.computed_tokens
        if room:
            numbers = self.fresh(data.draw(st.integers(1, room)))
            self.hand_over(self.open.caches(LAYOUT), numbers)
            self.open.note_call(len(numbers))
            self.undecided += numbers

    @precondition(lambda self: self.open is not None)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        assert self.open is not None
        kept = data.draw(st.integers(0, len(self.undecided)))
        self.open.accept(kept)
        self.rows += self.undecided[:kept]
        assert self.open is None

    @precondition(lambda self: self.open is not None)
    @rule(reached=st.integers(0, 3))
    def stop_half_way(self, reached: int) -> None:
        """A call that only some planes saw, and then everything is undone."""
        assert self.open is not None
        room = self.open.token_count - self.open.computed_tokens
        if room:
            self.hand_over(self.open.caches(LAYOUT)[:reached], self.fresh(room))
        self.open.roll_back()
        assert self.open is None

    def settled(self, position: int, schedule: CallSchedule) -> None:
        self.open, self.position, self.schedule = None, position, schedule

    @invariant()
    def planes_hold_the_last_rows_of_the_list(self) -> None:
        if self.open is not None:
            return
        assert self.position == self.schedule.position == len(self.rows)
        for plane in self.planes:
            held = min(len(self.rows), plane.capacity)
            assert plane.length == held
            assert plane.origin_logical == len(self.rows) - held
            assert plane.origin_physical == plane.origin_logical % plane.capacity or (
                not plane.shape.wraps and plane.origin_physical == 0
            )
            if held:
                expected = self.rows[-held:]
                keys, values = plane.host_rows(plane.origin_logical, held)
                assert keys == numbered(expected, KEY_DIM, 1).tobytes()
                assert values == numbered(expected, VALUE_DIM, -1).tobytes()


class TokenMajorCheckpointMachine(CheckpointMachine):
    layout = TOKEN


TestHeadMajor = CheckpointMachine.TestCase
TestTokenMajor = TokenMajorCheckpointMachine.TestCase
_SETTINGS = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestHeadMajor.settings = TestTokenMajor.settings = _SETTINGS


@pytest.mark.parametrize("layout", [HEAD, TOKEN])
def test_retained_rows_do_not_share_the_planes_memory(layout: PlaneLayout) -> None:
    """A slice that pinned the buffer would make the block's first write copy the whole plane."""
    plane = Plane(PlaneShape.of(LAYOUT, 0, layout))
    plane.append_batch(0, *arrays(list(range(9))))
    checkpoint = Checkpoint([plane], CallSchedule().after_call(9), 2, lambda *_: None)
    before = [np.array(array, copy=False) for array in plane.arrays()]
    caches = checkpoint.caches(CacheLayout(LAYOUT.layers[:1], LAYOUT.encoding, CONTEXT))
    caches[0].update_and_fetch(*arrays([9, 10]))
    mx.eval(plane.arrays())

    # MLX wrote in place: views taken before see the block's rows.
    after = [np.array(array, copy=False) for array in plane.arrays()]
    assert all(np.shares_memory(a, b) for a, b in zip(before, after, strict=True))
