"""Safetensors bytes as float32 arrays. Bytes in, arrays out: no file is opened here.

The layout is an 8-byte little-endian header length, a JSON header, then the tensors. Every length
is checked against the bytes at hand before memory is taken for it, tensors must cover the data
exactly, and nothing but floating point is accepted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt

from kvpack.errors import FormatError, LimitError

Floats = npt.NDArray[np.float32]

LENGTH_BYTES: Final = 8

#: The cap of the safetensors library itself; a header lists names and shapes, never data.
HEADER_BYTES_MAX: Final = 100_000_000

#: Bytes of one element, by the header's name of the type.
ELEMENT_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}


def decode_safetensors(data: bytes | memoryview) -> dict[str, Floats]:
    """Every tensor of a safetensors file as float32; half-precision values convert exactly.

    Raises:
        FormatError: Not safetensors, a tensor that is not F32, F16 or BF16, overlapping or missing
            data, or a size that contradicts a shape.
        LimitError: The header is longer than its cap.
    """
    view = memoryview(data).cast("B")
    header, start = _read_header(view)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    ranges = {name: _checked_range(name, entry) for name, entry in entries.items()}
    _check_cover(ranges, len(view) - start)
    return {
        name: _as_float32(view[start + first : start + end], entries[name])
        for name, (first, end) in ranges.items()
    }


def _read_header(view: memoryview) -> tuple[dict[str, Any], int]:
    if len(view) < LENGTH_BYTES:
        raise FormatError("safetensors.bytes", f">= {LENGTH_BYTES}", len(view))
    size = int.from_bytes(view[:LENGTH_BYTES], "little")
    if size > HEADER_BYTES_MAX:
        raise LimitError("safetensors.header_bytes", f"<= {HEADER_BYTES_MAX}", size)
    start = LENGTH_BYTES + size
    if start > len(view):
        raise FormatError("safetensors.header_bytes", f"<= {len(view) - LENGTH_BYTES}", size)
    try:
        header = json.loads(bytes(view[LENGTH_BYTES:start]), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError("safetensors.header", "a JSON object", type(error).__name__) from error
    if not isinstance(header, dict):
        raise FormatError("safetensors.header", "a JSON object", type(header).__name__)
    return header, start


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name occurs twice")
    return mapping


def _checked_range(name: str, entry: object) -> tuple[int, int]:
    """``(first, end)`` of a tensor's bytes, once type, shape and length agree."""
    if not isinstance(entry, Mapping):
        raise FormatError(name, "an object", type(entry).__name__)
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise FormatError(f"{name}.dtype", " or ".join(ELEMENT_BYTES), dtype)
    if not _naturals(shape):
        raise FormatError(f"{name}.shape", "a list of lengths", shape)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{name}.data_offsets", "two ascending offsets", offsets)
    expected = math.prod(shape) * ELEMENT_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        raise FormatError(f"{name}.data_bytes", expected, offsets[1] - offsets[0])
    return offsets[0], offsets[1]


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(ranges: Mapping[str, tuple[int, int]], data_bytes: int) -> None:
    """Refuse data that no tensor or more than one tensor claims."""
    reached = 0
    for name, (first, end) in sorted(ranges.items(), key=lambda item: item[1]):
        if first != reached:
            raise FormatError(f"{name}.data_offsets[0]", reached, first)
        reached = end
    if reached != data_bytes:
        raise FormatError("safetensors.data_bytes", reached, data_bytes)


def _as_float32(data: memoryview, entry: Mapping[str, Any]) -> Floats:
    values: npt.NDArray[Any]
    if entry["dtype"] == "BF16":
        # A bfloat16 is the upper half of the float32 of the same value.
        values = (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, dtype="<f4" if entry["dtype"] == "F32" else "<f2")
    return values.astype(np.float32).reshape(entry["shape"])
