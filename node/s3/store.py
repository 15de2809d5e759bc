"""The store in a bucket: the same objects under the same names, below a prefix.

What a folder does by links and flushes S3 does by one conditional request; what a folder's lock
does, a lease does (:mod:`node.s3.lease`). Requests of one call go out together, bounded.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, TypeVar

from kvpack.errors import FormatError, LimitError
from kvpack.store import names
from kvpack.store.errors import ConflictError, NotStoredError, StoreError
from kvpack.store.interface import (
    PAGE_NAMES,
    Irregular,
    ObjectData,
    Page,
    Sizes,
    StoredObject,
    add_up,
    list_entries,
    scan_pages,
)
from kvpack.store.local import (
    BYTES_MAX,
    FORMAT_NAME,
    IDENTITY_NAME,
    identity_text,
    parse_identity,
)
from kvpack.store.probe import AT_START, ProbeEffort, ProbeReport, probe_store
from node.clock import BootClock
from node.s3.client import Client, Listed
from node.s3.lease import CollectorLease, LeaseTimes

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: Requests of one store that are under way at once.
REQUESTS_MAX: Final = 16

#: Objects that are fetched before they are asked for: with 4 MiB each at most 32 MiB.
AHEAD: Final = 8

#: Keys of one deletion.
_DELETE_MAX: Final = 1000

_PAUSE_S: Final = 0.05

#: Services and buckets whose promises this process has tried. They do not depend on a prefix.
_proved: set[tuple[str, str]] = set()
_probing: Final = threading.Lock()


class S3Store:
    """An :class:`kvpack.store.interface.ObjectStore` below one prefix of one bucket.

    Args:
        client: The place.
        times: How long the right to delete lasts.
        is_trial: It creates objects although nobody tried the service yet: to try it.
    """

    def __init__(
        self, client: Client, times: LeaseTimes | None = None, *, is_trial: bool = False
    ) -> None:
        self._client = client
        self._is_trial = is_trial
        self._times = LeaseTimes() if times is None else times
        self._pool = ThreadPoolExecutor(REQUESTS_MAX, thread_name_prefix="s3")
        self._lease: CollectorLease | None = None
        self._ahead = _Ahead(self._pool, self._get_whole)
        self._mark = (client.endpoint, client.place.bucket)

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return self._client.place.url

    def close(self) -> None:
        """Let go of what is under way; the store is of no use afterwards."""
        self._ahead.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def probe(self, effort: ProbeEffort = AT_START) -> ProbeReport:
        """Try the service's promises on this bucket; this process trusts it from then on.

        Raises:
            StoreUnsafeError: It breaks one. KvpackError: It cannot be asked.
        """
        with contextlib.closing(S3Store(self._client, self._times, is_trial=True)) as trial:
            report = probe_store(trial, secrets.token_bytes(16), time.time, _pause, effort)
        _proved.add(self._mark)
        return report

    def require_proved(self) -> None:
        """Try the service's promises, unless this process did so already.

        Raises:
            StoreUnsafeError: It breaks one. KvpackError: It cannot be asked.
        """
        if self._is_trial or self._mark in _proved:
            return
        with _probing:
            if self._mark not in _proved:
                self.probe()

    def identity(self, proposal: bytes) -> bytes:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        names.check_bytes("store.identity", proposal, names.IDENTITY_BYTES)
        self.require_proved()
        text = identity_text(proposal)
        if self._client.create(IDENTITY_NAME, text):
            return proposal
        return parse_identity(self._read_small(IDENTITY_NAME, len(text)))

    def make(self, text: bytes) -> None:
        """Make a store here unless there is one: write its ``format``."""
        self.require_proved()
        self._client.create(FORMAT_NAME, text)

    def read_format(self, bytes_max: int) -> bytes:
        """What stands in ``format``.

        Raises:
            FormatError: There is none: no store is here.
        """
        try:
            return self._read_small(FORMAT_NAME, bytes_max)
        except NotStoredError:
            raise FormatError("store", f"an object {FORMAT_NAME!r}", "none") from None

    def _read_small(self, key: str, bytes_max: int) -> bytes:
        try:
            return self._client.get(key, bytes_max=bytes_max)
        except OverflowError as error:
            raise FormatError(f"store.{key}", f"at most {bytes_max} bytes", str(error)) from None

    def put_if_absent(self, objects: Sequence[ObjectData]) -> tuple[bool, ...]:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        for item in objects:
            high = BYTES_MAX[names.kind_of(names.check_object_name(item.name))]
            if len(item.data) > high:
                raise LimitError(item.name, f"at most {high} bytes", f"{len(item.data)} bytes")
        self.require_proved()
        return self._together(self._put, objects)

    def _put(self, item: ObjectData) -> bool:
        if self._client.create(item.name, item.data):
            return True
        # It is there. Whether it is the same says only every byte of it: an ETag is no digest.
        try:
            found = self._client.get(item.name, bytes_max=len(item.data))
        except OverflowError:
            raise ConflictError(item.name) from None
        except NotStoredError:
            # It was deleted between the two requests; whoever comes again will create it.
            raise StoreError(f"{self.place}: {item.name}: came and went") from None
        if found != item.data:
            raise ConflictError(item.name)
        return False

    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        names.check_object_name(name)
        if offset == 0 and length is None:
            return self._ahead.take(name)
        return self._get_part(name, offset, None if length is None else offset + length)

    def _get_whole(self, name: str) -> bytes:
        high = BYTES_MAX[names.kind_of(name)]
        try:
            return self._client.get(name, bytes_max=high)
        except OverflowError as error:
            raise LimitError(name, f"{high} bytes", f"{error} bytes") from None

    def _get_part(self, name: str, offset: int, end: int | None) -> bytes:
        found = self._client.head(name)
        if found is None:
            raise NotStoredError(name)
        stop = found.object_bytes if end is None else end
        if offset <= stop <= found.object_bytes:
            data = b"" if offset == stop else self._client.get(name, offset, stop)
            if len(data) == stop - offset:
                return data
        wanted = f"{max(0, stop - offset)} bytes from {offset}"
        raise FormatError(name, wanted, f"an object of {found.object_bytes} bytes")

    def stat(self, wanted: Sequence[str]) -> tuple[StoredObject | None, ...]:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        checked = [names.check_object_name(name) for name in wanted]
        found = self._together(self._client.head, checked)
        return tuple(None if item is None else _stored(item) for item in found)

    def list(self, prefix: str, after: str = "", count_max: int = PAGE_NAMES) -> Page:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        if names.kind_of(prefix) not in names.KINDS or "/" not in prefix:
            raise FormatError("store.prefix", "a kind and a slash", f"{len(prefix)} characters")
        if names.is_object_name(prefix):
            (found,) = self.stat([prefix])
            return Page((found,) if found is not None and prefix > after else (), None)
        objects: list[StoredObject] = []
        # No name is equal to a beginning of names, so what comes after it is what begins with it.
        last = max(after, prefix)
        while True:
            listed = self._client.listing(prefix.rpartition("/")[0], last, PAGE_NAMES)
            for item in listed:
                if not item.key.startswith(prefix):
                    return Page(tuple(objects), None)
                if len(objects) == count_max:
                    return Page(tuple(objects), objects[-1].name)
                if names.is_object_name(item.key):
                    objects.append(_stored(item))
            if len(listed) < PAGE_NAMES:
                return Page(tuple(objects), None)
            last = listed[-1].key

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        return scan_pages(self, prefix)

    def entries(self, prefixes: Sequence[str]) -> Sequence[Sequence[str]]:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        return list_entries(self, prefixes)

    def sizes(self) -> Sizes:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        return add_up(self, names.KINDS)

    def delete(self, doomed: Sequence[str]) -> int:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        unique = list(dict.fromkeys(names.check_object_name(name) for name in doomed))
        present = [item.name for item in self.stat(unique) if item is not None]
        lease = self._lease
        for first in range(0, len(present), _DELETE_MAX):
            keys = present[first : first + _DELETE_MAX]
            self._client.delete(keys, None if lease is None else lease.require)
        return len(present)

    def expect(self, wanted: Sequence[str]) -> None:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        self._ahead.expect([names.check_object_name(name) for name in wanted])

    def free_bytes(self) -> int | None:
        """A bucket does not say."""
        return None

    def irregular(self) -> tuple[Irregular, ...]:
        """See :class:`kvpack.store.interface.ObjectStore`.

        Looked for right below the prefix and in the store's own folders: another store that lies
        deeper is none of ours, and is not even listed.
        """
        found = [
            item for item in self._client.top() if item.key not in (FORMAT_NAME, IDENTITY_NAME)
        ]
        for kind in names.KINDS:
            last = ""
            while True:
                listed = self._client.listing(kind, last, PAGE_NAMES)
                found += [item for item in listed if not names.is_object_name(item.key)]
                if len(listed) < PAGE_NAMES:
                    break
                last = listed[-1].key
        return tuple(
            Irregular(item.key, item.object_bytes, item.modified_s, is_leftover=False)
            for item in found
        )

    def remove_leftovers(self, doomed: Sequence[str]) -> int:
        """There are none: an object is whole or not there."""
        if doomed:
            raise FormatError("store.leftover", "none in a bucket", f"{len(doomed)} names")
        return 0

    @contextlib.contextmanager
    def collector(self) -> Iterator[None]:
        """See :class:`kvpack.store.interface.ObjectStore`; a lease, since nothing dies with us."""
        self.require_proved()
        lease = CollectorLease(self._client, BootClock().now_s, self._times)
        lease.acquire()
        self._lease = lease
        try:
            yield
        finally:
            self._lease = None
            # What was done is done; where this fails, others wait until the lease is old.
            with contextlib.suppress(StoreError):
                lease.release()

    def _together(
        self, work: Callable[[_Item], _Result], items: Sequence[_Item]
    ) -> tuple[_Result, ...]:
        """Do ``work`` for all items at once; nothing is under way any more on return."""
        if len(items) == 1:
            return (work(items[0]),)
        futures = [self._pool.submit(work, item) for item in items]
        wait(futures)
        return tuple(future.result() for future in futures)


class _Ahead:
    """Objects that are fetched before they are asked for, at most :data:`AHEAD` at a time."""

    def __init__(self, pool: ThreadPoolExecutor, fetch: Callable[[str], bytes]) -> None:
        self._pool = pool
        self._fetch = fetch
        self._lock = threading.Lock()
        self._wanted: list[str] = []
        self._coming: OrderedDict[str, Future[bytes]] = OrderedDict()

    def expect(self, wanted: Sequence[str]) -> None:
        """Replace what was expected. Nothing is fetched before the first of it is asked for."""
        with self._lock:
            self._drop()
            self._wanted = list(reversed(wanted))

    def clear(self) -> None:
        """Expect nothing."""
        self.expect(())

    def take(self, name: str) -> bytes:
        """The object ``name``, from what is coming if it is."""
        with self._lock:
            if name in self._wanted[-AHEAD:]:
                self._fill()
            future = self._skip_to(name) if name in self._coming else None
            if future is not None:
                self._fill()
        return self._fetch(name) if future is None else future.result()

    def _skip_to(self, name: str) -> Future[bytes]:
        """Take ``name`` out; what was expected before it will not be asked for any more."""
        while True:
            first, future = self._coming.popitem(last=False)
            if first == name:
                return future
            future.cancel()

    def _fill(self) -> None:
        while self._wanted and len(self._coming) < AHEAD:
            name = self._wanted.pop()
            if name not in self._coming:
                self._coming[name] = self._pool.submit(self._fetch, name)

    def _drop(self) -> None:
        for future in self._coming.values():
            future.cancel()
        self._coming.clear()


def _stored(item: Listed) -> StoredObject:
    return StoredObject(item.key, item.object_bytes, item.modified_s)


def _pause() -> None:
    time.sleep(_PAUSE_S)
