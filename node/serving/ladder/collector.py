"""Collecting garbage in the node's own store: when room is short, and now and then."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpack.store import Budget, GcPolicy, Hold, HoldKind, apply_gc
from kvpack.store.listing import all_holds
from kvpack.store.plan import Why, make_plan, take_inventory
from kvpack.store.retention import eviction_order

if TYPE_CHECKING:
    from kvpack.store import ObjectStore
    from kvpack.store.mark import CutCache

#: A lookup lists what lies under one block of a prompt: many short texts must not make it slow.
HOLDS_MAX: Final = 8192

_PAUSE_S: Final = 0.02

#: Cuts whose lists of chunks are remembered between two collections; beyond, all are read again.
_REMEMBERED_MAX: Final = 4096


@dataclass(frozen=True, slots=True, repr=False)
class Collected:
    """What went.

    Attributes:
        evicted: Holds, for want of room.
        superseded: Holds, because later cuts of their lineage took their place.
        freed_bytes: Bytes.
        holds: What is held now.
    """

    evicted: int
    superseded: int
    freed_bytes: int
    holds: tuple[Hold, ...]


class Collector:
    """Blocking; one call at a time.

    Args:
        store: Whose garbage.
        budget: What it may take.
        holds_max: Holds that stay at most; what was used longest ago goes.
    """

    def __init__(self, store: ObjectStore, budget: Budget, holds_max: int = HOLDS_MAX) -> None:
        self._store = store
        self._budget = budget
        self._holds_max = holds_max
        self._cache: CutCache = {}

    def _drop_oldest(self) -> int:
        """Drop holds beyond the most that may be: those used longest ago. Returns how many."""
        order = eviction_order(self.holds())
        doomed = [hold for hold in order if hold.kind is not HoldKind.IMPORT]
        doomed = doomed[: max(0, len(order) - self._holds_max)]
        return self._store.delete([hold.name for hold in doomed])

    def collect(self, needed_bytes: int = 0) -> Collected:
        """Drop what retention drops, and for room what was used longest ago; delete the rest.

        Raises:
            StoreBusyError: Another process collects.
            StoreError: It cannot be told what is in use.
            PublishError: The volume refuses.
        """
        if len(self._cache) > _REMEMBERED_MAX:
            self._cache.clear()
        dropped = self._drop_oldest()
        policy = GcPolicy(self._budget, needed_bytes)
        plan = make_plan(
            take_inventory(self._store, self._cache), int(time.time()), policy, self._cache
        )
        result = apply_gc(
            self._store, plan, int(time.time()), secrets.token_bytes(16),
            lambda: time.sleep(_PAUSE_S),
        )  # fmt: skip
        reasons = Counter(drop.why for drop in plan.drops)
        return Collected(
            dropped + reasons[Why.EVICTED],
            reasons[Why.SUPERSEDED],
            result.freed_bytes,
            self.holds(),
        )

    def holds(self) -> tuple[Hold, ...]:
        """What is held.

        Raises:
            StoreError: The store cannot be listed.
        """
        return tuple(all_holds(self._store))
