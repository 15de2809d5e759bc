"""A store that tells how much work goes by: for a line of progress around a collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final

from kvpack.store.interface import (
    PAGE_NAMES,
    Irregular,
    ObjectData,
    ObjectStore,
    Page,
    Sizes,
    StoredObject,
)

#: Objects of a long listing that are told together.
_TOLD_TOGETHER: Final = 1000


class ToldStore:
    """``store`` itself, and after every call the number of objects that it was about.

    Args:
        store: Which store.
        told: Called with a number of objects: listed, looked at, read, written or deleted.
    """

    def __init__(self, store: ObjectStore, told: Callable[[int], None]) -> None:
        self._store = store
        self._told = told

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return self._store.place

    def identity(self, proposal: bytes) -> bytes:
        """As :meth:`ObjectStore.identity`."""
        return self._store.identity(proposal)

    def put_if_absent(self, objects: Sequence[ObjectData]) -> tuple[bool, ...]:
        """As :meth:`ObjectStore.put_if_absent`."""
        created = self._store.put_if_absent(objects)
        self._told(len(created))
        return created

    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """As :meth:`ObjectStore.get`."""
        data = self._store.get(name, offset, length)
        self._told(1)
        return data

    def stat(self, names: Sequence[str]) -> tuple[StoredObject | None, ...]:
        """As :meth:`ObjectStore.stat`."""
        found = self._store.stat(names)
        self._told(len(found))
        return found

    def list(self, prefix: str, after: str = "", count_max: int = PAGE_NAMES) -> Page:
        """As :meth:`ObjectStore.list`; told page by page."""
        page = self._store.list(prefix, after, count_max)
        self._told(len(page.objects))
        return page

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """As :meth:`ObjectStore.scan`; told now and then."""
        count = 0
        for item in self._store.scan(prefix):
            yield item
            count += 1
            if count == _TOLD_TOGETHER:
                self._told(count)
                count = 0
        self._told(count)

    def entries(self, prefixes: Sequence[str]) -> Sequence[Sequence[str]]:
        """As :meth:`ObjectStore.entries`."""
        return self._store.entries(prefixes)

    def sizes(self) -> Sizes:
        """As :meth:`ObjectStore.sizes`."""
        return self._store.sizes()

    def delete(self, names: Sequence[str]) -> int:
        """As :meth:`ObjectStore.delete`."""
        count = self._store.delete(names)
        self._told(len(names))
        return count

    def expect(self, names: Sequence[str]) -> None:
        """As :meth:`ObjectStore.expect`."""
        self._store.expect(names)

    def free_bytes(self) -> int | None:
        """As :meth:`ObjectStore.free_bytes`."""
        return self._store.free_bytes()

    def irregular(self) -> tuple[Irregular, ...]:
        """As :meth:`ObjectStore.irregular`."""
        found = self._store.irregular()
        self._told(len(found))
        return found

    def remove_leftovers(self, names: Sequence[str]) -> int:
        """As :meth:`ObjectStore.remove_leftovers`."""
        count = self._store.remove_leftovers(names)
        self._told(len(names))
        return count

    def collector(self) -> AbstractContextManager[None]:
        """As :meth:`ObjectStore.collector`."""
        return self._store.collector()
