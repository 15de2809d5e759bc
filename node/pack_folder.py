"""A folder of packs under names that clients choose. Whatever the name, nothing outside is touched.

Every call opens the folder without following a link and works relative to that handle, so no name
and no swapped link leads elsewhere. A pack is 0600 from birth in a 0700 folder. Writing a name
again replaces its pack in one step: whoever reads sees the old one or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvpack.errors import LimitError, PublishError
from kvpack.publish import FILE_MODE, PrivateFile, explain, flush, is_private_name, private_name
from node.errors import NodeBusyError, PackNotFoundError, UsageError
from node.files import make_private_folder

#: Longest name of a file on every usual volume.
NAME_BYTES_MAX: Final = 255

#: Packs in one folder. Each may be as large as a context.
FILES_MAX: Final = 256

#: Nobody writes one pack for so long.
LEFTOVER_S: Final = 24 * 3600

#: Separators of some system, drives and streams, wildcards, escapes.
_FORBIDDEN: Final = frozenset('/\\:*?"<>|%')


def tenant_folder(root: Path, tenant: str, default_tenant: str) -> Path:
    """Where packs of ``tenant`` are: below ``root``, whose own packs are the default tenant's."""
    if tenant == default_tenant:
        return root
    make_private_folder(root)
    return root / f".tenant-{tenant}"


def check_name(name: str) -> str:
    """``name``, if it is one part of a path on every system, and not a hidden one.

    Raises:
        LimitError: It is not.
    """
    encoded = name.encode("utf-8", "surrogatepass")
    sound = (
        0 < len(encoded) <= NAME_BYTES_MAX
        and not name.startswith(".")
        and not name.endswith((".", " "))
        and not _FORBIDDEN.intersection(name)
        and not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in name)
    )
    if not sound:
        expected = f"one part of a path, 1 to {NAME_BYTES_MAX} bytes of UTF-8, not hidden"
        raise LimitError("filename", expected, f"{len(encoded)} bytes that are none")
    return name


class PackFolder:
    """The packs of one tenant.

    Args:
        path: The folder; made private if it is not there.
        files_max: How many packs may be in it.
    """

    def __init__(self, path: Path, files_max: int = FILES_MAX) -> None:
        self._path = path
        self._files_max = files_max

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[PrivateFile]:
        """A file that becomes the pack ``name`` when the block ends without an error. Blocking.

        Raises:
            LimitError: No name for a pack.
            UsageError: Something else than a pack has that name.
            NodeBusyError: Too many packs are there.
            PublishError: The volume refuses.
            CredentialsError: The folder is not private.
        """
        check_name(name)
        target = self._path / name
        with self._opened() as folder:
            self._require_room(folder, name)
            private = private_name()
            with _translated(target):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(private, flags, FILE_MODE, dir_fd=folder)
            try:
                try:
                    with _translated(target):
                        os.fchmod(descriptor, FILE_MODE)  # Whatever the umask is.
                    yield PrivateFile(target, descriptor)
                    with _translated(target):
                        flush(descriptor)
                finally:
                    os.close(descriptor)
                _require_replaceable(folder, name)
                with _translated(target):
                    # It replaces the name, never what a link of that name would lead to.
                    os.replace(private, name, src_dir_fd=folder, dst_dir_fd=folder)
                    os.fsync(folder)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(private, dir_fd=folder)

    def open(self, name: str) -> io.FileIO:
        """The pack ``name`` for reading, unbuffered. Blocking.

        Raises:
            LimitError: No name for a pack.
            PackNotFoundError: It is not there.
            UsageError: Something else has that name.
            CredentialsError: The folder is not private.
        """
        check_name(name)
        with self._opened() as folder:
            try:
                # Not blocking: opening a named pipe would wait for a writer for ever.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(name, flags, dir_fd=folder)
            except FileNotFoundError:
                raise PackNotFoundError("filename: no pack of that name") from None
            except OSError as error:
                raise _no_pack(f"it cannot be opened ({error.strerror})") from error
        try:
            # On the open file: a name could change its meaning in between.
            _require_pack(os.fstat(descriptor))
            return io.FileIO(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        make_private_folder(self._path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with _translated(self._path):
            folder = os.open(self._path, flags)
        try:
            yield folder
        finally:
            os.close(folder)

    def _require_room(self, folder: int, name: str) -> None:
        there = _without_leftovers(folder)
        if name not in there and len(there) >= self._files_max:
            raise NodeBusyError(f"filename: {len(there)} packs are there, as many as may be")
        _require_replaceable(folder, name)


def _without_leftovers(folder: int) -> list[str]:
    """All names; those that writers left long ago, who did not come to their end, are removed."""
    names = os.listdir(folder)
    for name in filter(is_private_name, names):
        with contextlib.suppress(FileNotFoundError):
            age_s = time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
            if age_s > LEFTOVER_S:
                os.unlink(name, dir_fd=folder)
    return [name for name in names if not is_private_name(name)]


def _require_replaceable(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        _require_pack(os.stat(name, dir_fd=folder, follow_symlinks=False))


def _require_pack(status: os.stat_result) -> None:
    """A pack of ours is a regular file of this user with one name.

    Raises:
        UsageError: This is something else.
    """
    if not stat.S_ISREG(status.st_mode):
        raise _no_pack("it is no regular file")
    if status.st_nlink != 1:
        raise _no_pack("it has another name, too")
    if status.st_uid != os.geteuid():
        raise _no_pack("it belongs to another user")


def _no_pack(why: str) -> UsageError:
    return UsageError(f"filename: what has that name is no pack of this node: {why}")


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _no_pack("it is a link") from error
        raise PublishError(f"{path.name}: cannot be written: {explain(error)}") from error
