"""Private files: 0600 from birth in 0700 folders, never through a link, never over another file.

The one exception are files outside our folders whose names an operator gave us.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from kvpack.errors import PublishError
from kvpack.publish import private_name, publish_new
from node.errors import CredentialsError

#: Certificates, keys and pins are a few KiB; nothing larger is read.
PRIVATE_FILE_BYTES_MAX: Final = 64 << 10


def make_private_folder(path: Path) -> None:
    """Create ``path`` with mode 0700, or check that it is a folder of ours that others cannot use.

    Raises:
        CredentialsError: It is a link, no folder, another user's, or open to others.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise CredentialsError(f"{path}: cannot be made ({error.strerror})") from error
    if not stat.S_ISDIR(status.st_mode):
        raise CredentialsError(f"{path}: expected a folder, not a link or a file")
    if status.st_uid != os.geteuid():
        raise CredentialsError(f"{path}: belongs to another user")
    if status.st_mode & 0o077:
        raise CredentialsError(f"{path}: mode {status.st_mode & 0o777:04o}, expected 0700")


def write_private(path: Path, content: bytes) -> None:
    """Write a new 0600 file: durable first, then visible. Never replaces, never through a link.

    Raises:
        CredentialsError: The name exists, or the file cannot be written.
    """
    try:
        with publish_new(path) as sink:
            sink.write(content)
    except PublishError as error:
        raise CredentialsError(str(error)) from error


def replace_private(path: Path, content: bytes) -> None:
    """Put a 0600 file in the place of ``path``: whoever reads sees the old one or the new one.

    Raises:
        CredentialsError: The file cannot be written.
    """
    fresh = path.with_name(private_name())
    write_private(fresh, content)
    rename_private(fresh, path)


def rename_private(path: Path, target: Path) -> None:
    """Give ``path`` the name ``target``, over whatever has it; both in one folder.

    Raises:
        CredentialsError: It cannot be renamed.
    """
    try:
        path.replace(target)
    except OSError as error:
        raise CredentialsError(f"{target}: cannot be replaced ({error.strerror})") from error
    _sync_folder(target.parent)


def remove_private(path: Path) -> None:
    """Remove a file of ours, durably.

    Raises:
        CredentialsError: It is not there, or cannot be removed.
    """
    try:
        path.unlink()
    except OSError as error:
        raise CredentialsError(f"{path}: cannot be removed ({error.strerror})") from error
    _sync_folder(path.parent)


def read_private(path: Path, *, follow: bool = False) -> bytes:
    """Read a file that only its owner can read.

    Args:
        path: The file.
        follow: It may be a link, as operators have them; then all this holds of what it leads to.

    Raises:
        CredentialsError: Missing, a link, no regular file, another user's, open to others, large.
    """
    return _read(path, forbidden_bits=0o077, follow=follow)


def read_public(path: Path, *, follow: bool = False) -> bytes:
    """Read a certificate: others may read it, but not write it.

    Args:
        path: The file.
        follow: As in :func:`read_private`.

    Raises:
        CredentialsError: Missing, a link, no regular file, another user's, writable, large.
    """
    return _read(path, forbidden_bits=0o022, follow=follow)


def _read(path: Path, forbidden_bits: int, *, follow: bool) -> bytes:
    try:
        # Not blocking: opening a named pipe would wait for a writer for ever.
        flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        descriptor = os.open(path, flags)
    except OSError as error:
        raise CredentialsError(f"{path}: cannot be opened ({error.strerror})") from error
    with os.fdopen(descriptor, "rb") as source:
        # The checks are made on the open file: a name could change its meaning in between.
        status = os.fstat(source.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CredentialsError(f"{path}: expected a regular file")
        if status.st_uid != os.geteuid():
            raise CredentialsError(f"{path}: belongs to another user")
        mode = status.st_mode & 0o777
        if mode & forbidden_bits:
            raise CredentialsError(
                f"{path}: mode {mode:04o} is too open; chmod {mode & ~forbidden_bits:o} it"
            )
        try:
            content = source.read(PRIVATE_FILE_BYTES_MAX + 1)
        except OSError as error:
            raise CredentialsError(f"{path}: cannot be read ({error.strerror})") from error
    if len(content) > PRIVATE_FILE_BYTES_MAX:
        raise CredentialsError(f"{path}: larger than {PRIVATE_FILE_BYTES_MAX} bytes")
    return content


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
