"""Requests to one bucket: each with a bound, repeated where that is safe, and few errors.

The only file that imports ``obstore``. It is told to repeat nothing: a conditional create that was
carried out and whose answer was lost looks like a conflict to whoever repeats it blindly, so
repeating is done here, where the difference is known.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import obstore
from obstore import exceptions
from obstore.store import S3Store as Bucket

from kvpack.store.errors import NotStoredError, StoreError
from node.s3.place import S3Place
from node.s3.settings import S3Settings
from node.s3.trouble import Trouble

_Result = TypeVar("_Result")

#: A part of an upload in parts, and how many are under way: what it holds in memory.
PART_BYTES: Final = 8 << 20
PARTS_MAX: Final = 4

_PAUSE_S_MAX: Final = 5.0


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing.

    Attributes:
        key: Below the place's prefix.
        object_bytes: Its length.
        modified_s: When it was made, by the service's clock; whole seconds.
    """

    key: str
    object_bytes: int
    modified_s: float


class Client:
    """Requests below one place. Any number of threads may use it at once.

    Args:
        place: Bucket and prefix.
        settings: Who we are, and where the service is.

    Raises:
        StoreError: The settings are no good.
    """

    def __init__(self, place: S3Place, settings: S3Settings) -> None:
        self.place: Final = place
        self.endpoint: Final = settings.endpoint or settings.region
        self._patience = settings.patience
        patience = settings.patience
        config: dict[str, Any] = {
            "region": settings.region,
            "endpoint": settings.endpoint,
            "access_key_id": settings.key_id,
            "secret_access_key": settings.secret,
            "session_token": settings.token,
            # Create without replacing, for uploads in parts as well.
            "conditional_put": "etag",
            "copy_if_not_exists": "multipart",
        }
        try:
            self._bucket = Bucket(
                place.bucket,
                prefix=place.prefix or None,
                client_options={
                    "allow_http": settings.is_plain,
                    "connect_timeout": timedelta(seconds=patience.connect_s),
                    "timeout": timedelta(seconds=patience.request_s),
                },
                retry_config={"max_retries": 0},
                **{name: value for name, value in config.items() if value is not None},
            )
        except exceptions.BaseError:
            # Without the cause: it may repeat what it was given.
            raise StoreError(f"{place.url}: S3 cannot be used with these settings") from None

    def create(self, key: str, data: bytes) -> bool:
        """Create ``key`` unless it is there. Durable on return.

        Returns:
            Whether this call created it. One whose answer was lost, and whose bytes are there,
            counts as ours.

        Raises:
            StoreError: The service refuses, or does not answer.
        """
        lost_answer = False

        def attempt() -> bool:
            nonlocal lost_answer
            try:
                obstore.put(self._bucket, key, data, mode="create", use_multipart=False)
            except exceptions.AlreadyExistsError:
                return False
            except exceptions.PreconditionError:
                return False
            except Exception as error:
                lost_answer = lost_answer or Trouble.of(error).is_ambiguous
                raise
            return True

        if self._repeat(attempt):
            return True
        return lost_answer and self.get(key) == data

    def overwrite(self, key: str, data: bytes) -> None:
        """Put ``key``, whatever is there. Only for keys that nobody else writes."""
        self._repeat(lambda: obstore.put(self._bucket, key, data, use_multipart=False))

    def get(
        self, key: str, first: int = 0, end: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        """Bytes ``[first, end)`` of ``key``, or fewer where it ends before.

        Args:
            key: Which object.
            first: Where to begin.
            end: Where to end; None: the object's end.
            bytes_max: More than this is refused before it is read.

        Raises:
            NotStoredError: No such object. StoreError: it does not reach ``first``.
            OverflowError: It is longer than ``bytes_max``; says how long.
        """

        def attempt() -> bytes:
            options: dict[str, Any] = {}
            if end is not None:
                options["range"] = (first, end)
            elif first:
                options["range"] = {"offset": first}
            found = obstore.get(self._bucket, key, options=options)  # type: ignore[arg-type]
            if bytes_max is not None and found.meta["size"] > bytes_max:
                raise OverflowError(found.meta["size"])
            low, high = found.range
            data = bytes(found.bytes())
            if len(data) != high - low:
                raise ConnectionError("breaks off")
            return data

        return self._repeat(attempt, key)

    def head(self, key: str) -> Listed | None:
        """What is known of ``key``; None where there is no such object."""
        try:
            found = self._repeat(lambda: obstore.head(self._bucket, key), key)
        except NotStoredError:
            return None
        return Listed(key, found["size"], found["last_modified"].timestamp())

    def delete(self, keys: Sequence[str], permitted: Callable[[], None] | None = None) -> None:
        """Delete ``keys``; those that are not there are none of our business.

        Args:
            keys: At most 1,000.
            permitted: Called before every request; raises where it may not be sent.
        """

        def attempt() -> None:
            if permitted is not None:
                permitted()
            obstore.delete(self._bucket, list(keys))

        if keys:
            self._repeat(attempt)

    def listing(self, folder: str, after: str, count_max: int) -> list[Listed]:
        """At most ``count_max`` objects in and below ``folder``, in order, after that key."""
        return self._repeat(lambda: self._listing(folder, after, count_max))

    def _listing(self, folder: str, after: str, count_max: int) -> list[Listed]:
        found: list[Listed] = []
        stream = obstore.list(
            self._bucket, folder or None, offset=after or None, chunk_size=1000
        )  # fmt: skip
        for batch in stream:
            for item in batch:
                found.append(Listed(item["path"], item["size"], item["last_modified"].timestamp()))
                if len(found) > 1 and found[-1].key <= found[-2].key:
                    raise StoreError(f"{self.place.url}: the service lists out of order")
                if len(found) == count_max:
                    return found
        return found

    def top(self) -> list[Listed]:
        """The objects right below the prefix, in no folder."""
        found = self._repeat(lambda: obstore.list_with_delimiter(self._bucket))
        return [
            Listed(item["path"], item["size"], item["last_modified"].timestamp())
            for item in found["objects"]
        ]

    def upload(self, key: str, pieces: Iterator[bytes]) -> None:
        """Put an object of any length in parts, whatever is there. Memory is some parts.

        Not repeated: the pieces pass once. What a failure leaves is invisible, and the bucket's
        own rule for unfinished uploads removes it.
        """
        self._once(
            lambda: obstore.put(
                self._bucket, key, pieces, use_multipart=True,
                chunk_size=PART_BYTES, max_concurrency=PARTS_MAX,
            )
        )  # fmt: skip

    def copy_new(self, key: str, new: str) -> bool:
        """Give the object ``key`` a second name, unless that is taken. Returns whether it did."""
        try:
            self._once(lambda: obstore.copy(self._bucket, key, new, overwrite=False))
        except _TakenError:
            return False
        return True

    def signed_url(self, key: str, lifetime_s: float) -> str:
        """A URL by which anybody can read ``key`` until ``lifetime_s`` from now. It is a secret."""
        lifetime = timedelta(seconds=lifetime_s)
        return str(self._once(lambda: obstore.sign(self._bucket, "GET", key, expires_in=lifetime)))

    def _once(self, attempt: Callable[[], _Result]) -> _Result:
        trouble = None
        try:
            return attempt()
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise _TakenError(f"{self.place.url}: the name is taken") from None
        except (exceptions.BaseError, OSError) as error:
            trouble = Trouble.of(error)
        raise trouble.error(self.place.url)

    def _repeat(self, attempt: Callable[[], _Result], key: str = "") -> _Result:
        """Do ``attempt``, and again while what failed may pass and there is time."""
        started_s, pause_s = time.monotonic(), self._patience.pause_s
        while True:
            try:
                return attempt()
            except FileNotFoundError as error:
                trouble = Trouble.of(error)
                if key and trouble.code != "NoSuchBucket":
                    raise NotStoredError(key) from None
            except (exceptions.BaseError, OSError) as error:
                trouble = Trouble.of(error)
            over = time.monotonic() - started_s + pause_s > self._patience.retry_s
            if over or not trouble.is_passing:
                raise trouble.error(self.place.url)
            # Jitter: many that failed at once do not come again at once.
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            pause_s = min(_PAUSE_S_MAX, 2 * pause_s)


class _TakenError(StoreError):
    """A name that was to be new is there."""

    reason = "conflict"
