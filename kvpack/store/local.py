"""The store in a folder: one file for each object, durable first, then visible, never replaced.

A file is written under a private name in the folder where it will appear, flushed, linked to its
name, and the folder is flushed. An object that is only a name is created under it at once: there is
nothing in it that could be half there.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final

from kvpack.chunk import OBJECT_BYTES_MAX
from kvpack.errors import FormatError, LimitError, PublishError
from kvpack.publish import explain, is_private_name, private_name
from kvpack.store import names
from kvpack.store.disk import Disk, FileStatus
from kvpack.store.errors import ConflictError, NotStoredError, StoreError, StoreFullError
from kvpack.store.interface import (
    PAGE_NAMES,
    Irregular,
    ObjectData,
    Page,
    Sizes,
    StoredObject,
)
from kvpack.store.records import CUT_BYTES_MAX, RECORD_BYTES_MAX
from kvpack.store.remembered import EntryIndex, FolderSums

FORMAT_NAME: Final = "format"
LOCK_NAME: Final = "collector.lock"
IDENTITY_NAME: Final = "identity"

#: 16 bytes in hexadecimal, and a line feed.
_IDENTITY_TEXT: Final = re.compile(rb"[0-9a-f]{32}\n")

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_COMPARE_BYTES: Final = 1 << 20

#: Longest object of each kind, checked before memory is taken for it.
BYTES_MAX: Final = {
    names.CHUNKS: OBJECT_BYTES_MAX,
    names.PEER: OBJECT_BYTES_MAX,
    names.CUTS: CUT_BYTES_MAX,
    names.HOLDS: 0,
    names.NODES: 0,
    names.ENTRIES: 0,
    names.INTENTS: RECORD_BYTES_MAX,
    names.SWEEPS: RECORD_BYTES_MAX,
}


class LocalStore:
    """An :class:`kvpack.store.interface.ObjectStore` in one folder of one disk.

    Args:
        disk: The folder.
        place: How messages call it.
    """

    def __init__(self, disk: Disk, place: str) -> None:
        self._disk = disk
        self._place = place
        self._sums = FolderSums(disk, _is_object)
        self._entries = EntryIndex(disk, _is_object)

    @property
    def place(self) -> str:
        """How messages call it."""
        return self._place

    def close(self) -> None:
        """Give the folder back; the store is of no use afterwards."""
        self._disk.close_root()

    def identity(self, proposal: bytes) -> bytes:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        names.check_bytes("store.identity", proposal, names.IDENTITY_BYTES)
        text = identity_text(proposal)
        with contextlib.suppress(ConflictError), self.translated("", len(text)):
            self.publish("", [ObjectData(IDENTITY_NAME, text)])
        try:
            found = self._disk.read("", IDENTITY_NAME, 0, len(text) + 1)
        except OSError as error:
            raise StoreError(f"{self._place}: {IDENTITY_NAME}: {error.strerror}") from error
        return parse_identity(found)

    def put_if_absent(self, objects: Sequence[ObjectData]) -> tuple[bool, ...]:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        created = [False] * len(objects)
        for folder, indices in _by_folder(objects).items():
            batch = [objects[index] for index in indices]
            with self.translated(folder, sum(len(item.data) for item in batch)):
                for index, new in zip(indices, self.publish(folder, batch), strict=True):
                    created[index] = new
        return tuple(created)

    def publish(self, folder: str, batch: Sequence[ObjectData]) -> list[bool]:
        """Store ``batch`` in one folder: write all, flush all, link all, flush the folder."""
        private: dict[int, str] = {}
        created = [False] * len(batch)
        try:
            for index, item in enumerate(batch):
                name = item.name.rpartition("/")[2]
                if self._same(folder, name, item):
                    continue
                if item.data:
                    private[index] = private_name()
                    self._write(folder, private[index], item.data)
                else:
                    created[index] = self._create_empty(folder, name)
            for index, temporary in private.items():
                name = batch[index].name.rpartition("/")[2]
                created[index] = self._link(folder, temporary, name, batch[index])
        finally:
            for temporary in private.values():
                # After a rename the private name is gone, and after a failed create it never was.
                with contextlib.suppress(FileNotFoundError):
                    self._unlink(folder, temporary)
        # Also for what was there: its maker may not have come so far.
        self._disk.flush_folder(folder)
        return created

    def _write(self, folder: str, temporary: str, data: bytes) -> None:
        handle = self._sums.changing(
            folder, lambda: self._disk.create(folder, temporary), other=temporary
        )
        try:
            self._disk.write(handle, data)
            self._disk.flush(handle)
        finally:
            self._disk.close(handle)

    def _create_empty(self, folder: str, name: str) -> bool:
        try:
            self._disk.close(self._sums.changing(folder, lambda: self._disk.create(folder, name)))
        except FileExistsError:
            return False
        return True

    def _link(self, folder: str, temporary: str, name: str, item: ObjectData) -> bool:
        try:
            more = len(item.data) if folder else 0
            self._sums.changing(folder, lambda: self._disk.link(folder, temporary, name), more=more)
        except FileExistsError:
            # Somebody else was first between our look and our link.
            if not self._same(folder, name, item):
                raise
            return False
        return True

    def _same(self, folder: str, name: str, item: ObjectData) -> bool:
        """Whether the same bytes are there already; False where nothing is.

        Raises:
            ConflictError: Other bytes are there.
        """
        try:
            status = self._disk.status(folder, name)
            if not status.is_regular or status.file_bytes != len(item.data):
                raise ConflictError(item.name)
            view = memoryview(item.data)
            for offset in range(0, len(view), _COMPARE_BYTES):
                # A copy: views are compared byte by byte, twenty times as slowly as byte strings.
                piece = bytes(view[offset : offset + _COMPARE_BYTES])
                if self._disk.read(folder, name, offset, len(piece)) != piece:
                    raise ConflictError(item.name)
        except FileNotFoundError:
            return False
        return True

    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        folder, _, file = names.check_object_name(name).rpartition("/")
        try:
            status = self._disk.status(folder, file)
            if not status.is_regular:
                raise FormatError(name, "a regular file", "something else")
            if status.file_bytes > BYTES_MAX[names.kind_of(name)]:
                raise LimitError(name, f"{BYTES_MAX[names.kind_of(name)]} bytes", status.file_bytes)
            wanted = status.file_bytes - offset if length is None else length
            data = self._disk.read(folder, file, offset, max(0, wanted))
        except FileNotFoundError:
            raise NotStoredError(name) from None
        except OSError as error:
            raise StoreError(f"{name}: {error.strerror}") from error
        if len(data) != wanted:
            raise FormatError(name, f"{wanted} bytes from {offset}", f"{len(data)} bytes")
        return data

    def stat(self, wanted: Sequence[str]) -> tuple[StoredObject | None, ...]:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        folders: dict[str, list[str]] = {}
        for name in wanted:
            folder, _, file = names.check_object_name(name).rpartition("/")
            folders.setdefault(folder, []).append(file)
        found: dict[str, StoredObject] = {}
        for folder, files in folders.items():
            try:
                statuses = self._disk.statuses(folder, files)
            except OSError as error:
                raise StoreError(f"{self._place}/{folder}: {error.strerror}") from error
            for file, status in zip(files, statuses, strict=True):
                if status is not None and status.is_regular:
                    name = f"{folder}/{file}"
                    found[name] = _stored(name, status)
        return tuple(found.get(name) for name in wanted)

    def list(self, prefix: str, after: str = "", count_max: int = PAGE_NAMES) -> Page:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        found = sorted(
            name
            for folder in _folders_of(prefix)
            for name in self._object_names(folder)
            if name.startswith(prefix) and name > after
        )
        page = found[:count_max]
        objects = [stored for stored in self.stat(page) if stored is not None]
        return Page(tuple(objects), page[-1] if len(found) > len(page) else None)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        for folder in _folders_of(prefix):
            try:
                for file, status in self._disk.scan(folder):
                    name = f"{folder}/{file}"
                    if status.is_regular and name.startswith(prefix) and _is_object(folder, file):
                        yield _stored(name, status)
            except OSError as error:
                raise StoreError(f"{self._place}/{folder}: {error.strerror}") from error

    def entries(self, prefixes: Sequence[str]) -> Sequence[Sequence[str]]:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        places: dict[str, list[int]] = {}
        for index, prefix in enumerate(prefixes):
            places.setdefault(prefix.rpartition("/")[0], []).append(index)
        found: dict[int, Sequence[str]] = {}
        for folder, indices in places.items():
            links = [names.link_of_prefix(prefixes[index]) for index in indices]
            try:
                for index, listed in zip(indices, self._entries.find(folder, links), strict=True):
                    found[index] = listed
            except OSError as error:
                raise StoreError(f"{self._place}/{folder}: {error.strerror}") from error
        return [found[index] for index in range(len(prefixes))]

    def sizes(self) -> Sizes:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        try:
            return self._sums.total(_FOLDERS)
        except OSError as error:
            raise StoreError(f"{self._place}: {error.strerror}") from error

    def _object_names(self, folder: str) -> Iterator[str]:
        try:
            present = self._disk.names(folder)
        except OSError as error:
            raise StoreError(f"{self._place}/{folder}: {error.strerror}") from error
        return (name for file in present if names.is_object_name(name := f"{folder}/{file}"))

    def delete(self, doomed: Sequence[str]) -> int:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        return self._remove([names.check_object_name(name) for name in doomed])

    def _remove(self, doomed: Sequence[str]) -> int:
        folders: dict[str, list[str]] = {}
        for name in doomed:
            folder, _, file = name.rpartition("/")
            folders.setdefault(folder, []).append(file)
        count = 0
        for folder, files in folders.items():
            with self.translated(folder, 0):
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        self._unlink(folder, file)
                        count += 1
                self._disk.flush_folder(folder)
        return count

    def _unlink(self, folder: str, file: str) -> None:
        is_object = bool(folder and _is_object(folder, file))
        less = self._disk.status(folder, file).file_bytes if is_object else 0
        self._sums.changing(
            folder,
            lambda: self._disk.unlink(folder, file),
            more=-less,
            gone="" if is_object else file,
        )

    def expect(self, wanted: Sequence[str]) -> None:
        """A disk reads ahead by itself."""

    def free_bytes(self) -> int | None:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        try:
            return self._disk.free_bytes()
        except OSError:
            return None

    def irregular(self) -> tuple[Irregular, ...]:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        found = []
        for folder in _FOLDERS:
            for file, status in self._disk.scan(folder):
                counts = _is_object(folder, file)
                if counts is not None and not (counts and status.is_regular):
                    found.append(_irregular(f"{folder}/{file}" if folder else file, status))
        return tuple(sorted(found, key=lambda item: item.name))

    def remove_leftovers(self, doomed: Sequence[str]) -> int:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        for name in doomed:
            if not is_private_name(name.rpartition("/")[2]):
                raise FormatError("store.leftover", "a private name", f"{len(name)} characters")
        return self._remove(doomed)

    def collector(self) -> AbstractContextManager[None]:
        """See :class:`kvpack.store.interface.ObjectStore`."""
        return self._disk.lock(LOCK_NAME)

    @contextlib.contextmanager
    def translated(self, folder: str, needed_bytes: int) -> Iterator[None]:
        """Turn an ``OSError`` into the error that callers know, with the path and the numbers."""
        try:
            yield
        except OSError as error:
            where = f"{self._place}/{folder}".rstrip("/")
            if error.errno in _FULL:
                free = self.free_bytes()
                raise StoreFullError(where, explain(error), needed_bytes, free) from error
            raise PublishError(f"{where}: {explain(error)}") from error


def identity_text(identity: bytes) -> bytes:
    """What stands in the place's ``identity``."""
    return f"{identity.hex()}\n".encode()


def parse_identity(text: bytes) -> bytes:
    """The identity that stands in ``text``.

    Raises:
        FormatError: It is something else.
    """
    if not _IDENTITY_TEXT.fullmatch(text):
        raise FormatError("store.identity", "16 bytes in hexadecimal", f"{len(text)} bytes")
    return bytes.fromhex(text.decode())


def _by_folder(objects: Sequence[ObjectData]) -> dict[str, list[int]]:
    folders: dict[str, list[int]] = {}
    for index, item in enumerate(objects):
        folder = names.check_object_name(item.name).rpartition("/")[0]
        high = BYTES_MAX[names.kind_of(item.name)]
        if len(item.data) > high:
            raise LimitError(item.name, f"at most {high} bytes", f"{len(item.data)} bytes")
        folders.setdefault(folder, []).append(index)
    return folders


def _folders_of(prefix: str) -> tuple[str, ...]:
    """Folders in which names that begin with ``prefix`` can lie."""
    kind, _, rest = prefix.partition("/")
    if kind not in names.KINDS:
        raise FormatError("store.prefix", "a kind and a slash", f"{len(prefix)} characters")
    if kind != names.SHARDED:
        return (kind,)
    shard = rest.partition("/")[0]
    return tuple(f"{kind}/{name}" for name in names.SHARDS if name.startswith(shard[:1]))


#: All folders of a store, itself first.
_FOLDERS: Final = ("", *names.KINDS, *(f"{names.SHARDED}/{shard}" for shard in names.SHARDS))

#: What is no object and belongs where it is.
_KNOWN: Final = {
    "": frozenset((*names.KINDS, FORMAT_NAME, IDENTITY_NAME, LOCK_NAME)),
    names.SHARDED: frozenset(names.SHARDS),
}


def _is_object(folder: str, file: str) -> bool | None:
    """Whether a file is an object, by its name; None where it is none and belongs there."""
    if file in _KNOWN.get(folder, ()):
        return None
    return bool(folder) and names.is_object_name(f"{folder}/{file}")


def _stored(name: str, status: FileStatus) -> StoredObject:
    return StoredObject(name, status.file_bytes, status.modified_s)


def _irregular(name: str, status: FileStatus) -> Irregular:
    leftover = status.is_regular and is_private_name(name.rpartition("/")[2])
    return Irregular(name, status.file_bytes, status.modified_s, leftover)
