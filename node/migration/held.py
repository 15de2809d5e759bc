"""Objects that this node holds already, by seal id: what a source need only name.

Sealing is deterministic, so equal rows under equal keys are equal objects: an object that is named
by its seal id is the one that would have been sent. Each is opened like any other before it is
used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from kvpack.chunk import OBJECT_BYTES_MAX
from kvpack.chunk.header import header_bytes, parse_header
from kvpack.chunk.reference import HEADER_BYTES_MAX, HEADER_FIXED_BYTES
from kvpack.errors import KvpackError

#: Objects that one transfer may be told to name: a bound on the answer to Prepare.
HELD_MAX: Final = 1 << 16


class HeldObjects(Protocol):
    """A set of chunk objects that can be read."""

    def seal_ids(self) -> list[bytes]:
        """32 bytes each."""
        ...

    def read(self, seal_id: bytes) -> bytes | None:
        """The object; None where it is not here, or not any more. Blocking."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


class NothingHeld:
    """The empty set."""

    def seal_ids(self) -> list[bytes]:
        """None."""
        return []

    def read(self, seal_id: bytes) -> bytes | None:
        """Nothing is here."""
        return None

    def close(self) -> None:
        """There is nothing to let go of."""


class HeldFile:
    """The objects of a pack that was never finished, read from its file.

    The file stays readable after its name is gone. What follows the last whole object is ignored;
    objects are not trusted: whoever takes one opens it.

    Args:
        path: The file.
        offset: Where its first object begins: the length of the pack's header.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, offset: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._descriptor: int | None = descriptor
        self._places = dict(_scan(descriptor, offset))

    def seal_ids(self) -> list[bytes]:
        """Of all whole objects, in file order."""
        return list(self._places)[:HELD_MAX]

    def read(self, seal_id: bytes) -> bytes | None:
        """The object with that seal id."""
        place, descriptor = self._places.get(seal_id), self._descriptor
        if place is None or descriptor is None:
            return None
        return os.pread(descriptor, place[1], place[0])

    def objects(self) -> Iterator[bytes]:
        """All whole objects, in file order."""
        for seal_id in list(self._places):
            chunk = self.read(seal_id)
            if chunk is not None:
                yield chunk

    def close(self) -> None:
        """Close the file; nothing is held then. A second time does nothing.

        The number of a closed descriptor goes to whoever opens a file next, so closing it again
        would close somebody else's.
        """
        descriptor, self._descriptor, self._places = self._descriptor, None, {}
        if descriptor is not None:
            os.close(descriptor)


def _scan(descriptor: int, offset: int) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """``(seal id, (offset, length))`` of every whole object from ``offset`` on."""
    size = os.fstat(descriptor).st_size
    while offset < size:
        start = os.pread(descriptor, HEADER_BYTES_MAX, offset)
        try:
            header = parse_header(start[: header_bytes(start[:HEADER_FIXED_BYTES])])
        except KvpackError:
            return
        length = header.reference.object_bytes
        if length > OBJECT_BYTES_MAX or offset + length > size:
            return
        yield header.reference.seal_id, (offset, length)
        offset += length
