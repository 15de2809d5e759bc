"""What a checkpoint retains of the planes, and how it puts it back.

Rows that fall into free slots need nothing: taking them back is three integers, and the slots they
leave are not live, so nothing can read them. That covers full planes and rings that still have
room. A ring that is full, or becomes full within the block, loses its oldest rows to the block. So
of those, and only of those, a copy is made before the block is computed: at most as many rows as
the block has tokens, whatever the context's length.

Beside them the block's own rows are noted while they are handed over. Where a block is wider than
the ring, its head has scrolled out before the block ends; should the head be all that stays, it
has to come from somewhere.

Undoing is always the same: the three integers, the overwritten rows to the slots they came from,
and then the rows that stay, appended anew. The rotation is a function of the position before, in
between and after. Memory is one too: what grew for rows that do not stay is given back.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from engine.cache import PlaneCache
from engine.planes import Plane

#: Keys and values of some rows, ``[1, kv_heads, rows, dim]`` each.
Rows = tuple[mx.array, mx.array]


class PlaneMark:
    """One plane as it was, for as long as a block may still be undone.

    Attributes:
        plane: The live plane.
        retained: Copy of the rows that the block will overwrite, oldest first, keys and values of
            a row side by side: ``[1, kv_heads, rows, key_dim + value_dim]``. None where the block
            overwrites nothing.
    """

    __slots__ = ("_mark", "_noted", "_reuses_slots", "plane", "retained")

    def __init__(self, plane: Plane, token_count: int) -> None:
        """Mark ``plane``; the copy is lazy until somebody evaluates :attr:`retained`."""
        self.plane = plane
        self._mark = plane.origins.mark()
        self._noted: list[Rows] = []
        overwritten = plane.origins.overwritten_by(token_count)
        # More than what is overwritten: a block wider than an empty ring replaces its own head.
        self._reuses_slots = plane.length + token_count > plane.capacity
        self.retained: mx.array | None = None
        if overwritten:
            # Joining two arrays always copies. A slice alone would pin the buffer, and the block's
            # first write would then copy the whole plane.
            keys, values = plane.ordered(plane.origin_logical, overwritten)
            self.retained = mx.concatenate([keys, values], axis=-1)

    @property
    def retained_rows(self) -> int:
        """Rows that were copied."""
        return 0 if self.retained is None else self.retained.shape[2]

    def note(self, keys: mx.array, values: mx.array) -> None:
        """Remember rows of the block that may not stay in the slots they were written to."""
        if self._reuses_slots:
            self._noted.append((keys, values))

    def rewind(self, kept_tokens: int) -> None:
        """Undo all rows since the mark but the first ``kept_tokens``. Lazy; the caller evaluates.

        A call that stopped before it reached this plane has left nothing to undo, and undoing
        nothing is harmless.
        """
        self._rewind_rows(kept_tokens)
        self.plane.shrink()

    def _rewind_rows(self, kept_tokens: int) -> None:
        origins = self.plane.origins
        origins.rewind(self._mark)
        if not self._reuses_slots:
            # The rows that stay lie where they were written.
            origins.append_batch(origins.next_position, kept_tokens)
            return
        if self.retained is not None:
            key_dim = self.plane.shape.key_dim
            old_keys, old_values = self.retained[..., :key_dim], self.retained[..., key_dim:]
            self.plane.replace(origins.origin_logical, old_keys, old_values)
        if kept_tokens:
            self.plane.append_batch(origins.next_position, *self._first_noted(kept_tokens))

    def _first_noted(self, count: int) -> Rows:
        keys = mx.concatenate([keys for keys, _ in self._noted], axis=2)
        values = mx.concatenate([values for _, values in self._noted], axis=2)
        return keys[:, :, :count], values[:, :, :count]


class RecordingCache(PlaneCache):
    """A plane's cache that notes what a block hands over, and is the same in all else."""

    __slots__ = ("_mark",)

    def __init__(self, mark: PlaneMark, window_tokens: int | None) -> None:
        """Stand in for the cache of ``mark.plane``."""
        super().__init__(mark.plane, window_tokens)
        self._mark = mark

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As :meth:`PlaneCache.update_and_fetch`; noted first, so that a failed write is undone.

        Raises:
            CacheDiscontinuity: The layers stand at different positions.
            ContextLimitError: The context is full.
            ValueError: Shape or dtype is not the layer's.
        """
        self._mark.note(keys, values)
        return super().update_and_fetch(keys, values)


def mark_planes(planes: Sequence[Plane], token_count: int) -> list[PlaneMark]:
    """Mark every plane for a block of ``token_count`` tokens; all copies are made on return."""
    marks = [PlaneMark(plane, token_count) for plane in planes]
    mx.eval([mark.retained for mark in marks if mark.retained is not None])
    return marks


def rewind_planes(marks: Sequence[PlaneMark], kept_tokens: int) -> None:
    """Undo the block but its first ``kept_tokens`` tokens; evaluated on return."""
    for mark in marks:
        mark.rewind(kept_tokens)
    mx.eval([array for mark in marks for array in mark.plane.arrays()])
