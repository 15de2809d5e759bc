"""Where the bytes of a bundle come from: a file, a pipe, or one place of an open file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Protocol

from kvpack.errors import FieldError, FormatError


class ByteSource(Protocol):
    """Bytes in file order."""

    def fill(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes. Raises FormatError where there are not enough."""


class ReadableFile(Protocol):
    """The one method of a binary file or pipe that is needed."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read at most ``len(buffer)`` bytes; 0 at the end."""


def fill_from(file: ReadableFile, view: memoryview) -> int:
    """Fill ``view`` from ``file``; returns how many bytes came before the end.

    Raises:
        FormatError: ``file`` is not blocking, so its end cannot be told.
    """
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])
        if count is None:
            raise FormatError("input", "a blocking file or pipe", "a non-blocking one")
        if count == 0:
            break
        filled += count
    return filled


class PlacedSource:
    """Bytes of an open file from ``offset`` on, without its position: several threads may read it.

    The file is read, never mapped: a mapped file that somebody cuts short kills the process.
    """

    def __init__(self, descriptor: int, offset: int = 0) -> None:
        self._descriptor = descriptor
        self._offset = offset

    def seek(self, offset: int) -> None:
        """The next :meth:`fill` begins at ``offset``."""
        self._offset = offset

    def fill(self, view: memoryview) -> None:
        """Fill ``view``.

        Raises:
            FormatError: The file ends before.
        """
        filled = 0
        while filled < len(view):
            count = _read_at(self._descriptor, view[filled:], self._offset + filled)
            if count == 0:
                raise FormatError("file", f"{len(view)} more bytes", f"{filled} before its end")
            filled += count
        self._offset += filled


def _read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Read at most ``len(view)`` bytes from ``offset``; returns how many came."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    data = os.pread(descriptor, len(view), offset)
    view[: len(data)] = data
    return len(data)


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Name the chunk in an error about one of its fields."""
    try:
        yield
    except FieldError as error:
        raise type(error)(f"{where}: {error.field}", error.expected, error.found) from error
