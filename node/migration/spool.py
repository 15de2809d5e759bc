"""The pack that a transfer is written into as it arrives: private until it is published."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from kvpack.bundle import BundleWriter
from kvpack.keys import EpochKey
from kvpack.publish import PrivateFile, publish_new


class Pack(Protocol):
    """What a receiver writes the objects of a transfer into."""

    def add(self, chunk: memoryview) -> None:
        """Append one chunk object as it came."""

    def publish(self, manifest: bytes) -> None:
        """Make it durable."""

    def drop(self) -> None:
        """Remove it."""


class NoSpool:
    """Keeps nothing: for a transfer that a restart may lose, such as a measurement."""

    def add(self, chunk: memoryview) -> None:
        """Let the object go."""

    def publish(self, manifest: bytes) -> None:
        """Nothing was kept that could be made durable."""

    def drop(self) -> None:
        """There is no file."""


class _Dropped(Exception):
    """Makes a publication remove its private file."""


class Spool:
    """One private file on its way to ``path``. Blocking; one call at a time.

    Raises:
        PublishError: The name exists, or the folder or the volume refuses.
    """

    def __init__(self, path: Path, key: EpochKey, header_bytes: bytes) -> None:
        self.path = path
        self._published = False
        self._publication: AbstractContextManager[PrivateFile] | None = publish_new(path)
        self._writer = BundleWriter(self._publication.__enter__(), key, header_bytes)

    def add(self, chunk: memoryview) -> None:
        """Append one chunk object as it came.

        Raises:
            PublishError: The disk is full.
        """
        self._writer.add(chunk)

    def publish(self, manifest: bytes) -> None:
        """Finish the pack; durable, and visible under its name, on return.

        Raises:
            PublishError: The name exists, or the disk refuses. The private file is gone.
            FormatError: ``manifest`` does not refer to what was added.
            RuntimeError: Published or dropped before.
        """
        if self._publication is None:
            raise RuntimeError("this spool was published or dropped")
        self._writer.finish(manifest)
        publication, self._publication = self._publication, None
        publication.__exit__(None, None, None)
        self._published = True

    def drop(self) -> None:
        """Remove the file, private or published. Does nothing where there is none."""
        publication, self._publication = self._publication, None
        if publication is not None:
            publication.__exit__(_Dropped, _Dropped(), None)
        elif self._published:
            self._published = False
            self.path.unlink(missing_ok=True)
