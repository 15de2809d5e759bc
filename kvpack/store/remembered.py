"""What a process remembers of a folder store, so that a call does not read whole folders.

Two things are derived from names alone: how many bytes lie in each folder, and which entries hang
from which link. Both stand only as long as the folder's stamp does. A change of our own moves the
sum along; a stamp that somebody else moved makes the folder be read again. Nothing of this is on
disk, so nothing can be out of date there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kvpack.store.disk import Disk
from kvpack.store.interface import Sizes
from kvpack.store.names import TAIL_BYTES

_Result = TypeVar("_Result")

#: Link, rest, tail, cut: an entry's name without its hyphens.
_ENTRY_BYTES: Final = 32 + 1 + TAIL_BYTES + 32


@dataclass(slots=True)
class _FolderSum:
    """Bytes of one folder's objects, and the other files in it, whose lengths may change."""

    stamp: tuple[int, ...]
    object_bytes: int
    others: set[str] = field(default_factory=set)


class FolderSums:
    """How many bytes lie in each folder of a store.

    Args:
        disk: The store's folder.
        is_object: Whether a file of a folder, by both names, is an object; None: it is not counted.
    """

    def __init__(self, disk: Disk, is_object: Callable[[str, str], bool | None]) -> None:
        self._disk = disk
        self._is_object = is_object
        self._sums: dict[str, _FolderSum] = {}
        self._lock = threading.Lock()

    def changing(
        self,
        folder: str,
        work: Callable[[], _Result],
        *,
        more: int = 0,
        other: str = "",
        gone: str = "",
    ) -> _Result:
        """Do ``work``, which makes or removes one name in ``folder``.

        Where the folder is as it was remembered, so it is afterwards, changed by this. Between
        both looks nobody else who goes through here can change it: what they did would be taken for
        ours, and left out until the folder is read again. A name that another program puts there
        in just these microseconds is.

        Args:
            folder: Which.
            work: One call of the disk. Where it raises nothing was changed.
            more: By how many bytes the objects become more.
            other: A file that is no object and that it made.
            gone: One that it removed.
        """
        with self._lock, self._disk.alone(folder) as is_alone:
            before = self._disk.stamp(folder)
            done = work()
            # Others have sums, too, of any stamp that was before.
            after = self._disk.move_stamp(folder, before)
            known = self._sums.get(folder)
            if known is None:
                return done
            if known.stamp != before or not is_alone():
                del self._sums[folder]
                return done
            known.stamp = after
            known.object_bytes += more
            known.others.discard(gone)
            if other:
                known.others.add(other)
            return done

    def total(self, folders: Iterable[str]) -> Sizes:
        """The bytes in ``folders``. Reads those that are not as they were remembered.

        Raises:
            OSError: A folder cannot be read.
        """
        object_bytes = other_bytes = 0
        for folder in folders:
            found = self._sum(folder)
            object_bytes += found.object_bytes
            if found.others:
                statuses = self._disk.statuses(folder, sorted(found.others))
                other_bytes += sum(status.file_bytes for status in statuses if status is not None)
        return Sizes(object_bytes, other_bytes)

    def _look(self, folder: str) -> tuple[int, ...]:
        """The stamp of ``folder``; in the middle of a change, where it may be an earlier one, none.

        Returns: ``()``, which no folder has, where it cannot be told.
        """
        stamp = self._disk.stamp(folder)
        if self._disk.is_settled(stamp):
            return stamp
        with self._disk.alone(folder) as is_alone:
            stamp = self._disk.stamp(folder)
            return stamp if is_alone() else ()

    def _sum(self, folder: str) -> _FolderSum:
        stamp = self._look(folder)
        with self._lock:
            known = self._sums.get(folder)
            if known is not None and known.stamp == stamp:
                return _FolderSum(stamp, known.object_bytes, set(known.others))
        found = self._read(folder, stamp)
        with self._lock:
            # What came or went while it was read may or may not be in it: then it is not kept.
            if self._disk.stamp(folder) == stamp:
                self._sums[folder] = _FolderSum(stamp, found.object_bytes, set(found.others))
            else:
                self._sums.pop(folder, None)
        return found

    def _read(self, folder: str, stamp: tuple[int, ...]) -> _FolderSum:
        found = _FolderSum(stamp, 0)
        for name, status in self._disk.scan(folder):
            counts = self._is_object(folder, name)
            if counts is None:
                continue
            if counts and status.is_regular:
                found.object_bytes += status.file_bytes
            else:
                found.others.add(name)
        return found


class EntryIndex:
    """The names of all entries, by their links: one sorted run of fixed-size records a folder.

    It takes 81 bytes for an entry, and of a folder that changed is made again.

    Args:
        disk: The store's folder.
        is_object: As in :class:`FolderSums`.
    """

    def __init__(self, disk: Disk, is_object: Callable[[str, str], bool | None]) -> None:
        self._disk = disk
        self._is_object = is_object
        self._runs: dict[str, tuple[tuple[int, ...], _Run]] = {}

    def find(self, folder: str, links: Sequence[bytes]) -> Iterator[list[str]]:
        """For each of ``links``, the names of its entries in ``folder``, in order.

        Raises:
            OSError: The folder cannot be read.
        """
        stamp = self._disk.stamp(folder)
        known = self._runs.get(folder)
        if known is None or known[0] != stamp:
            # Asked before it is read: what comes after that has another stamp.
            settled = self._disk.is_settled(stamp)
            known = stamp, self._read(folder)
            if settled and self._disk.stamp(folder) == stamp:
                self._runs[folder] = known
        for link in links:
            yield [_entry_name(folder, record) for record in known[1].beginning_with(link)]

    def _read(self, folder: str) -> _Run:
        present = self._disk.names(folder)
        entries = (name for name in present if self._is_object(folder, name))
        return _Run(bytes.fromhex(name.replace("-", "")) for name in entries)


class _Run:
    """Sorted records of one size."""

    def __init__(self, records: Iterable[bytes]) -> None:
        self._data = b"".join(sorted(records))
        self._count = len(self._data) // _ENTRY_BYTES

    def beginning_with(self, link: bytes) -> Iterator[bytes]:
        """The records of ``link``, in order: a bisection, then as many steps as there are."""
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            if self._record(middle) < link:
                low = middle + 1
            else:
                high = middle
        for index in range(low, self._count):
            record = self._record(index)
            if not record.startswith(link):
                return
            yield record

    def _record(self, index: int) -> bytes:
        return self._data[index * _ENTRY_BYTES : (index + 1) * _ENTRY_BYTES]


def _entry_name(folder: str, record: bytes) -> str:
    text = record.hex()
    return f"{folder}/{text[:64]}-{text[64:66]}-{text[66:98]}-{text[98:]}"
