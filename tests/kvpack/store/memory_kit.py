"""A store in memory: the smallest thing that keeps the store's promises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from kvpack.errors import FormatError
from kvpack.store import ConflictError, NotStoredError, StoreBusyError, StoredObject, names
from kvpack.store.interface import (
    Irregular,
    ObjectData,
    Page,
    Sizes,
    add_up,
    list_entries,
    scan_pages,
)


class MemoryStore:
    """See :class:`kvpack.store.interface.ObjectStore`."""

    place = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._busy = False
        self._identity = b""

    def identity(self, proposal: bytes) -> bytes:
        names.check_bytes("store.identity", proposal, names.IDENTITY_BYTES)
        self._identity = self._identity or proposal
        return self._identity

    def put_if_absent(self, objects: Sequence[ObjectData]) -> tuple[bool, ...]:
        created = []
        for item in objects:
            names.check_object_name(item.name)
            if self.objects.get(item.name, item.data) != item.data:
                raise ConflictError(item.name)
            created.append(item.name not in self.objects)
            self.objects[item.name] = item.data
        return tuple(created)

    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if names.check_object_name(name) not in self.objects:
            raise NotStoredError(name)
        data = self.objects[name]
        wanted = len(data) - offset if length is None else length
        if wanted < 0 or offset + wanted > len(data):
            raise FormatError(name, f"{wanted} bytes from {offset}", f"{len(data)} bytes")
        return data[offset : offset + wanted]

    def stat(self, wanted: Sequence[str]) -> tuple[StoredObject | None, ...]:
        return tuple(
            StoredObject(name, len(self.objects[name]), 0.0)
            if names.check_object_name(name) in self.objects
            else None
            for name in wanted
        )

    def list(self, prefix: str, after: str = "", count_max: int = 1000) -> Page:
        found = sorted(n for n in self.objects if n.startswith(prefix) and n > after)
        page = found[:count_max]
        objects = tuple(StoredObject(name, len(self.objects[name]), 0.0) for name in page)
        return Page(objects, page[-1] if len(found) > len(page) else None)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        return scan_pages(self, prefix)

    def entries(self, prefixes: Sequence[str]) -> Sequence[Sequence[str]]:
        return list_entries(self, prefixes)

    def sizes(self) -> Sizes:
        return add_up(self, names.KINDS)

    def delete(self, doomed: Sequence[str]) -> int:
        return sum(self.objects.pop(names.check_object_name(n), None) is not None for n in doomed)

    def expect(self, wanted: Sequence[str]) -> None:
        pass

    def free_bytes(self) -> int | None:
        return None

    def irregular(self) -> tuple[Irregular, ...]:
        return ()

    def remove_leftovers(self, doomed: Sequence[str]) -> int:
        return 0

    @contextlib.contextmanager
    def collector(self) -> Iterator[None]:
        if self._busy:
            raise StoreBusyError("busy")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
