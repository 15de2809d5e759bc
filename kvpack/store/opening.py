"""Opening a store in a folder, and making one: which folder is a store at all?"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from kvpack.errors import FormatError, VersionError
from kvpack.publish import is_private_name
from kvpack.store import names
from kvpack.store.disk import FOLDER_MODE, Disk, PosixDisk
from kvpack.store.errors import StoreError
from kvpack.store.interface import ObjectData
from kvpack.store.local import FORMAT_NAME, LOCK_NAME, LocalStore

FORMAT: Final = b"kvpack-store-v1\n"


def open_store(path: Path | str, *, create: bool = False) -> LocalStore:
    """The store in the folder ``path``.

    Args:
        path: The folder. Links on the way to it are followed, links inside never.
        create: Make folder and store where there is none yet; what is there is left alone.

    Raises:
        FormatError: The folder holds something else, or nothing and ``create`` is not given.
        VersionError: A store of another version.
        StoreError: There is no such folder, or others can enter it.
        PublishError: The volume refuses.
    """
    where = Path(path)
    try:
        if create:
            _make_root(where)
        disk = PosixDisk(where)
    except ValueError as error:
        raise StoreError(f"{str(where)[:300]!r}: not a folder's name") from error
    except OSError as error:
        raise StoreError(f"{where}: {error.strerror}") from error
    try:
        if create:
            initialise(disk, str(where))
        return LocalStore(checked(disk), str(where))
    except BaseException:
        disk.close_root()
        raise


def initialise(disk: Disk, place: str) -> None:
    """Make an empty store, or finish one that a crash interrupted; an existing one stays.

    Raises:
        FormatError: The folder holds something else.
        PublishError: The volume refuses.
    """
    store = LocalStore(disk, place)
    with store.translated("", 0):
        present = set(disk.names(""))
        if FORMAT_NAME in present:
            return
        strange = present - {*names.KINDS, LOCK_NAME}
        if any(not is_private_name(name) for name in strange):
            raise FormatError("store", "an empty folder or a store", "other files")
        shards = [f"{names.SHARDED}/{shard}" for shard in names.SHARDS]
        for folder in (*names.KINDS, *shards):
            with contextlib.suppress(FileExistsError):
                disk.make_folder(folder)
        disk.flush_folder(names.SHARDED)
        disk.flush_folder("")
        # The format appears last: whoever sees it sees every folder.
        store.publish("", [ObjectData(FORMAT_NAME, FORMAT)])


def checked(disk: Disk) -> Disk:
    """Return ``disk`` if its folder is a store of this version.

    Raises:
        FormatError: Not a store. VersionError: One of another version.
    """
    try:
        found = disk.read("", FORMAT_NAME, 0, len(FORMAT) + 1)
    except OSError as error:
        raise FormatError("store", f"a file {FORMAT_NAME!r}", error.strerror) from error
    check_format(found)
    return disk


def check_format(found: bytes) -> None:
    """Refuse a store whose ``format`` says something else.

    Raises:
        VersionError: It is one of another version.
    """
    if found != FORMAT:
        text = found[:32].decode(errors="replace").strip()
        raise VersionError("store.format", FORMAT.decode().strip(), repr(text))


def _make_root(where: Path) -> None:
    """Make the store's own folder, 0700 whatever the umask, and make its name durable."""
    try:
        where.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        return
    where.chmod(FOLDER_MODE)
    above = os.open(where.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(above)
    finally:
        os.close(above)
