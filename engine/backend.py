"""Switches that decide whether MLX repeats its own bits, set before MLX is imported.

On CUDA, decode attention through cuDNN gives other bits from run to run, and the buffer's capacity
selects the kernel. MLX reads ``MLX_CUDA_USE_CUDNN_SDPA`` once, so it must be off before the first
import. This module therefore imports nothing of MLX at the top. It reads and sets the process
environment because that is the only door MLX offers.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import Final

from engine.errors import BackendError

CUDNN_SWITCH: Final = "MLX_CUDA_USE_CUDNN_SDPA"

#: Every switch that MLX reads and that can select another kernel; all go into the fingerprint.
KERNEL_SWITCHES: Final = (
    CUDNN_SWITCH,
    "MLX_ENABLE_TF32",
    "MLX_METAL_GPU_ARCH",
    "MLX_SDPA_BLOCKS",
)

#: What :func:`use_device` takes.
DEVICES: Final = ("cpu", "gpu")

_state = {"too_late": False}


def set_switches() -> None:
    """Turn cuDNN attention off, unless MLX was imported before it could be."""
    if os.environ.get(CUDNN_SWITCH) == "0":
        return
    _state["too_late"] = "mlx.core" in sys.modules or CUDNN_SWITCH in os.environ
    os.environ.setdefault(CUDNN_SWITCH, "0")


def use_device(name: str) -> None:
    """Compute on ``cpu`` or ``gpu`` from here on, in the whole process. Before a model is loaded.

    A build of MLX for GPUs computes on the processor, too.

    Raises:
        BackendError: This build of MLX, or this machine, has no GPU.
        ValueError: Another name.
    """
    import mlx.core as mx

    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, not {name!r}")
    if name == "gpu" and not _has_gpu():
        raise BackendError("device gpu: this build of MLX, or this machine, has none")
    mx.set_default_device(mx.cpu if name == "cpu" else mx.gpu)


def _has_gpu() -> bool:
    import mlx.core as mx

    return mx.cuda.is_available() or mx.metal.is_available()


def backend_name() -> str:
    """``cpu``, ``cuda`` or ``metal``: where MLX computes by default."""
    import mlx.core as mx

    if mx.default_device() == mx.cpu:
        return "cpu"
    return "cuda" if mx.cuda.is_available() else "metal"


def require_repeatable() -> None:
    """Refuse a CUDA process whose decode attention would not repeat its own bits.

    Raises:
        BackendError: MLX was imported before the switch was set, or the switch is on.
    """
    check_switch(backend_name(), _state["too_late"])


def check_switch(backend: str, too_late: bool) -> None:
    """The rule of :func:`require_repeatable`, as a function of its inputs.

    Raises:
        BackendError: ``backend`` is ``cuda`` and the switch is not known to be off.
    """
    if backend == "cuda" and too_late:
        raise BackendError(
            f"{CUDNN_SWITCH} must be 0 before MLX is imported: import engine first, "
            f"or set {CUDNN_SWITCH}=0 in the environment"
        )


def device_description() -> str:
    """The device as MLX describes it, on a CPU with the instruction set of the machine."""
    import mlx.core as mx

    info = mx.device_info()
    parts = [str(info.get("device_name", "")), str(info.get("architecture", platform.machine()))]
    return " / ".join(part for part in parts if part) or "unknown"


def build_values() -> tuple[tuple[str, str], ...]:
    """``(name, value)`` where MLX computes on the processor although it was built for a GPU.

    That build brings other libraries for the processor than the one that is made for it alone.
    """
    return (("build", "gpu"),) if backend_name() == "cpu" and _has_gpu() else ()


def switch_values() -> tuple[tuple[str, str], ...]:
    """``(switch, value)`` for every kernel switch, ``unset`` where the environment has none.

    ``LD_PRELOAD`` is included as yes or no: a preloaded BLAS changes bits on the CPU.
    """
    preload = "yes" if os.environ.get("LD_PRELOAD") else "no"
    values = [(f"switch.{name}", os.environ.get(name, "unset")) for name in KERNEL_SWITCHES]
    return (*values, ("switch.preload", preload))
