"""How many bytes a store may take, and whether there is room: asked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvpack import limits
from kvpack.store.chain import Chain
from kvpack.store.errors import StoreFullError
from kvpack.store.interface import ObjectStore

#: 64 GiB: some thirty sessions of 131,072 tokens of the reference geometry.
BUDGET_BYTES: Final = 64 << 30

#: Others need the disk too, and file systems grow slow when they are full.
FREE_BYTES_MIN: Final = 2 << 30

_BYTES_MAX: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Budget:
    """What a store may take.

    Attributes:
        bytes_max: All files of the store together, leftovers of crashes included.
        free_bytes_min: What must stay free on the volume, whoever fills it.

    Raises:
        LimitError: A number is outside its cap.
    """

    bytes_max: int = BUDGET_BYTES
    free_bytes_min: int = FREE_BYTES_MIN

    def __post_init__(self) -> None:
        limits.check_range("budget.bytes_max", self.bytes_max, 0, _BYTES_MAX, "bytes")
        limits.check_range("budget.free_bytes_min", self.free_bytes_min, 0, _BYTES_MAX, "bytes")


@dataclass(frozen=True, slots=True)
class Usage:
    """What is there.

    Attributes:
        object_bytes: All objects.
        leftover_bytes: What crashed writers left, and what others put here.
        reserved_bytes: What writers at work have announced and may not have written yet.
        free_bytes: Room on the volume, or None where it does not say.
    """

    object_bytes: int
    leftover_bytes: int
    reserved_bytes: int
    free_bytes: int | None

    @property
    def used_bytes(self) -> int:
        """Everything that lies in the store."""
        return self.object_bytes + self.leftover_bytes

    def room_bytes(self, budget: Budget) -> int:
        """How many bytes more may be written under ``budget``."""
        room = budget.bytes_max - self.used_bytes
        if self.free_bytes is not None:
            room = min(room, self.free_bytes - budget.free_bytes_min)
        return max(0, room - self.reserved_bytes)


def reserved_bytes(chains: list[Chain], now: int) -> int:
    """What writers whose intents have not expired have still to write."""
    return sum(
        chain.records[-1].reserve_bytes
        for chain in chains
        if chain.is_open and chain.expires >= now
    )


def measure(store: ObjectStore, chains: list[Chain], now: int) -> Usage:
    """Add up what is there. A budget that trusts its own sum bites too late, so files are asked:
    all that are not known to be as they were."""
    sizes = store.sizes()
    return Usage(
        object_bytes=sizes.object_bytes,
        leftover_bytes=sizes.irregular_bytes,
        reserved_bytes=reserved_bytes(chains, now),
        free_bytes=store.free_bytes(),
    )


def require_room(place: str, usage: Usage, budget: Budget, needed_bytes: int) -> None:
    """Refuse what does not fit, before a byte of it is written.

    Raises:
        StoreFullError: It is larger than the whole budget, or than what is left of it.
    """
    room = usage.room_bytes(budget)
    if needed_bytes > budget.bytes_max:
        raise StoreFullError(place, "larger than the whole budget", needed_bytes, room)
    if needed_bytes > room:
        raise StoreFullError(place, "the budget or the disk is used up", needed_bytes, room)
