"""The disk, as the local store sees it: files by a folder's and a file's name, nothing by a path.

Every call stands for one thing that a crash can fall between. Tests pass a disk that remembers what
was flushed and loses the rest; :class:`PosixDisk` is the real one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from kvpack.publish import FILE_MODE, flush, link_without_replace
from kvpack.store.errors import StoreBusyError, StoreError

FOLDER_MODE: Final = 0o700

#: Longer than a tick of any volume's clock: a kernel's coarse one ticks every 1 to 10 ms.
TICK_NS: Final = 50_000_000

#: Longest wait for somebody else's change of a name, which takes microseconds. A process that was
#: stopped in the middle of one is not waited for any longer.
ALONE_S: Final = 2.0

#: The same for a folder that could not be had within :data:`ALONE_S`, in the seconds after that: a
#: save changes many names, and who was stopped may stay so.
BRIEFLY_S: Final = 0.002
AGAIN_AFTER_S: Final = 60.0

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: O_NONBLOCK: a FIFO that lies where a file should is refused, not waited for.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FileStatus(NamedTuple):
    """What a folder says about one name; links are not followed.

    Attributes:
        file_bytes: Length.
        modified_s: Seconds since 1970.
        is_regular: A plain file.
        is_folder: A folder.
    """

    file_bytes: int
    modified_s: float
    is_regular: bool
    is_folder: bool


class Disk(Protocol):
    """One folder and what is below it. ``folder`` is ``""`` for itself, else ``a`` or ``a/b``.

    All calls raise OSError as the operating system would.
    """

    def make_folder(self, folder: str) -> None:
        """Make ``folder``, 0700; FileExistsError where it is there."""

    def create(self, folder: str, name: str) -> int:
        """Create a file that is not there, 0600, and return a handle to write to."""

    def write(self, handle: int, data: bytes | memoryview) -> None:
        """Append all of ``data``."""

    def flush(self, handle: int) -> None:
        """Make what was written durable."""

    def close(self, handle: int) -> None:
        """Give the handle back."""

    def link(self, folder: str, private: str, name: str) -> None:
        """Give ``private`` its name; FileExistsError where the name is taken."""

    def unlink(self, folder: str, name: str) -> None:
        """Remove a name."""

    def flush_folder(self, folder: str) -> None:
        """Make the names of ``folder`` durable."""

    def read(self, folder: str, name: str, offset: int, length: int) -> bytes:
        """At most ``length`` bytes from ``offset``; FileNotFoundError, ELOOP for a link."""

    def status(self, folder: str, name: str) -> FileStatus:
        """What ``name`` is; FileNotFoundError."""

    def statuses(self, folder: str, names: Sequence[str]) -> list[FileStatus | None]:
        """What each of ``names`` is; None where there is nothing of that name."""

    def names(self, folder: str) -> list[str]:
        """All names in ``folder``, in any order."""

    def scan(self, folder: str) -> Iterator[tuple[str, FileStatus]]:
        """Every name in ``folder`` with what it is, in any order, a few at a time."""

    def stamp(self, folder: str) -> tuple[int, ...]:
        """Another value whenever a name came into ``folder`` or went from it.

        As fine as the volume's clock: two changes within one tick of it have one stamp.
        """

    def is_settled(self, stamp: tuple[int, ...]) -> bool:
        """Whether a change that comes now has another stamp: its tick is over."""

    def alone(self, folder: str) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """Keep others who ask for the same from changing the names of ``folder`` meanwhile.

        Gives a question: whether they were kept from it until now. Not where that could not be had
        within :data:`ALONE_S`, where it took so long that others may have given up waiting, or on
        a volume without locks.
        """

    def move_stamp(self, folder: str, before: tuple[int, ...]) -> tuple[int, ...]:
        """Give ``folder``, which changed, a stamp later than ``before`` if it has none; returns it.

        A change within the tick of an earlier one has that one's stamp at first. Whoever is
        :meth:`alone` and calls this after each change brings no stamp back.
        """

    def free_bytes(self) -> int:
        """Room on the volume for this user."""

    def lock(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Hold a lock that dies with the process. Raises StoreBusyError where it is held."""

    def close_root(self) -> None:
        """Give the folder back; the disk is of no use afterwards."""


class PosixDisk:
    """A real folder. Names are opened relative to open folders, and links are never followed.

    Args:
        root: The store's folder; it must exist. Links on the way to it are the user's own.

    Raises:
        StoreError: It is not a folder of ours that nobody else can enter.
        OSError: It cannot be opened.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(self._root)
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid() or mode & 0o077:
            self.close_root()
            raise StoreError(
                f"{root}: mode {mode:04o}, owner {found.st_uid}: "
                f"expected {FOLDER_MODE:04o}, owner {os.geteuid()}"
            )
        self._waited_for_again: dict[str, float] = {}

    def close_root(self) -> None:
        """Give the folder back; the disk is of no use afterwards."""
        os.close(self._root)

    @contextlib.contextmanager
    def _folder(self, folder: str) -> Iterator[int]:
        """An open folder. Each part is opened relative to the one before, and none is a link."""
        handle = os.dup(self._root)
        try:
            for part in folder.split("/") if folder else ():
                inner = os.open(part, _FOLDER, dir_fd=handle)
                os.close(handle)
                handle = inner
            yield handle
        finally:
            os.close(handle)

    def make_folder(self, folder: str) -> None:
        """See :class:`Disk`."""
        above, _, name = folder.rpartition("/")
        with self._folder(above) as parent:
            os.mkdir(name, FOLDER_MODE, dir_fd=parent)
        with self._folder(folder) as made:
            os.fchmod(made, FOLDER_MODE)  # whatever the umask took away

    def create(self, folder: str, name: str) -> int:
        """See :class:`Disk`."""
        with self._folder(folder) as parent:
            handle = os.open(name, _NEW, FILE_MODE, dir_fd=parent)
        os.fchmod(handle, FILE_MODE)
        return handle

    def write(self, handle: int, data: bytes | memoryview) -> None:
        """See :class:`Disk`."""
        view, written = memoryview(data), 0
        while written < len(view):
            written += os.write(handle, view[written:])

    def flush(self, handle: int) -> None:
        """See :class:`Disk`."""
        flush(handle)

    def close(self, handle: int) -> None:
        """See :class:`Disk`."""
        os.close(handle)

    def link(self, folder: str, private: str, name: str) -> None:
        """See :class:`Disk`."""
        with self._folder(folder) as parent:
            link_without_replace(parent, private, name)

    def unlink(self, folder: str, name: str) -> None:
        """See :class:`Disk`."""
        with self._folder(folder) as parent:
            os.unlink(name, dir_fd=parent)

    def flush_folder(self, folder: str) -> None:
        """See :class:`Disk`."""
        with self._folder(folder) as parent:
            os.fsync(parent)

    def read(self, folder: str, name: str, offset: int, length: int) -> bytes:
        """See :class:`Disk`."""
        with self._folder(folder) as parent:
            handle = os.open(name, _READ, dir_fd=parent)
        try:
            pieces, filled = [], 0
            while filled < length and (piece := os.pread(handle, length - filled, offset + filled)):
                pieces.append(piece)
                filled += len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        finally:
            os.close(handle)

    def status(self, folder: str, name: str) -> FileStatus:
        """See :class:`Disk`."""
        with self._folder(folder) as parent:
            return _status(os.stat(name, dir_fd=parent, follow_symlinks=False))

    def statuses(self, folder: str, names: Sequence[str]) -> list[FileStatus | None]:
        """See :class:`Disk`."""
        found: list[FileStatus | None] = []
        with self._folder(folder) as parent:
            for name in names:
                try:
                    found.append(_status(os.stat(name, dir_fd=parent, follow_symlinks=False)))
                except FileNotFoundError:
                    found.append(None)
        return found

    def names(self, folder: str) -> list[str]:
        """See :class:`Disk`."""
        with self._folder(folder) as parent:
            return os.listdir(parent)  # noqa: PTH208 - a handle, not a path

    def scan(self, folder: str) -> Iterator[tuple[str, FileStatus]]:
        """See :class:`Disk`."""
        with self._folder(folder) as parent, os.scandir(parent) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, _status(entry.stat(follow_symlinks=False))

    def stamp(self, folder: str) -> tuple[int, ...]:
        """See :class:`Disk`."""
        with self._folder(folder) as parent:
            return _stamp(parent)

    def is_settled(self, stamp: tuple[int, ...]) -> bool:
        """See :class:`Disk`. A stamp of the future never is."""
        return max(stamp[1:]) + TICK_NS < time.time_ns()

    @contextlib.contextmanager
    def alone(self, folder: str) -> Iterator[Callable[[], bool]]:
        """See :class:`Disk`. The lock goes with its handle: a process that dies holds nothing."""
        with self._folder(folder) as shared:
            # A file of its own: what is duplicated shares its lock.
            handle = os.open(".", _FOLDER, dir_fd=shared)
        try:
            since = self._lock_folder(folder, handle)
            yield lambda: since is not None and time.monotonic() < since + ALONE_S / 2
        finally:
            os.close(handle)

    def _lock_folder(self, folder: str, handle: int) -> float | None:
        is_brief = time.monotonic() < self._waited_for_again.get(folder, 0.0)
        since = _lock(handle, BRIEFLY_S if is_brief else ALONE_S)
        if since is not None:
            self._waited_for_again.pop(folder, None)
        elif not is_brief:
            self._waited_for_again[folder] = time.monotonic() + AGAIN_AFTER_S
        return since

    def move_stamp(self, folder: str, before: tuple[int, ...]) -> tuple[int, ...]:
        """See :class:`Disk`. The time of a name's change decides, by a nanosecond if need be."""
        with self._folder(folder) as parent:
            if (after := _stamp(parent))[1] > before[1]:
                return after
            os.utime(parent, ns=(os.fstat(parent).st_atime_ns, before[1] + 1))
            return _stamp(parent)

    def free_bytes(self) -> int:
        """See :class:`Disk`."""
        found = os.fstatvfs(self._root)
        return found.f_bavail * found.f_frsize

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """See :class:`Disk`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(name, flags, FILE_MODE, dir_fd=self._root)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreBusyError("another collector is at work on this store") from None
            yield
        finally:
            os.close(handle)


def _stamp(handle: int) -> tuple[int, ...]:
    found = os.fstat(handle)
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _lock(handle: int, seconds: float) -> float | None:
    """Lock an open folder, if that can be had within ``seconds``; returns when that was."""
    end, wait_s = time.monotonic() + seconds, 0.0002
    while True:
        now = time.monotonic()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if now >= end:
                return None
        except OSError:
            return None  # no locks on folders here, as on some network volumes
        else:
            return now
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.01)


def _status(found: os.stat_result) -> FileStatus:
    # One for each file of a store, so without names: it is a third of a scan's own work.
    mode = found.st_mode
    return FileStatus(found.st_size, found.st_mtime, stat.S_ISREG(mode), stat.S_ISDIR(mode))
