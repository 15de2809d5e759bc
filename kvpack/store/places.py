"""Places of stores by their names: a folder by its path, and what else is installed by its URL.

kvpack itself knows folders alone and imports nothing that opens a socket. Whoever reaches another
place offers it through the entry point group ``kvpack.stores``, under the URL's scheme.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from kvpack.bundle.writer import Sink
from kvpack.publish import publish_new
from kvpack.store.errors import StoreError, StoreExtraError
from kvpack.store.interface import OpenedStore
from kvpack.store.opening import open_store
from kvpack.store.probe import THOROUGH, ProbeReport, probe_store

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "kvpack.stores"

#: Which extra of this package brings what reaches a scheme.
EXTRAS: Final = MappingProxyType({"s3": "s3"})

_PAUSE_S: Final = 0.05

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://")
_SECRETS: Final = re.compile(r"//[^/]*@|[?#].*", re.DOTALL)


class Reach(Protocol):
    """What an entry point gives: how places of one scheme are reached."""

    def open(self, url: str, create: bool) -> OpenedStore:
        """See :func:`open_place`."""

    def probe(self, url: str) -> ProbeReport:
        """See :func:`probe_place`; there need not be a store yet."""

    def publish_new(self, url: str) -> AbstractContextManager[Sink]:
        """See :func:`publish_at`."""

    def link(self, url: str, lifetime_s: int) -> str:
        """See :func:`link_to`."""


def scheme_of(place: str) -> str:
    """The scheme of a URL; empty for a folder's path."""
    found = _SCHEME.match(place)
    return "" if found is None else found[1]


def shown(place: str) -> str:
    """``place`` as messages may show it: people paste secrets into URLs, where none belongs."""
    if not scheme_of(place):
        return place
    return _SECRETS.sub(lambda found: "//…@" if found[0][0] == "/" else "?…", place)


def open_place(place: Path | str, *, create: bool = False) -> OpenedStore:
    """The store at ``place``, a folder or a URL such as ``s3://bucket/prefix``.

    Args:
        place: Where.
        create: Make a store where there is none yet; what is there is left alone.

    Raises:
        StoreExtraError: Nothing that is installed reaches such a place.
        FormatError: Something else is there, or nothing and ``create`` is not given.
        VersionError: A store of another version.
        StoreError: It cannot be reached or entered.
        PublishError: The volume refuses.
    """
    scheme = scheme_of(str(place))
    if not scheme:
        return open_store(place, create=create)
    return find_reach(scheme).open(str(place), create)


def probe_place(place: str) -> ProbeReport:
    """Try, on objects of our own, whether a place can keep packs.

    Args:
        place: A folder that is a store, or a URL below which one may be made.

    Raises:
        StoreUnsafeError: It breaks a promise; says which.
        KvpackError: It cannot be asked.
    """
    scheme = scheme_of(place)
    if scheme:
        return find_reach(scheme).probe(place)
    with contextlib.closing(open_store(place)) as store:
        return probe_store(store, secrets.token_bytes(16), time.time, _pause, THOROUGH)


def publish_at(place: str) -> AbstractContextManager[Sink]:
    """A sink that becomes the file or object ``place`` when the block ends without an error.

    Raises:
        PublishError: The name exists, or the volume refuses.
        StoreError: The place cannot be reached.
    """
    scheme = scheme_of(place)
    return find_reach(scheme).publish_new(place) if scheme else publish_new(place)


def link_to(place: str, lifetime_s: int) -> str:
    """A URL by which anybody can read the object at ``place`` for a while. It is a secret.

    Raises:
        StoreError: No such object, or a folder's path: files have no links.
    """
    scheme = scheme_of(place)
    if not scheme:
        raise StoreError(f"{place}: expected s3://bucket/key: files have no links")
    return find_reach(scheme).link(place, lifetime_s)


def find_reach(scheme: str) -> Reach:
    """What reaches places of ``scheme``, from whatever is installed.

    Raises:
        StoreExtraError: Nothing does, or what it needs is not installed.
        StoreError: No such kind of place is known.
    """
    # Imported here: it loads a mail parser and a socket module, which nothing else needs.
    import importlib.metadata

    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == scheme:
            return _load(entry)
    if scheme not in EXTRAS:
        raise StoreError(f"{scheme}://: expected a folder's path or s3://bucket/prefix")
    raise StoreExtraError(f"{scheme}://: nothing that is installed reaches it")


def _load(entry: EntryPoint) -> Reach:
    try:
        made: Reach = entry.load()()
    except ModuleNotFoundError as error:
        raise StoreExtraError(f"{entry.name}://: module {error.name!r} is not installed") from error
    return made


def _pause() -> None:
    time.sleep(_PAUSE_S)
