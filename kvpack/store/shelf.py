"""Many objects of one kind in few bytes: a store of a million chunks is listed as a whole."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from kvpack.store.interface import StoredObject

_ID_DIGITS = 64


class Shelf:
    """Objects whose names are a kind and one or two ids; 40 or 72 bytes each. Iterable.

    Args:
        kind: Of all of them: ``chunks``, ``peer``, ``cuts`` or ``nodes``.
        objects: In any order.
    """

    def __init__(self, kind: str, objects: Iterable[StoredObject]) -> None:
        self._prefix = f"{kind}/"
        self._ids = bytearray()
        self._sizes = array("Q")
        for item in objects:
            self._ids += bytes.fromhex(item.name[len(self._prefix) :].replace("-", ""))
            self._sizes.append(item.object_bytes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[StoredObject]:
        for ids, object_bytes in self.items():
            text = ids.hex()
            rest = f"-{text[_ID_DIGITS:]}" if len(text) > _ID_DIGITS else ""
            yield StoredObject(f"{self._prefix}{text[:_ID_DIGITS]}{rest}", object_bytes, 0.0)

    def items(self) -> Iterator[tuple[bytes, int]]:
        """The ids of each object, joined, and its length."""
        if not self._sizes:
            return
        width = len(self._ids) // len(self._sizes)
        for index, object_bytes in enumerate(self._sizes):
            yield bytes(self._ids[index * width : (index + 1) * width]), object_bytes

    @property
    def object_bytes(self) -> int:
        """All of them together."""
        return sum(self._sizes)
