"""Stores beside a node's own: below the folders and buckets that its operator named, nowhere else.

A client names a store by a path on the node's machine, or by ``s3://BUCKET/PREFIX``. What it may so
reach is what the operator gave with ``kvnode serve --store-root``. For folders links are followed
first, then the real path is compared; a bucket's names have no links and no dots.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpack.errors import KvpackError
from kvpack.printable import is_printable
from kvpack.store import Budget, ObjectStore, WriterTools, open_store
from kvpack.store.errors import StoreError, StoreExtraError, StoreUnsafeError
from kvpack.store.interface import OpenedStore
from kvpack.store.places import scheme_of, shown
from kvpack.store.probe import AT_START
from node.errors import UsageError
from node.parked import PLACE_BYTES_MAX
from node.s3.place import S3Place

if TYPE_CHECKING:
    from node.s3.reach import S3

log = logging.getLogger(__name__)

#: Between two looks at a collector that is at work.
_PAUSE_S: Final = 0.05


def parse_root(text: str) -> Path | S3Place:
    """What ``--store-root`` names: a folder, or a place in a bucket.

    Raises:
        UsageError: A URL that is no ``s3://BUCKET/PREFIX``.
    """
    if not scheme_of(text):
        return Path(text)
    try:
        return S3Place.parse(text)
    except StoreError as error:
        raise UsageError(f"store root {shown(text)[:300]}: {error}") from error


@dataclass(frozen=True, slots=True)
class StoreRoots:
    """Below what a node opens stores.

    Attributes:
        roots: Folders, and places in buckets. None: the node opens no store but its own.
        budget: What each store may take.

    Raises:
        UsageError: One of them is no folder.
    """

    roots: tuple[Path | S3Place, ...] = ()
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        for root in self.roots:
            if isinstance(root, Path) and not root.is_dir():
                raise UsageError(f"store root {root}: no such folder")

    def require_safe(self) -> None:
        """Try the buckets among the roots, before the node serves. Blocking.

        One that does not answer now is only logged: it is tried again before anything is written.

        Raises:
            StoreUnsafeError: A service lets two creates of one name win.
            StoreExtraError: What reaches buckets is not installed.
        """
        for root in self.roots:
            if isinstance(root, Path):
                continue
            try:
                _s3().probe(root.url, AT_START)
            except (StoreUnsafeError, StoreExtraError):
                raise
            except KvpackError as error:
                log.warning("store root %s: not tried: %s", root.url, error)

    def find(self, text: str) -> Path | S3Place:
        """The store that ``text`` names: a real path, or a place in a bucket.

        Raises:
            UsageError: It is neither, or not below what was named.
        """
        length = len(text.encode("utf-8", errors="replace"))
        is_place = 1 <= length <= PLACE_BYTES_MAX and is_printable(text)
        if not is_place or not (text[0] == "/" or scheme_of(text)):
            raise UsageError(
                f"store: expected an absolute path or s3://BUCKET/PREFIX of at most "
                f"{PLACE_BYTES_MAX} printable bytes, found {length} bytes"
            )
        return self._find_bucket(text) if scheme_of(text) else self._find_folder(text)

    def _find_bucket(self, text: str) -> S3Place:
        try:
            place = S3Place.parse(text)
        except StoreError as error:
            raise UsageError(str(error)) from error
        if not any(isinstance(root, S3Place) and place.is_below(root) for root in self.roots):
            raise _outside(text)
        return place

    def _find_folder(self, text: str) -> Path:
        try:
            path = Path(text).resolve()
            allowed = [root.resolve() for root in self.roots if isinstance(root, Path)]
        except (OSError, RuntimeError) as error:
            raise UsageError(f"store {text}: {error}") from error
        if not any(path != root and path.is_relative_to(root) for root in allowed):
            raise _outside(text)
        return path

    @contextlib.contextmanager
    def opened(self, text: str, *, create: bool = False) -> Iterator[ObjectStore]:
        """The store at ``text``, closed again at the end of the block.

        Args:
            text: An absolute path on this machine, or ``s3://BUCKET/PREFIX``.
            create: Make the store where there is none; the folder above it, or the bucket, must be
                there.

        Raises:
            UsageError: It may not be opened.
            FormatError: Something else is there; also VersionError.
            StoreError: There is no such place, it cannot be reached, or others can enter it.
            PublishError: The volume refuses.
        """
        found = self.find(text)
        store: OpenedStore
        if isinstance(found, Path):
            store = open_store(found, create=create)
        else:
            store = _s3().open(found.url, create)
        try:
            yield store
        finally:
            store.close()

    def tools(self) -> WriterTools:
        """What a writer of one may not draw by itself."""
        return WriterTools(
            secrets.token_bytes(16), time.time, lambda: time.sleep(_PAUSE_S), self.budget
        )


def _outside(text: str) -> UsageError:
    return UsageError(f"store {text}: not below what this node was started with (--store-root)")


def _s3() -> S3:
    """What reaches buckets; imported where it is needed, for it is an extra.

    Raises:
        StoreExtraError: It is not installed.
    """
    try:
        from node.s3.reach import S3
    except ModuleNotFoundError as error:
        raise StoreExtraError(
            f"s3://: module {error.name!r} is not installed: pip install 'kvpack[s3]'"
        ) from error
    return S3()
