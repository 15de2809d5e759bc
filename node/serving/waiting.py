"""Answers that wait for a slot: a bound, an order, and a way out."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.serving.run import Run


class WaitingLine:
    """Runs by priority, then by arrival; at most ``bound`` of them.

    One that leaves is taken out at once: it holds the text of a client that is gone.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._heap: list[tuple[int, int, Run]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def is_full(self) -> bool:
        """Whether one more is too many."""
        return len(self._heap) >= self.bound

    def push(self, run: Run) -> None:
        """Let ``run`` wait. Whoever calls asked :attr:`is_full` before."""
        heapq.heappush(self._heap, (run.order.priority, next(self._arrivals), run))

    @property
    def first(self) -> Run | None:
        """The next one, who goes on waiting; None: nobody waits."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Run:
        """The next one, who waits no more.

        Raises:
            IndexError: Nobody waits.
        """
        return heapq.heappop(self._heap)[2]

    def remove(self, run: Run) -> bool:
        """Take ``run`` out; False: it does not wait."""
        for index, (_, _, waiting) in enumerate(self._heap):
            if waiting is run:
                self._heap[index] = self._heap[-1]
                self._heap.pop()
                heapq.heapify(self._heap)
                return True
        return False
