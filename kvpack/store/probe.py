"""Does a place keep the promise that a store is built on: of two creates one wins?

Asked of a running place, by trying: a name is created, created again with the same bytes and with
others, and then by many at once. A place that lets two of them win loses sessions silently, and no
later check would tell. The trial objects are pinned, so no collector takes them meanwhile, and they
are gone at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvpack import limits
from kvpack.errors import KvpackError
from kvpack.store import names
from kvpack.store.errors import ConflictError, StoreUnsafeError
from kvpack.store.intent import Intent, end, pin
from kvpack.store.interface import ObjectData, ObjectStore, list_all
from kvpack.store.steps import drive

#: How far the place's clock may be from ours. Two nodes are then at most twice as far apart, which
#: is less than the grace of a collector (``GcPolicy.grace_s``).
SKEW_S_MAX: Final = 120.0

_INTENT_S: Final = 900
_PAUSES_MAX: Final = 200
_BODY_BYTES: Final = 300


@dataclass(frozen=True, slots=True)
class ProbeEffort:
    """How hard a place is tried. One round may pass by luck; each costs some round trips.

    Attributes:
        racers: Creates of one name at once.
        rounds: How often.
    """

    racers: int
    rounds: int

    def __post_init__(self) -> None:
        limits.check_range("probe.racers", self.racers, 2, 64)
        limits.check_range("probe.rounds", self.rounds, 1, 64)


#: Before a process writes its first object; and when an operator asks.
AT_START: Final = ProbeEffort(3, 1)
THOROUGH: Final = ProbeEffort(8, 3)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a place did.

    Attributes:
        place: Which.
        effort: How hard it was tried; one create won each time.
        skew_s: The place's clock minus ours, in seconds; its clock may have whole seconds.
    """

    place: str
    effort: ProbeEffort
    skew_s: float


def probe_store(
    store: ObjectStore,
    nonce: bytes,
    clock: Callable[[], float],
    pause: Callable[[], None],
    effort: ProbeEffort = AT_START,
) -> ProbeReport:
    """Try the store's promises on objects of our own.

    Args:
        store: Which store. It may be in use.
        nonce: 16 random bytes, used once.
        clock: Seconds since 1970.
        pause: Waits for a moment.
        effort: How hard to try.

    Raises:
        StoreUnsafeError: It breaks one; says which.
        KvpackError: It cannot be asked.
    """
    trials = [_name(nonce, number) for number in range(1 + effort.rounds)]
    intent = Intent(nonce)
    try:
        drive(store, pin(intent, trials, int(clock()) + _INTENT_S, 0, _PAUSES_MAX), pause)
        skew_s = _try_one(store, trials[0], clock)
        for name in trials[1:]:
            _race(store, name, effort.racers)
        _try_deleting(store, trials)
    except KvpackError:
        # What went wrong first says more than what then went wrong with clearing up.
        with contextlib.suppress(KvpackError):
            _clear(store, trials, intent, pause)
        raise
    _clear(store, trials, intent, pause)
    return ProbeReport(store.place, effort, skew_s)


def _clear(
    store: ObjectStore, trials: Sequence[str], intent: Intent, pause: Callable[[], None]
) -> None:
    store.delete(trials)
    drive(store, end(intent), pause)


def _name(nonce: bytes, number: int) -> str:
    return names.chunk_name(blake3(b"kvpack store probe" + nonce + bytes([number])).digest())


def _body(name: str, number: int) -> bytes:
    return blake3(f"{name} {number}".encode()).digest(length=_BODY_BYTES)


def _creates(store: ObjectStore, name: str, data: bytes) -> bool:
    """Whether this call created ``name``. Other bytes there are a plain no."""
    try:
        return store.put_if_absent([ObjectData(name, data)]) == (True,)
    except ConflictError:
        return False


def _try_one(store: ObjectStore, name: str, clock: Callable[[], float]) -> float:
    """One object by itself. Returns how far the place's clock is from ours."""
    data = _body(name, 0)
    before_s = clock()
    _require(store, _creates(store, name, data), "a name that was free could not be created")
    after_s = clock()
    _require(store, not _creates(store, name, data), "a name was created twice, with equal bytes")
    _require(
        store, not _creates(store, name, _body(name, 1)), "a name was created twice, and replaced"
    )
    _require(store, store.get(name) == data, "what was created is not what is read")
    _require(store, store.get(name, 100, 57) == data[100:157], "a range is not that range")
    (found,) = store.stat([name])
    _require(store, found is not None and found.object_bytes == len(data), "a length is wrong")
    listed = [item.name for item in list_all(store, name)]
    _require(store, listed == [name], "what was just created is not listed")
    modified_s = after_s if found is None else found.modified_s
    skew_s = _skew_s(modified_s, before_s, after_s)
    if abs(skew_s) > SKEW_S_MAX:
        raise StoreUnsafeError(
            f"{store.place}: its clock is {skew_s:+.0f} s from ours; expected at most "
            f"{SKEW_S_MAX:.0f} s: set this machine's clock, or the store's"
        )
    return skew_s


def _skew_s(modified_s: float, before_s: float, after_s: float) -> float:
    """How far ``modified_s`` lies outside of the call that it must lie in; whole seconds count."""
    if modified_s + 1 < before_s:
        return modified_s + 1 - before_s
    return max(0.0, modified_s - after_s)


def _race(store: ObjectStore, name: str, racers: int) -> None:
    """Many create one name at once, each with bytes of its own."""
    bodies = [_body(name, number) for number in range(racers)]
    with ThreadPoolExecutor(racers) as pool:
        won = list(pool.map(lambda data: _creates(store, name, data), bodies))
    _require(
        store, sum(won) == 1,
        f"{sum(won)} of {racers} creates of one name at once won; expected 1",
    )  # fmt: skip
    _require(store, store.get(name) == bodies[won.index(True)], "another create's bytes are there")


def _try_deleting(store: ObjectStore, trials: Sequence[str]) -> None:
    store.delete(trials)
    found = any(store.stat(trials))
    _require(store, not found, "what was deleted is still there")


def _require(store: ObjectStore, holds: bool, broken: str) -> None:
    if not holds:
        raise StoreUnsafeError(f"{store.place}: cannot keep packs: {broken}")
