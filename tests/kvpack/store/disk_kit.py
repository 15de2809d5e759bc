"""A disk that remembers what was flushed, loses the rest, runs full, and dies where it is told."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvpack.store.disk import FileStatus
from kvpack.store.errors import StoreBusyError


class Crash(BaseException):
    """The machine stopped. Not an Exception: nothing may handle it."""


@dataclass
class File:
    """One file: what it holds, and what of that a power cut would leave."""

    data: bytes = b""
    flushed: bytes = b""
    modified_s: float = 0.0


@dataclass
class Folder:
    """Names as programs see them, and names that a power cut would leave."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    flushed: dict[str, File | Folder] = field(default_factory=dict)
    changes: int = 0


class SimulatedDisk:
    """See :class:`kvpack.store.disk.Disk`.

    Args:
        fold_case: Names that differ only by case are one name.
    """

    def __init__(self, *, fold_case: bool = False) -> None:
        self.root = Folder()
        self.fold_case = fold_case
        self.now_s = 0.0
        self.room_bytes = 1 << 40
        self.claimed_bytes: int | None = None
        self.crash_at: int | None = None
        self.calls = 0
        self.log: list[str] = []
        self._dead = False
        self._handles: dict[int, File] = {}
        self._numbers = itertools.count(3)
        self._locked = False

    def _call(self, what: str) -> None:
        if self._dead or self.calls == self.crash_at:
            self._dead = True
            raise Crash(what)
        self.calls += 1
        self.log.append(what)

    def after_crash(self, mode: str) -> SimulatedDisk:
        """The disk that the next start finds.

        Args:
            mode: ``lost``: only what was flushed. ``kept``: everything, as after kill -9.
                ``names``: all names, but of each file only what was flushed. ``cuts_lag``: the
                same, but of the folder of cuts only what was flushed. ``cuts_lead``: all names of
                cuts, and of other folders only what was flushed.
        """
        files: dict[int, File] = {}

        def revive_file(found: File) -> File:
            data = found.data if mode == "kept" else found.flushed
            return files.setdefault(id(found), File(data, data, found.modified_s))

        def revive(folder: Folder, path: str) -> Folder:
            lags = {"lost": True, "cuts_lag": path == "cuts", "cuts_lead": path != "cuts"}
            chosen = folder.flushed if lags.get(mode) else folder.names
            names: dict[str, File | Folder] = {
                name: revive(item, name) if isinstance(item, Folder) else revive_file(item)
                for name, item in chosen.items()
            }
            return Folder(dict(names), dict(names))

        disk = SimulatedDisk(fold_case=self.fold_case)
        disk.root, disk.now_s, disk.room_bytes = revive(self.root, ""), self.now_s, self.room_bytes
        return disk

    def copy(self) -> SimulatedDisk:
        """An equal disk of its own."""
        disk = SimulatedDisk(fold_case=self.fold_case)
        disk.root, disk.now_s = copy.deepcopy(self.root), self.now_s
        return disk

    def _name(self, name: str) -> str:
        return name.lower() if self.fold_case else name

    def _folder(self, path: str) -> Folder:
        folder = self.root
        for part in path.split("/") if path else ():
            found = folder.names.get(self._name(part))
            if not isinstance(found, Folder):
                code = errno.ENOENT if found is None else errno.ENOTDIR
                raise OSError(code, os.strerror(code))
            folder = found
        return folder

    def _file(self, folder: str, name: str) -> File:
        found = self._folder(folder).names.get(self._name(name))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if isinstance(found, Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return found

    def _add(self, folder: str, name: str, item: File | Folder) -> None:
        found = self._folder(folder)
        if self._name(name) in found.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        found.names[self._name(name)] = item
        found.changes += 1

    def make_folder(self, folder: str) -> None:
        self._call(f"make_folder {folder}")
        above, _, name = folder.rpartition("/")
        self._add(above, name, Folder())

    def create(self, folder: str, name: str) -> int:
        self._call(f"create {folder}")
        file = File(modified_s=self.now_s)
        self._add(folder, name, file)
        handle = next(self._numbers)
        self._handles[handle] = file
        return handle

    def write(self, handle: int, data: bytes | memoryview) -> None:
        self._call(f"write {len(data)}")
        taken = bytes(data)[: self.room_bytes]
        self._handles[handle].data += taken
        self.room_bytes -= len(taken)
        if len(taken) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self, handle: int) -> None:
        self._call("flush")
        self._handles[handle].flushed = self._handles[handle].data

    def close(self, handle: int) -> None:
        del self._handles[handle]

    def link(self, folder: str, private: str, name: str) -> None:
        self._call(f"link {folder}")
        self._add(folder, name, self._file(folder, private))

    def unlink(self, folder: str, name: str) -> None:
        self._call(f"unlink {folder}")
        found = self._file(folder, name)
        del self._folder(folder).names[self._name(name)]
        self._folder(folder).changes += 1
        if all(found is not other for other in self._folder(folder).names.values()):
            self.room_bytes += len(found.data)

    def flush_folder(self, folder: str) -> None:
        self._call(f"flush_folder {folder}")
        found = self._folder(folder)
        found.flushed = dict(found.names)

    def read(self, folder: str, name: str, offset: int, length: int) -> bytes:
        return self._file(folder, name).data[offset : offset + length]

    def status(self, folder: str, name: str) -> FileStatus:
        found = self._folder(folder).names.get(self._name(name))
        if isinstance(found, Folder):
            return FileStatus(0, 0.0, False, True)
        file = self._file(folder, name)
        return FileStatus(len(file.data), file.modified_s, True, False)

    def statuses(self, folder: str, names: Sequence[str]) -> list[FileStatus | None]:
        known = self._folder(folder).names
        return [self.status(folder, n) if self._name(n) in known else None for n in names]

    def names(self, folder: str) -> list[str]:
        return list(self._folder(folder).names)

    def scan(self, folder: str) -> Iterator[tuple[str, FileStatus]]:
        for name in self.names(folder):
            yield name, self.status(folder, name)

    def stamp(self, folder: str) -> tuple[int, ...]:
        return (self._folder(folder).changes,)

    def is_settled(self, stamp: tuple[int, ...]) -> bool:
        return True

    def alone(self, folder: str) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        return contextlib.nullcontext(lambda: True)

    def move_stamp(self, folder: str, before: tuple[int, ...]) -> tuple[int, ...]:
        """Each change has a stamp of its own."""
        return self.stamp(folder)

    def close_root(self) -> None:
        """Nothing is open."""

    def free_bytes(self) -> int:
        return self.room_bytes if self.claimed_bytes is None else self.claimed_bytes

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        if self._locked:
            raise StoreBusyError(name)
        self._locked = True
        try:
            yield
        finally:
            self._locked = False
