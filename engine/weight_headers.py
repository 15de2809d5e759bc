"""Weight files, by their headers alone: which tensors there are, and whether the files are whole.

mlx-lm would join files in the order in which a directory lists them, and read one that is too short
only when a value is needed. Here every header is read before anything else.

A safetensors file is a header length (8 bytes, little-endian), a JSON header, and the tensors, back
to back. Header and file size are checked against each other; the tensors are not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.errors import ModelFolderError

#: As the format itself caps it; real headers have well under a megabyte per shard.
HEADER_BYTES_MAX: Final = 100_000_000

_ELEMENT_BYTES: Final = {
    "F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1, "I32": 4, "I64": 8, "I8": 1, "U16": 2,
    "I16": 2, "U64": 8, "F64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as its file's header states it.

    Attributes:
        dtype: Element type, as safetensors spells it.
        shape: Sizes, outermost first.
        file: Name of the file that holds it.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str


Headers = Mapping[str, TensorHeader]


def read_headers(files: Sequence[Path]) -> dict[str, TensorHeader]:
    """Every tensor of ``files`` by name.

    Raises:
        ModelFolderError: A file is damaged or cut, or two files hold the same tensor.
    """
    found: dict[str, TensorHeader] = {}
    for path in files:
        for name, header in _read_file(path).items():
            if name in found:
                other = found[name].file
                raise ModelFolderError(
                    f"{name}: expected in one file, found in {other} and {path.name}"
                )
            found[name] = header
    return found


def _read_file(path: Path) -> dict[str, TensorHeader]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if size < 8 or length > min(HEADER_BYTES_MAX, size - 8):
                raise ModelFolderError(
                    f"{path.name}: header: expected within {size} bytes, found {length} bytes"
                )
            entries = json.loads(file.read(length))
    except OSError as error:
        raise ModelFolderError(f"{path.name}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path.name}: header: not valid JSON") from error
    if not isinstance(entries, dict):
        raise ModelFolderError(f"{path.name}: header: not a JSON object")
    entries.pop("__metadata__", None)
    _require_cover(path.name, entries, size - 8 - length)
    return {
        name: TensorHeader(entry["dtype"], tuple(entry["shape"]), path.name)
        for name, entry in entries.items()
    }


def _require_cover(file: str, entries: Mapping[str, Any], data_bytes: int) -> None:
    """Tensors lie back to back, each as long as its shape says, and fill the file."""
    spans = sorted((_span(file, name, entry), name) for name, entry in entries.items())
    end = 0
    for (first, after), name in spans:
        if first != end:
            raise ModelFolderError(f"{file}: {name}: expected at byte {end}, found at {first}")
        end = after
    if end != data_bytes:
        raise ModelFolderError(f"{file}: expected {end} bytes of tensors, found {data_bytes}")


def _span(file: str, name: str, entry: Any) -> tuple[int, int]:  # noqa: ANN401  parsed JSON
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, *offsets]
        whole = all(type(size) is int and size >= 0 for size in sizes)
        if len(offsets) != 2 or not whole or not isinstance(dtype, str):
            raise TypeError
    except (TypeError, KeyError) as error:
        raise ModelFolderError(f"{file}: {name}: not a tensor's header") from error
    if dtype not in _ELEMENT_BYTES:
        raise ModelFolderError(f"{file}: {name}: dtype: expected a known one, found {dtype}")
    asked, found = math.prod(shape) * _ELEMENT_BYTES[dtype], offsets[1] - offsets[0]
    if asked != found:
        raise ModelFolderError(f"{file}: {name}: expected {asked} bytes, found {found}")
    return offsets[0], offsets[1]
