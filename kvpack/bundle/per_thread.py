"""A value for each thread, made where a thread first asks: what holds buffers serves one alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class PerThread(Generic[_T]):
    """What ``make`` gives, one for each thread that asks.

    Args:
        make: Makes one; called in the thread that it is for.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._mine = threading.local()

    def mine(self) -> _T:
        """The calling thread's own."""
        found: _T | None = getattr(self._mine, "value", None)
        if found is None:
            found = self._mine.value = self._make()
        return found
