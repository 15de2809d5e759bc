"""The right to delete in a bucket: a chain of small objects, and a lease that fences itself.

A folder's lock dies with its process. A bucket has no such lock, so the right is a lease:

- ``collector/NNNNNNNN`` is a chain. Whoever creates the next number, conditionally, has said how it
  goes on: *held* by a nonce, or *released*. The highest number is never deleted, so a number that
  was skipped because its successors are gone is found out by listing right after creating it.
- The holder deletes only within ``lease_s`` after it sent its last record, by a clock that runs
  during sleep, asked right before each request; half way through it appends another record.
- Another may append after a *held* record only once that is ``takeover_s`` old, by the service's
  own clock, read from an object that was written for it.

``takeover_s`` exceeds ``lease_s`` by more than the 15 minutes after which S3 refuses a request by
the date that it was signed with. So whatever a holder had on its way is carried out or refused by
then, however long the holder or the network slept. Neither node's wall clock is used.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpack.errors import KvpackError
from kvpack.store.errors import NotStoredError, StoreBusyError, StoreError
from node.s3.client import Client

FOLDER: Final = "collector"

_HELD: Final = b"held "
_RELEASED: Final = b"released "
_NONCE_BYTES: Final = 16
_RECORD_BYTES_MAX: Final = 64
_NUMBERS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long the right to delete lasts.

    Attributes:
        lease_s: Deletions are sent within this time after a record.
        takeover_s: A record that is older belongs to somebody who is gone.

    Raises:
        ValueError: Another could take over while a deletion is under way.
    """

    lease_s: float = 120.0
    takeover_s: float = 1200.0

    def __post_init__(self) -> None:
        if not 0 < self.lease_s < self.takeover_s:
            raise ValueError(f"lease {self.lease_s} s: expected less than {self.takeover_s} s")


class CollectorLease:
    """One holder's side.

    Args:
        client: The store's place.
        clock: Seconds, by a clock that runs during sleep and that nobody can set.
        times: How long things last.
    """

    def __init__(self, client: Client, clock: Callable[[], float], times: LeaseTimes) -> None:
        self._client = client
        self._clock = clock
        self._times = times
        self._nonce = secrets.token_hex(_NONCE_BYTES).encode()
        self._number = 0
        self._until_s = 0.0
        self._lock = threading.Lock()

    def acquire(self) -> None:
        """Take the right.

        Raises:
            StoreBusyError: Another has it, or had it not long ago and did not give it back.
        """
        numbers = self._numbers()
        last = numbers[-1] if numbers else 0
        if numbers:
            self._require_free(last)
        self._append(last + 1, _HELD)

    def require(self) -> None:
        """Called before every deletion: may it still be sent?

        Raises:
            StoreBusyError: The right was lost: nothing more is deleted.
        """
        with self._lock:
            if self._until_s - self._clock() < self._times.lease_s / 2:
                self._append(self._number + 1, _HELD)
            if self._clock() >= self._until_s:
                raise self._lost()

    def release(self) -> None:
        """Give it back. Where that fails, others wait until it is old."""
        with self._lock:
            try:
                self._append(self._number + 1, _RELEASED)
            finally:
                self._until_s = 0.0

    def _require_free(self, number: int) -> None:
        key = _key(number)
        try:
            record = self._client.get(key, bytes_max=_RECORD_BYTES_MAX)
            found = self._client.head(key)
        except NotStoredError:
            raise StoreBusyError(f"{self._client.place.url}: a collector is at work") from None
        except OverflowError:
            raise StoreError(f"{self._client.place.url}: {key}: not a collector's") from None
        if found is None:
            raise StoreBusyError(f"{self._client.place.url}: a collector is at work")
        if record.startswith(_RELEASED):
            return
        left_s = self._times.takeover_s - (self._service_now_s() - found.modified_s)
        if left_s > 0:
            raise StoreBusyError(
                f"{self._client.place.url}: a collector is at work; if it is dead, its place is "
                f"free in {left_s:.0f} s"
            )

    def _service_now_s(self) -> float:
        """The service's clock, from an object that is written to see it."""
        key = f"{FOLDER}/now-{self._nonce.decode()}"
        self._client.overwrite(key, b"")
        found = self._client.head(key)
        self._client.delete([key])
        if found is None:
            raise StoreError(f"{self._client.place.url}: what was just written is not there")
        return found.modified_s

    def _append(self, number: int, state: bytes) -> None:
        sent_s = self._clock()
        key = _key(number)
        if not self._client.create(key, state + self._nonce):
            raise self._lost()
        numbers = self._numbers()
        if not numbers or numbers[-1] != number:
            # We slept: the chain went on without us, and cleared away what we built on.
            self._client.delete([key])
            raise self._lost()
        self._number, self._until_s = number, sent_s + self._times.lease_s
        self._client.delete([_key(old) for old in numbers[:-1]][-1000:])

    def _numbers(self) -> list[int]:
        listed = self._client.listing(FOLDER, "", _NUMBERS_MAX)
        names = [item.key.removeprefix(f"{FOLDER}/") for item in listed]
        return sorted(int(name, 16) for name in names if _is_number(name))

    def _lost(self) -> KvpackError:
        self._until_s = 0.0
        return StoreBusyError(f"{self._client.place.url}: another collector took over")


def _key(number: int) -> str:
    return f"{FOLDER}/{number:08x}"


def _is_number(name: str) -> bool:
    return len(name) == 8 and not set(name) - set("0123456789abcdef")
