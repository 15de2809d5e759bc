"""Element types in MLX and on the host, and host views of MLX buffers.

numpy has no bfloat16, and rows are moved, never computed with, on the host: there every half is an
unsigned integer of its width. Byte order is little-endian, as on every machine MLX runs on.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.encodings import host_dtype
from engine.errors import BackendError, ModelFolderError
from engine.origins import PlaneLayout
from kvpack.layout import Encoding

#: A host view or copy of rows, elements as unsigned integers.
HostArray = npt.NDArray[np.unsignedinteger[Any]]

_MLX = {
    Encoding.F16LE: mx.float16,
    Encoding.BF16LE: mx.bfloat16,
    Encoding.F32LE: mx.float32,
}


def mlx_dtype(encoding: Encoding) -> mx.Dtype:
    """The MLX dtype of ``encoding``."""
    return _MLX[encoding]


def encoding_of(dtype: mx.Dtype) -> Encoding:
    """The encoding of an MLX dtype.

    Raises:
        ModelFolderError: Rows of this dtype cannot be packed.
    """
    for encoding, candidate in _MLX.items():
        if candidate == dtype:
            return encoding
    raise ModelFolderError(f"K/V rows of dtype {dtype} are not supported")


def host_words(array: mx.array) -> mx.array:
    """``array`` as something that numpy can read: itself, or a bfloat16's words. Lazy."""
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


def host_view(buffer: mx.array, encoding: Encoding) -> HostArray:
    """A writable view of an evaluated buffer's memory, same shape, no copy.

    It does not stop MLX from writing into that memory, so it must not outlive the current call
    unless nothing else refers to ``buffer``.
    """
    if encoding is Encoding.BF16LE:
        # numpy has no such type: MLX has to name the words, which is an operation of its own.
        return np.array(buffer.view(mx.uint16), copy=False)
    host: npt.NDArray[Any] = np.array(buffer, copy=False)
    return host.view(host_dtype(encoding))


def token_major(host: HostArray, layout: PlaneLayout) -> HostArray:
    """View ``host``, a plane's buffer, as ``[rows, kv_heads, dim]``."""
    rows = cast(HostArray, host[0])
    return rows.transpose(1, 0, 2) if layout is PlaneLayout.HEAD_MAJOR else rows


def host_bytes(array: mx.array, encoding: Encoding) -> bytes:
    """The elements of an evaluated array, row-major, as immutable bytes."""
    return host_view(array, encoding).tobytes()


@functools.cache
def host_fill_works() -> bool:
    """Whether MLX sees what is written through a host view, and only the array concerned does.

    Not documented by MLX, so it is tried once per process for every element type; where it fails,
    install copies instead.
    """
    return all(_host_fill_works(encoding) for encoding in Encoding)


def _host_fill_works(encoding: Encoding) -> bool:
    filled, other = (mx.zeros((3, 5), mlx_dtype(encoding)) for _ in range(2))
    mx.eval(filled, other)
    host_view(filled, encoding)[1, 2] = 1
    seen = host_bytes(mx.contiguous(filled + mx.zeros_like(filled)), encoding)
    expected = np.zeros((3, 5), host_dtype(encoding))
    expected[1, 2] = 1
    untouched = host_view(other, encoding)
    return seen == expected.tobytes() and not untouched.any()


def require_little_endian() -> None:
    """Refuse a machine whose memory is not the pack's byte order.

    Raises:
        BackendError: The machine is big-endian.
    """
    if sys.byteorder != "little":
        raise BackendError("rows are moved as little-endian memory; this machine is big-endian")
