"""Names of element types, and what they are on the host. Needs no MLX."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpack.layout import Encoding

_NAMES = {
    "float16": Encoding.F16LE,
    "bfloat16": Encoding.BF16LE,
    "float32": Encoding.F32LE,
}


def encoding_named(name: str) -> Encoding:
    """The encoding called ``float16``, ``bfloat16`` or ``float32``.

    Raises:
        ValueError: Another name.
    """
    if name not in _NAMES:
        raise ValueError(f"dtype must be one of {', '.join(_NAMES)}, not {name!r}")
    return _NAMES[name]


def dtype_name(encoding: Encoding) -> str:
    """The dtype's name, as in :func:`encoding_named`."""
    return next(name for name, value in _NAMES.items() if value is encoding)


def host_dtype(encoding: Encoding) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned integer of the element's width."""
    return np.dtype("<u4" if encoding is Encoding.F32LE else "<u2")
