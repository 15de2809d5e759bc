"""What the store needs of a place that keeps objects: five calls, of which one decides.

``put_if_absent`` is the only primitive with a choice in it: of two callers one creates the object.
Everything that two processes must agree on is built on it. Objects are immutable: there is no
rename, no append and no replace, so an object store with conditional writes will do as well as a
folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

#: Names of one page. A folder of a 64 GiB store has about 32,000.
PAGE_NAMES: Final = 10_000


@dataclass(frozen=True, slots=True, repr=False)
class ObjectData:
    """An object that is to be stored. ``data`` may be empty: some objects are only a name."""

    name: str
    data: bytes

    def __repr__(self) -> str:
        return f"ObjectData({self.name!r}, {len(self.data)} bytes)"


class StoredObject(NamedTuple):
    """An object that is there.

    Attributes:
        name: Its name.
        object_bytes: Its length.
        modified_s: When it was made, seconds since 1970, by the clock of whoever keeps it.
    """

    name: str
    object_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Page:
    """Some objects, in order of their names; ``next_after`` continues, None ends."""

    objects: tuple[StoredObject, ...]
    next_after: str | None


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much lies in a store.

    Attributes:
        object_bytes: All objects.
        irregular_bytes: Everything else.
    """

    object_bytes: int
    irregular_bytes: int


@dataclass(frozen=True, slots=True)
class Irregular:
    """Something in the store's place that is no object.

    Attributes:
        name: Where, relative to the store.
        file_bytes: Its length.
        modified_s: When it was last written.
        is_leftover: What a crashed writer left: ours, and removed after a safe age. Anything else
            was put there by somebody else, is reported, and is never touched.
    """

    name: str
    file_bytes: int
    modified_s: float
    is_leftover: bool


class ObjectStore(Protocol):
    """A place that keeps immutable objects. Any number of processes may use it at once."""

    @property
    def place(self) -> str:
        """Where it is, for messages."""

    def identity(self, proposal: bytes) -> bytes:
        """The 16 bytes that name this place for ever; ``proposal`` where it had no name yet.

        Of two callers that propose one prevails, and both get what it proposed. Durable on return.

        Raises:
            FormatError: ``proposal`` is not 16 bytes, or the place holds something else.
            StoreFullError: No room. PublishError: the place refuses for another reason.
        """

    def put_if_absent(self, objects: Sequence[ObjectData]) -> tuple[bool, ...]:
        """Store each object, or find that the same bytes are there already.

        On return all are durable. A batch is not one transaction: after an error any of its
        objects may be stored, each of them whole.

        Returns:
            For each object, in order: True where this call created it.

        Raises:
            ConflictError: A name holds other bytes.
            StoreFullError: No room. PublishError: the place refuses for another reason.
        """

    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """The object's bytes, or ``length`` of them from ``offset``.

        Raises:
            NotStoredError: No such object.
            FormatError: It is shorter than asked, longer than its kind may be, or no regular file.
        """

    def stat(self, names: Sequence[str]) -> tuple[StoredObject | None, ...]:
        """What is known of each name; None where there is no such object."""

    def list(self, prefix: str, after: str = "", count_max: int = PAGE_NAMES) -> Page:
        """Objects whose names begin with ``prefix`` and come after ``after``.

        An object that exists during the whole call is listed; one that is made or deleted
        meanwhile may or may not be.
        """

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """What all pages of :meth:`list` hold, in any order and in bounded memory."""

    def entries(self, prefixes: Sequence[str]) -> Sequence[Sequence[str]]:
        """For each beginning of names of entries that holds a whole link, the names in order.

        A hint for whoever looks for a prefix: what another process made or deleted within the last
        tick of the volume's clock may or may not be in it.
        """

    def sizes(self) -> Sizes:
        """How many bytes are here. What this process knows to be unchanged is not looked at."""

    def delete(self, names: Sequence[str]) -> int:
        """Delete what is there of ``names``; durable on return. Returns how many there were."""

    def expect(self, names: Sequence[str]) -> None:
        """A hint: these objects will be read whole, in about this order.

        A place that is far away fetches a bounded number of them ahead; others do nothing.
        """

    def free_bytes(self) -> int | None:
        """Room for us on the real volume, or None where there is no such number."""

    def irregular(self) -> tuple[Irregular, ...]:
        """Everything in the store's place that is no object."""

    def remove_leftovers(self, names: Sequence[str]) -> int:
        """Remove leftovers by the names that :meth:`irregular` gave. Returns how many."""

    def collector(self) -> AbstractContextManager[None]:
        """The right to delete, which one process has at a time and loses when it dies.

        Raises:
            StoreBusyError: Another process has it.
        """


class OpenedStore(ObjectStore, Protocol):
    """A store that holds something of its process: a folder, connections."""

    def close(self) -> None:
        """Give it back; the store is of no use afterwards."""


def list_all(store: ObjectStore, prefix: str) -> list[StoredObject]:
    """All objects whose names begin with ``prefix``, in order of their names."""
    return sorted(store.scan(prefix), key=_name_of)


def scan_pages(store: ObjectStore, prefix: str) -> Iterator[StoredObject]:
    """:meth:`ObjectStore.scan` for a place that lists in pages."""
    after: str | None = ""
    while after is not None:
        page = store.list(prefix, after)
        yield from page.objects
        after = page.next_after


def add_up(store: ObjectStore, kinds: Sequence[str]) -> Sizes:
    """:meth:`ObjectStore.sizes` for a place that remembers nothing."""
    objects = sum(item.object_bytes for kind in kinds for item in store.scan(f"{kind}/"))
    return Sizes(objects, sum(item.file_bytes for item in store.irregular()))


def list_entries(store: ObjectStore, prefixes: Sequence[str]) -> list[list[str]]:
    """:meth:`ObjectStore.entries` for a place that finds names by their beginning at once."""
    return [sorted(item.name for item in store.scan(prefix)) for prefix in prefixes]


def _name_of(item: StoredObject) -> str:
    return item.name
