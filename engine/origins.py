"""Where the rows of a plane are: pure bookkeeping, no arrays.

Theory. A plane holds the rows of positions ``[origin_logical, origin_logical + length)`` in a
buffer of ``capacity`` rows. The oldest row lies at ``origin_physical``, the others follow it and
continue at 0 after the buffer's end. Placement follows these origins and is never derived from an
absolute position. Both origins start at 0 and advance together, so after any history of calls
``origin_physical == origin_logical % capacity``: a restored plane can be rotated as a grown one
would be, and since attention sums rows in physical order, that makes its bits the same.

States of a ring: *filling* (``length < capacity``, origins 0, slots ``[0, length)`` are live),
*full* (``length == capacity``, every slot is live and the next row overwrites the oldest). A full
plane's capacity is the whole context; it never wraps and its origins stay 0.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from engine.errors import CacheDiscontinuity, ContextLimitError, RowsNotLiveError

#: Smallest growth of a plane's memory, in rows.
GROWTH_STEP_ROWS: Final = 256


class PlaneLayout(enum.Enum):
    """Axis order of a plane's buffer, batch axis first."""

    TOKEN_MAJOR = "token-major"  # noqa: S105  not a secret: [1, rows, kv_heads, dim]
    HEAD_MAJOR = "head-major"  # [1, kv_heads, rows, dim]


class Route(enum.Enum):
    """What attention reads after a call's rows were handed over."""

    IN_PLACE = "in-place"
    STAGED = "staged"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of rows that is contiguous in logical and in physical order.

    Attributes:
        offset: First row, counted from the start of the range that was asked for.
        physical: Slot of that row.
        count: Rows.
    """

    offset: int
    physical: int
    count: int


@dataclass(frozen=True, slots=True)
class OriginsMark:
    """The three integers of a plane that a later rewind needs."""

    length: int
    origin_logical: int
    origin_physical: int


class Origins:
    """The five numbers of one plane, and the only code that changes them.

    Attributes:
        layer: Index of the layer, for errors.
        capacity: Rows that the plane can hold.
        wraps: True for a ring. False for a full plane, which refuses to overflow.
        length: Live rows.
        origin_logical: Position of the oldest live row.
        origin_physical: Its slot.
    """

    __slots__ = ("capacity", "layer", "length", "origin_logical", "origin_physical", "wraps")

    def __init__(self, layer: int, capacity: int, *, wraps: bool) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 row, not {capacity}")
        self.layer = layer
        self.capacity = capacity
        self.wraps = wraps
        self.length = 0
        self.origin_logical = 0
        self.origin_physical = 0

    @classmethod
    def restored(cls, layer: int, capacity: int, position: int, *, wraps: bool) -> Origins:
        """The origins of a plane that has seen exactly ``position`` tokens.

        Raises:
            ContextLimitError: A plane that does not wrap cannot hold ``position`` rows.
        """
        origins = cls(layer, capacity, wraps=wraps)
        origins.append_batch(0, position)
        return origins

    @property
    def next_position(self) -> int:
        """Position of the row that is appended next."""
        return self.origin_logical + self.length

    def append(self, position: int) -> int:
        """Reserve the slot of one row and return it.

        Raises:
            CacheDiscontinuity: ``position`` is not the next one. Nothing changed.
            ContextLimitError: A plane that does not wrap is full. Nothing changed.
        """
        # As append_batch of one row does it; this runs in every layer at every step.
        length = self.length
        if position != self.origin_logical + length:
            raise CacheDiscontinuity(self.layer, self.next_position, position)
        if length < self.capacity:
            self.length = length + 1
            return (self.origin_physical + length) % self.capacity
        if not self.wraps:
            raise ContextLimitError(self.capacity, length + 1)
        # Full: the oldest row leaves, and its slot is the new one's.
        slot = self.origin_physical
        self.origin_logical += 1
        self.origin_physical = (slot + 1) % self.capacity
        return slot

    def append_batch(self, start: int, count: int) -> tuple[int, int]:
        """Reserve the slots of ``count`` rows from position ``start``.

        Returns:
            ``(source_first, source_count)``: which of the rows handed over are live afterwards.
            All of them, unless the chunk is wider than the ring: then its own head has scrolled
            out before the chunk ends.

        Raises:
            CacheDiscontinuity: ``start`` is not the next position. Nothing changed.
            ContextLimitError: A plane that does not wrap would overflow. Nothing changed.
            ValueError: ``count`` is negative.
        """
        if start != self.next_position:
            raise CacheDiscontinuity(self.layer, self.next_position, start)
        if count < 0:
            raise ValueError(f"count must not be negative, not {count}")
        overflow = max(0, self.length + count - self.capacity)
        if overflow and not self.wraps:
            raise ContextLimitError(self.capacity, self.length + count)
        self.length += count - overflow
        self.origin_logical += overflow
        self.origin_physical = (self.origin_physical + overflow) % self.capacity
        source_first = max(0, self.origin_logical - start)
        return source_first, count - source_first

    def overwritten_by(self, count: int) -> int:
        """How many live rows, the oldest ones, the next ``count`` rows will overwrite."""
        return min(self.length, max(0, self.length + count - self.capacity)) if self.wraps else 0

    def mark(self) -> OriginsMark:
        """Where the rows are now."""
        return OriginsMark(self.length, self.origin_logical, self.origin_physical)

    def rewind(self, mark: OriginsMark) -> None:
        """Be as at ``mark``. Rows overwritten since are the caller's to write back."""
        self.length = mark.length
        self.origin_logical = mark.origin_logical
        self.origin_physical = mark.origin_physical

    def require_live(self, first: int, count: int) -> None:
        """Check that rows ``[first, first + count)`` are live.

        Raises:
            RowsNotLiveError: One of them is not.
        """
        if count < 0 or first < self.origin_logical or first + count > self.next_position:
            live = (self.origin_logical, self.next_position)
            raise RowsNotLiveError(self.layer, live, (first, first + count))

    def segments(self, first: int, count: int) -> Iterator[Segment]:
        """Yield the one or two contiguous runs of live rows ``[first, first + count)``, in order.

        Raises:
            RowsNotLiveError: A row of the range is not live.
        """
        self.require_live(first, count)
        start = (self.origin_physical + first - self.origin_logical) % self.capacity
        before_seam = min(count, self.capacity - start)
        if before_seam:
            yield Segment(0, start, before_seam)
        if count > before_seam:
            yield Segment(before_seam, 0, count - before_seam)


def attention_route(origins: Origins, count: int) -> Route:
    """Which rows attention reads for a call of ``count`` tokens; a function of shapes alone.

    - One token: written first, then the buffer is read in physical order. On a full ring the slot
      it takes held position ``p - window``, which the query at ``p`` does not see.
    - A chunk that fits without overwriting: the same. Logical and physical order agree.
    - A chunk that would overwrite: its first queries still need the rows that its last ones
      replace. Old rows in logical order and the chunk after them are staged, attention reads that
      span, and only then the ring is written.
    """
    overwrites = origins.length + count > origins.capacity
    return Route.STAGED if count > 1 and overwrites else Route.IN_PLACE


def physical_rows(length: int, capacity: int) -> int:
    """Rows of memory for a plane of ``length`` live rows; a function of ``length`` alone.

    Rungs are multiples of 256 up to 4,096 rows and an eighth of the power of two below from there
    on, so growth copies each row a bounded number of times and wastes at most an eighth. A grown
    and an installed plane of equal length have equal memory, whatever their histories.
    """
    if length == 0:
        return 0
    step = max(GROWTH_STEP_ROWS, (1 << ((length - 1).bit_length() - 1)) // 8 if length > 1 else 0)
    return min(capacity, -(-length // step) * step)
