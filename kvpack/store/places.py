"""Places of stores by their names: a folder by its path, and what else is installed by its URL.

kvpack itself knows folders alone and imports nothing that opens a socket. Whoever reaches another
place offers it through the entry point group ``kvpack.stores``, under the URL's scheme.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvpack.store.errors import StoreError, StoreExtraError
from kvpack.store.interface import OpenedStore
from kvpack.store.opening import open_store

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "kvpack.stores"

#: Which extra of this package brings what reaches a scheme.
EXTRAS: Final = MappingProxyType({"s3": "s3"})

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://")
_SECRETS: Final = re.compile(r"//[^/]*@|[?#].*", re.DOTALL)

#: What an entry point gives: it opens the store at a URL, and with ``create`` makes one.
Opener = Callable[[str, bool], OpenedStore]


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
    return find_opener(scheme)(str(place), create)


def find_opener(scheme: str) -> Opener:
    """What opens URLs of ``scheme``, from whatever is installed.

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


def _load(entry: EntryPoint) -> Opener:
    try:
        opener: Opener = entry.load()
    except ModuleNotFoundError as error:
        raise StoreExtraError(f"{entry.name}://: module {error.name!r} is not installed") from error
    return opener
