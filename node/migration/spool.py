"""The pack that a transfer is written into as it arrives: private until it is published."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from kvpack.bundle import BundleWriter
from kvpack.errors import PublishError
from kvpack.keys import EpochKey
from kvpack.publish import FILE_MODE, PrivateFile, explain, flush, link_without_replace
from node import fault_points

#: How much may wait to be made durable: what a power cut costs a transfer under way.
FLUSH_BYTES: Final = 64 << 20


class Pack(Protocol):
    """What a receiver writes the objects of a transfer into.

    Attributes:
        durable_objects: How many of the objects added would outlive a power cut.
        blocks: Whether adding one may wait for a disk.
    """

    durable_objects: int
    blocks: bool

    def add(self, chunk: memoryview) -> None:
        """Append one chunk object as it came."""

    def publish(self, manifest: bytes) -> None:
        """Make it durable."""

    def drop(self) -> None:
        """Remove it."""

    def suspend(self) -> None:
        """Let go of it, and leave it to the next start of this node."""


class NoSpool:
    """Keeps nothing: for a transfer that a restart may lose, such as a measurement."""

    durable_objects = 0
    blocks = False

    def add(self, chunk: memoryview) -> None:
        """Let the object go."""

    def publish(self, manifest: bytes) -> None:
        """Nothing was kept that could be made durable."""

    def drop(self) -> None:
        """There is no file."""

    def suspend(self) -> None:
        """There is nothing to leave."""


class Spool:
    """One private file on its way to ``path``. Blocking; one call at a time.

    The private name follows from the name, so a restarted node finds what it had of a transfer. It
    is written anew then, under the other of two names, and the first one goes when that is whole.

    Raises:
        PublishError: The name exists, or the folder or the volume refuses.
    """

    blocks = True

    def __init__(self, path: Path, key: EpochKey, header_bytes: bytes) -> None:
        self.path = path
        self.durable_objects = 0
        self._objects = 0
        self._waiting_bytes = 0
        self._published = False
        with _translated(path):
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            self._private, self._descriptor = _create(path)
        self._open = True
        self._writer = BundleWriter(PrivateFile(path, self._descriptor), key, header_bytes)

    def add(self, chunk: memoryview) -> None:
        """Append one chunk object as it came. Now and then what there is is made durable.

        Raises:
            PublishError: The disk is full, or the file was closed: its number may be another's.
        """
        if not self._open:
            raise PublishError(f"{self.path}: is closed")
        self._writer.add(chunk)
        self._objects += 1
        self._waiting_bytes += len(chunk)
        if self._waiting_bytes >= FLUSH_BYTES:
            with _translated(self.path):
                flush(self._descriptor)
            fault_points.reach("target.spool.flushed")
            self._waiting_bytes, self.durable_objects = 0, self._objects

    def publish(self, manifest: bytes) -> None:
        """Finish the pack; durable, and visible under its name, on return.

        Raises:
            PublishError: The name exists, or the disk refuses.
            FormatError: ``manifest`` does not refer to what was added.
            RuntimeError: Published or dropped before.
        """
        if not self._open:
            raise RuntimeError("this spool was published or dropped")
        self._writer.finish(manifest)
        with _translated(self.path), _folder(self.path.parent) as folder:
            flush(self._descriptor)
            fault_points.reach("target.spool.flushed")
            self._close()
            fault_points.reach("target.link.before")
            link_without_replace(folder, self._private.name, self.path.name)
            self._published = True
            fault_points.reach("target.link.after")
            self._private.unlink(missing_ok=True)
            os.fsync(folder)

    def drop(self) -> None:
        """Remove the file, private or published. Does nothing where there is none."""
        self._close()
        self._private.unlink(missing_ok=True)
        if self._published:
            self._published = False
            self.path.unlink(missing_ok=True)

    def suspend(self) -> None:
        """Close the file and leave it: the next start of this node goes on with it."""
        self._close()

    def _close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._descriptor)


def private_paths(path: Path) -> tuple[Path, Path]:
    """The two private names that a spool on its way to ``path`` may have."""
    names = (hashlib.sha256(f"{path.name}/{turn}".encode()).hexdigest()[:32] for turn in (1, 2))
    first, second = (path.with_name(f".kvpack-{name}.tmp") for name in names)
    return first, second


def left_over(path: Path) -> list[Path]:
    """What a process that died left of the spool of ``path``, most bytes first."""
    found = [one for one in (*private_paths(path), path) if one.is_file() and not one.is_symlink()]
    return sorted(found, key=lambda one: one.stat().st_size, reverse=True)


def _create(path: Path) -> tuple[Path, int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    first, second = private_paths(path)
    try:
        return first, os.open(first, flags, FILE_MODE)
    except FileExistsError:
        return second, os.open(second, flags, FILE_MODE)


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PublishError(f"{path}: cannot publish: {explain(error)}") from error
