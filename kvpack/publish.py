"""Publish a file: durable first, then visible, and never over a file that is there.

A file is written under a private name in the folder where it will appear, flushed to the disk, and
only then linked to its name. Whoever looks at the name sees nothing or the whole file. A process
that dies leaves at most one private name, which :func:`is_private_name` recognises.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kvpack.errors import PublishError

_PREFIX: Final = ".kvpack-"
_SUFFIX: Final = ".tmp"

#: Mode of every file from the moment it exists, whatever the umask.
FILE_MODE: Final = 0o600

#: ``link`` answers one of these where a volume has no hard links.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})

_RENAME_EXCL: Final = 0x4

#: How much is written before the volume is asked to take it: long writes keep a disk busy, and what
#: waits in memory stays a small part of it.
WRITE_OUT_BYTES: Final = 8 << 20

_WHY: Final = MappingProxyType(
    {
        errno.EEXIST: "the name exists already, and nothing is ever replaced",
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the quota is used up",
        errno.EFBIG: "the file is larger than this volume or process may write",
        errno.EROFS: "the volume is read-only",
        errno.EACCES: "the folder does not let us write",
        errno.ENOENT: "the folder does not exist",
        errno.ENOTDIR: "the folder is not a folder",
        errno.ENAMETOOLONG: "the name is too long for this volume",
    }
)


def private_name() -> str:
    """A new private name. Random: two writers of one name never meet in one file."""
    return f"{_PREFIX}{secrets.token_hex(16)}{_SUFFIX}"


def is_private_name(name: str) -> bool:
    """Whether ``name`` is a leftover of a publication that never happened."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


class PrivateFile:
    """The file while it has only a private name. ``write`` takes whole buffers, never a part.

    Raises:
        PublishError: From ``write``, where the volume refuses the bytes.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.written_bytes = 0
        self._asked_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of ``data``; returns its length in bytes."""
        with memoryview(data).cast("B") as view:
            offset = 0
            while offset < len(view):
                with _translated(self._path, len(view) - offset):
                    offset += os.write(self._descriptor, view[offset:])
        self.written_bytes += offset
        if self.written_bytes - self._asked_bytes >= WRITE_OUT_BYTES:
            self._asked_bytes = self.written_bytes
            _write_out(self._descriptor, self.written_bytes)
        return offset


def _write_out(descriptor: int, length: int) -> None:
    """Let the disk take the first ``length`` bytes while more are made, and forget taken pages.

    Without it the disk stands still until the flush and then everybody waits; and a long file takes
    fresh pages all along, which cost more than the copy where a machine lends its memory. It is
    advice: a volume or a system that does not know it changes nothing, and the flush at the end
    makes the file durable and reports what failed on the way.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, length, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def publish_new(path: str | os.PathLike[str]) -> Iterator[PrivateFile]:
    """Yield a private file that becomes ``path`` when the block ends without an error.

    The file is 0600 from birth. On any error in the block nothing becomes visible and the private
    name is removed.

    Raises:
        PublishError: The name exists, the folder or the volume refuses, or the volume has neither
            hard links nor an exclusive rename.
    """
    target, name = Path(path), _file_name(os.fspath(path))
    with _translated(target):
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    private = private_name()
    try:
        descriptor = _create(target, folder, name, private)
        try:
            try:
                yield PrivateFile(target, descriptor)
                with _translated(target):
                    flush(descriptor)
            finally:
                os.close(descriptor)
            with _translated(target):
                link_without_replace(folder, private, name)
        finally:
            # After an exclusive rename the private name is gone already.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(private, dir_fd=folder)
        with _translated(target):
            os.fsync(folder)
    finally:
        os.close(folder)


def _file_name(path: str) -> str:
    name = os.path.basename(path)  # noqa: PTH119 - Path drops a trailing slash or dot
    if name in ("", ".", "..") or "\0" in path:
        raise PublishError(f"{path!r}: not a file name")
    return name


def _create(target: Path, folder: int, name: str, private: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _translated(target):
        # Found here, a taken name costs no byte written. The link below is what decides.
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        descriptor = os.open(private, flags, FILE_MODE, dir_fd=folder)
        os.fchmod(descriptor, FILE_MODE)  # A umask of 0777 would leave nobody, not even us.
        return descriptor


def flush(descriptor: int) -> None:
    """Make the file durable. On macOS fsync alone leaves the bytes in the drive's own cache."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def link_without_replace(folder: int, private: str, name: str) -> None:
    """Give the file ``private`` its name. Which of two callers does so first is decided here.

    On a volume without links the private name is gone afterwards, else it is still there.

    Raises:
        FileExistsError: The name is taken.
        OSError: The volume refuses, or offers neither links nor an exclusive rename.
    """
    try:
        os.link(private, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS or sys.platform != "darwin":
            raise
        _rename_exclusive(folder, private, name)


def _rename_exclusive(folder: int, private: str, name: str) -> None:
    """macOS volumes without hard links (exFAT, SMB) may still rename without replacing."""
    library = ctypes.CDLL(None, use_errno=True)
    source, target = os.fsencode(private), os.fsencode(name)
    if library.renameatx_np(folder, source, folder, target, _RENAME_EXCL) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def explain(error: OSError) -> str:
    """Why the volume refused, in words that say what to do."""
    code = error.errno or 0
    return _WHY.get(code, "the volume has no links" if code in _NO_LINKS else str(error.strerror))


@contextlib.contextmanager
def _translated(path: Path, missing_bytes: int = 0) -> Iterator[None]:
    """Turn an ``OSError`` about ``path`` into the one error that callers know."""
    try:
        yield
    except OSError as error:
        raise _publish_error(path, error, missing_bytes) from error


def _publish_error(path: Path, error: OSError, missing_bytes: int) -> PublishError:
    code, reason, detail = error.errno or 0, explain(error), ""
    if code in (errno.ENOSPC, errno.EDQUOT):
        free = "unknown"
        with contextlib.suppress(OSError):
            usage = os.statvfs(path.parent)
            free = str(usage.f_bavail * usage.f_frsize)
        detail = f" ({missing_bytes} bytes more are needed at least, {free} bytes are free)"
    return PublishError(f"{path}: cannot publish: {reason}{detail}")
