"""The mark in a live cache that lets a block of tokens be taken back.

States: *open* until :meth:`Checkpoint.accept` or :meth:`Checkpoint.roll_back`, then *settled* for
good. While it is open the generation computes, but hands out no rows: tokens whose fate is not
decided cannot reach a tile, a snapshot or a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from engine.cache import PlaneCache
from engine.checkpoint_planes import RecordingCache, mark_planes, rewind_planes
from engine.planes import Plane
from kvpack.errors import LimitError
from kvpack.identity import CallSchedule
from kvpack.layout import CacheLayout
from kvpack.limits import SPECULATIVE_BLOCK_TOKENS_MAX, check_range

#: Tokens that one checkpoint can take back.
BLOCK_TOKENS_MAX: Final = SPECULATIVE_BLOCK_TOKENS_MAX


def check_block(token_count: int) -> int:
    """Return ``token_count`` if one checkpoint can take back that many.

    Raises:
        LimitError: It is not 1 to 16.
    """
    return check_range("block.token_count", token_count, 1, BLOCK_TOKENS_MAX, "tokens")


class Checkpoint:
    """A generation as it was, and the calls it made since.

    :meth:`accept` keeps the first rows since the mark and undoes the rest; :meth:`roll_back` undoes
    all of it, also after a call that stopped half way. Leaving a ``with`` block without
    either rolls back, whatever was raised.

    Attributes:
        position: Where the generation stood.
        token_count: Tokens that can be taken back.
    """

    __slots__ = ("_calls", "_marks", "_schedule", "_settle", "position", "token_count")

    def __init__(
        self,
        planes: Sequence[Plane],
        schedule: CallSchedule,
        token_count: int,
        settle: Callable[[int, CallSchedule], None],
    ) -> None:
        """Mark ``planes``, which stand at ``schedule.position``.

        Args:
            planes: The live planes; rows that the block will overwrite are copied now.
            schedule: How their rows were computed.
            token_count: Tokens that can be taken back.
            settle: Told the position and schedule once the rows are settled.

        Raises:
            LimitError: ``token_count`` is not 1 to 16.
        """
        self.token_count = check_block(token_count)
        self.position = schedule.position
        self._schedule = schedule
        self._settle: Callable[[int, CallSchedule], None] | None = settle
        self._calls: list[int] = []
        self._marks = mark_planes(planes, token_count)

    @property
    def is_open(self) -> bool:
        """Whether the block's fate is still undecided."""
        return self._settle is not None

    @property
    def computed_tokens(self) -> int:
        """Tokens of all calls that were completed since the mark."""
        return sum(self._calls)

    @property
    def retained_rows(self) -> int:
        """Rows copied from all rings; at most :attr:`token_count` of each."""
        return sum(mark.retained_rows for mark in self._marks)

    def caches(self, layout: CacheLayout) -> list[PlaneCache]:
        """Caches over the live planes for the calls until this checkpoint is settled."""
        return [
            RecordingCache(mark, layer.window_tokens)
            for mark, layer in zip(self._marks, layout.layers, strict=True)
        ]

    def require_room(self, token_count: int) -> None:
        """Check that a call of ``token_count`` tokens could still be taken back.

        Raises:
            LimitError: It could not.
        """
        room = self.token_count - self.computed_tokens
        if token_count > room:
            raise LimitError("block.token_count", f"at most {room} more tokens", token_count)

    def note_call(self, token_count: int) -> None:
        """A call of ``token_count`` tokens was completed."""
        self._calls.append(token_count)

    def accept(self, kept_tokens: int) -> None:
        """Keep the first ``kept_tokens`` tokens since the mark and undo the rest.

        Rows that stay are those the calls computed, bit for bit; rows that rejected ones had
        overwritten are back. Accepting none is rolling back.

        Raises:
            LimitError: More than were computed, or the schedule has no room. Nothing changed.
            RuntimeError: The checkpoint was settled before.
        """
        self._require_open()
        check_range("block.kept_tokens", kept_tokens, 0, self.computed_tokens, "tokens")
        schedule = schedule_after(self._schedule, self._calls, kept_tokens)
        # Also false after a call that stopped half way: some planes are then further than others.
        end = self.position + kept_tokens
        if any(mark.plane.origins.next_position != end for mark in self._marks):
            rewind_planes(self._marks, kept_tokens)
        self._finish(schedule)

    def roll_back(self) -> None:
        """Undo everything since the mark, a call that stopped half way included.

        Raises:
            RuntimeError: The checkpoint was settled before.
        """
        self._require_open()
        rewind_planes(self._marks, 0)
        self._finish(self._schedule)

    def _finish(self, schedule: CallSchedule) -> None:
        settle, self._settle = self._settle, None
        self._marks = []
        if settle is not None:
            settle(schedule.position, schedule)

    def _require_open(self) -> None:
        if not self.is_open:
            raise RuntimeError("this checkpoint has been settled already")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_open:
            self.roll_back()


def schedule_after(schedule: CallSchedule, calls: Sequence[int], kept_tokens: int) -> CallSchedule:
    """``schedule`` and then ``calls``, of whose tokens only the first ``kept_tokens`` stayed.

    Raises:
        LimitError: The schedule has no room for another run.
    """
    left = kept_tokens
    for call_tokens in calls:
        kept = min(left, call_tokens)
        left -= kept
        if kept:
            schedule = schedule.after_call(call_tokens, call_tokens - kept)
    return schedule
