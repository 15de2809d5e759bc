"""Numerics of this process: the machine and the build, in one fingerprint.

Identity, which is over contents, is :mod:`engine.identity`'s.
"""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any, Final

import mlx.core as mx
import numpy as np
from blake3 import blake3
from numpy.lib.introspect import opt_func_info

from engine import backend
from engine.dtypes import mlx_dtype
from engine.encodings import dtype_name
from engine.origins import PlaneLayout
from kvpack.identity import NumericsFingerprint
from kvpack.layout import CacheLayout

#: Raised whenever this engine's own arithmetic or call shapes change bits.
NUMERICS_REVISION: Final = "1"


def _numpy_kernels() -> str:
    """The instruction sets for which NumPy took its doubles' ``add`` and ``exp`` on this processor.

    Sampling above temperature 0 is made of these two, on the host; a GPU's name says nothing of
    them. What else it calls gives the same bits everywhere.
    """
    found = opt_func_info(func_name="^(add|exp)$", signature="float64")
    taken = {
        name: sorted({kernel["current"] for kernel in kernels.values()})
        for name, kernels in found.items()
    }
    return " ".join(f"{name}={'/'.join(kernels)}" for name, kernels in sorted(taken.items()))


def _fused(left: mx.array, right: mx.array) -> mx.array:
    return left * mx.sigmoid(left) * right + left


def _compiled_bits(dtype: mx.Dtype) -> str:
    """What a fused operation makes of 1,024 numbers here: eight hexadecimal digits of a digest.

    MLX writes and compiles fused operations at run time. Where it finds no compiler the same
    operations run one by one, and a compiler may round once where they round twice: no version of
    MLX says which.
    """
    left = mx.arange(1024, dtype=mx.float32) / 97.0 - 5.0
    right = mx.arange(1024, 0, -1, dtype=mx.float32) / 61.0 - 8.0
    fused: Any = mx.compile(_fused)
    bits = fused(left.astype(dtype), right.astype(dtype)).view(mx.uint8)
    return blake3(bytes(bits.tolist())).hexdigest()[:8]


def numerics_of(layout: CacheLayout, plane_layout: PlaneLayout) -> NumericsFingerprint:
    """The fingerprint of this process."""
    values = {
        "backend": backend.backend_name(),
        "compiled": _compiled_bits(mlx_dtype(layout.encoding)),
        "device": backend.device_description(),
        "dtype": dtype_name(layout.encoding),
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
        "numpy": np.__version__,
        "numpy_kernels": _numpy_kernels(),
        "numerics_revision": NUMERICS_REVISION,
        "os": f"{platform.system()} {platform.release()}",
        "plane_layout": plane_layout.value,
        **dict(backend.switch_values()),
        **dict(backend.build_values()),
    }
    return NumericsFingerprint(tuple(sorted(values.items())))
