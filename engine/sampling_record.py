"""A small strict binary form for values that travel beside the rows.

A record is four bytes of magic, one byte of version and the fields in a fixed order: integers are
little-endian u32 or u64, reals are the bits of an IEEE 754 double, byte strings and lists carry
their length as u32 first. There are no optional fields, no padding and no names. Every length is
checked against its cap before memory is taken for it, and bytes after the last field are an error:
no two byte strings stand for the same bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvpack.errors import FormatError, LimitError, VersionError

MAGIC_BYTES: Final = 4

_U8, _U32, _U64, _F64 = "<B", "<I", "<Q", "<d"

_Element = TypeVar("_Element")


class RecordWriter:
    """Builds one record, field by field."""

    __slots__ = ("_parts",)

    def __init__(self, magic: bytes, version: int) -> None:
        """Begin a record of the kind ``magic``, four bytes, in ``version``."""
        self._parts = [magic, struct.pack(_U8, version)]

    def u32(self, value: int) -> RecordWriter:
        """Add an integer below 2^32."""
        self._parts.append(struct.pack(_U32, value))
        return self

    def u64(self, value: int) -> RecordWriter:
        """Add an integer below 2^64."""
        self._parts.append(struct.pack(_U64, value))
        return self

    def f64(self, value: float) -> RecordWriter:
        """Add a real, bit for bit."""
        self._parts.append(struct.pack(_F64, value))
        return self

    def blob(self, data: bytes) -> RecordWriter:
        """Add bytes behind their length."""
        self.u32(len(data))
        self._parts.append(data)
        return self

    def u32s(self, values: Sequence[int]) -> RecordWriter:
        """Add integers below 2^32 behind their count."""
        self.u32(len(values))
        self._parts.append(struct.pack(f"<{len(values)}I", *values))
        return self

    def finish(self) -> bytes:
        """The whole record."""
        return b"".join(self._parts)


class RecordReader:
    """Reads one record, field by field, in the order it was written."""

    __slots__ = ("_data", "_offset", "_where")

    def __init__(self, data: bytes, magic: bytes, version: int, where: str) -> None:
        """Check that ``data`` begins as a record of this kind and version.

        Raises:
            FormatError: It is another kind of record, or too short to be one.
            VersionError: It is of another version.
        """
        self._data, self._offset, self._where = data, 0, where
        if data[:MAGIC_BYTES] != magic:
            raise FormatError(f"{where}.magic", magic, data[:MAGIC_BYTES].hex() or "nothing")
        self._offset = MAGIC_BYTES
        found = int(self._number(_U8, "version"))
        if found != version:
            raise VersionError(f"{where}.version", version, found)

    def u32(self, name: str) -> int:
        """The next integer below 2^32.

        Raises:
            FormatError: The record ends before it.
        """
        return int(self._number(_U32, name))

    def u64(self, name: str) -> int:
        """The next integer below 2^64.

        Raises:
            FormatError: The record ends before it.
        """
        return int(self._number(_U64, name))

    def f64(self, name: str) -> float:
        """The next real.

        Raises:
            FormatError: The record ends before it.
        """
        return float(self._number(_F64, name))

    def blob(self, name: str, bytes_max: int) -> bytes:
        """The next byte string.

        Raises:
            LimitError: It is longer than ``bytes_max``.
            FormatError: The record ends before it does.
        """
        return self._take(self._length(name, bytes_max), name)

    def u32s(self, name: str, count_max: int) -> tuple[int, ...]:
        """The next list of integers below 2^32.

        Raises:
            LimitError: It has more than ``count_max`` entries.
            FormatError: The record ends before it does.
        """
        count = self._length(name, count_max)
        return struct.unpack(f"<{count}I", self._take(4 * count, name))

    def many(self, name: str, count_max: int, read: Callable[[], _Element]) -> tuple[_Element, ...]:
        """The next list, each entry read by ``read``.

        Raises:
            LimitError: It has more than ``count_max`` entries.
            FormatError: The record ends before it does.
        """
        return tuple(read() for _ in range(self._length(name, count_max)))

    def finish(self) -> None:
        """Check that nothing is left.

        Raises:
            FormatError: Bytes follow the last field.
        """
        left = len(self._data) - self._offset
        if left:
            raise FormatError(self._where, "the end of the record", f"{left} more bytes")

    def _length(self, name: str, most: int) -> int:
        length = self.u32(name)
        if length > most:
            raise LimitError(f"{self._where}.{name}", f"at most {most}", length)
        return length

    def _number(self, form: str, name: str) -> int | float:
        value: int | float = struct.unpack(form, self._take(struct.calcsize(form), name))[0]
        return value

    def _take(self, count: int, name: str) -> bytes:
        part = self._data[self._offset : self._offset + count]
        if len(part) != count:
            raise FormatError(f"{self._where}.{name}", f"{count} bytes", f"{len(part)} bytes")
        self._offset += count
        return part
