"""The container of other engines' caches: safetensors, parsed by ourselves and to the last byte.

A file from somewhere is never given to a library that maps it, reads it lazily or believes its
header. Everything is checked before anything is used: the header's length and form, every name
once, every tensor's size, and that the tensors lie back to back and fill the file.

::

    8 bytes   header length N, little-endian
    N bytes   JSON object: name -> {dtype, shape, data_offsets}, and __metadata__ -> {text: text}
    the rest  the tensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from kvpack.interchange import CacheFileError

PREFIX_BYTES: Final = 8

#: 512 layers of six tensors with their metadata take about 700,000 bytes; the rest is for what
#: people write into the metadata.
HEADER_BYTES_MAX: Final = 4 << 20

#: Tensors and metadata entries, each: three times what 512 layers need.
ENTRIES_MAX: Final = 16_384

#: Sizes of a tensor and of a file: far above any, far below what would wrap anywhere.
_SIZE_MAX: Final = 1 << 48

_METADATA: Final = "__metadata__"
_FIELDS: Final = frozenset({"dtype", "shape", "data_offsets"})

#: Bytes of one element.
ELEMENT_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class StoredTensor:
    """One tensor: row-major, little-endian, read-only.

    Attributes:
        dtype: As safetensors spells it.
        shape: Sizes, outermost first.
        data: Its bytes, exactly as many as the shape says.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True, repr=False)
class TensorFile:
    """One whole file.

    Attributes:
        tensors: By name.
        metadata: Text by name.
    """

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def parse_tensor_file(data: bytes | memoryview) -> TensorFile:
    """Read a whole file that is in memory.

    Raises:
        CacheFileError: Its header or a tensor is not exactly what the format asks for.
    """
    header_bytes = int.from_bytes(data[:PREFIX_BYTES], "little")
    room = min(HEADER_BYTES_MAX, len(data) - PREFIX_BYTES)
    if not 2 <= header_bytes <= room:
        refuse("header", f"2 to {max(room, 2)} bytes in {len(data)} bytes", header_bytes)
    start = PREFIX_BYTES + header_bytes
    entries = _json_object(bytes(data[PREFIX_BYTES:start]))
    metadata = _metadata(entries.pop(_METADATA, {}))
    if len(entries) > ENTRIES_MAX:
        refuse("header", f"at most {ENTRIES_MAX} tensors", len(entries))
    body = memoryview(data)[start:].toreadonly()
    spans = {name: _span(name, entry) for name, entry in entries.items()}
    _require_cover(spans, len(body))
    return TensorFile(
        {
            name: StoredTensor(entries[name]["dtype"], tuple(entries[name]["shape"]), body[a:b])
            for name, (a, b) in spans.items()
        },
        metadata,
    )


def header_of(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Length and header of a file whose tensors follow in this order.

    Args:
        tensors: ``(name, dtype, shape)``.
        metadata: Text by name.
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * ELEMENT_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    # Padded with spaces, so that the tensors begin on a boundary of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def refuse(field: str, expected: object, found: object) -> NoReturn:
    """Say what is wrong with the file.

    Raises:
        CacheFileError: Always.
    """
    raise CacheFileError(field, expected, found)


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_float=_no_number,
            parse_constant=_no_number,
        )
    except (ValueError, RecursionError):
        refuse("header", "JSON with each name once", "something else")
    if not isinstance(value, dict) or not text.startswith(b"{"):
        refuse("header", "a JSON object", type(value).__name__)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError
    return value


def _no_number(_: str) -> NoReturn:
    raise ValueError


def _label(name: str) -> str:
    return f"tensor {name[:60]!r}"


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        refuse("metadata", "text by name", "something else")
    if len(value) > ENTRIES_MAX:
        refuse("metadata", f"at most {ENTRIES_MAX} entries", len(value))
    return value


def _span(name: str, entry: object) -> tuple[int, int]:
    """Where the tensor lies: ``(first byte, one past the last)``, as long as its shape says."""
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        refuse(_label(name), "dtype, shape and data_offsets", "something else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        refuse(f"{_label(name)}.dtype", f"one of {', '.join(ELEMENT_BYTES)}", repr(dtype)[:40])
    for field, sizes in (("shape", shape), ("data_offsets", offsets)):
        if not _are_sizes(sizes):
            refuse(f"{_label(name)}.{field}", "a list of sizes", "something else")
    expected_bytes = math.prod(shape) * ELEMENT_BYTES[dtype]
    if len(offsets) != 2 or offsets[1] - offsets[0] != expected_bytes:
        refuse(f"{_label(name)}.data_offsets", f"two, {expected_bytes} bytes apart", offsets)
    return offsets[0], offsets[1]


def _are_sizes(value: object) -> bool:
    # A cache's tensors have four axes; whoever states a hundred means to be multiplied out.
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(type(size) is int and 0 <= size <= _SIZE_MAX for size in value)
    )


def _require_cover(spans: Mapping[str, tuple[int, int]], data_bytes: int) -> None:
    """Tensors lie back to back and fill the file: no gap, no overlap, nothing after them."""
    reached = 0
    for first, end, name in sorted((first, end, name) for name, (first, end) in spans.items()):
        if first != reached:
            refuse(f"{_label(name)}.data_offsets", f"beginning at byte {reached}", first)
        reached = end
    if reached != data_bytes:
        refuse("tensors", f"{reached} bytes, as the header says", f"{data_bytes} bytes")
