"""The float32 oracle: an independent NumPy forward pass that the engine is measured against.

It imports neither MLX nor mlx-lm. Every layer keeps its full history, a window is a mask and never
a ring, and every sum is float64 (see :mod:`engine.oracle.operators` for the precision rule). It
computes logits for every position, takes tokens in any number at a time, and its snapshots and
those of everybody else refuse each other at the gate.
"""

from __future__ import annotations

from engine.oracle.architectures import BUILDERS
from engine.oracle.config import Dialect
from engine.oracle.errors import OracleModelError
from engine.oracle.model import OracleModel, OracleSession, build_oracle
from engine.oracle.snapshots import require_installable, restore_session, take_snapshot
from engine.oracle.tensors import decode_safetensors

ARCHITECTURES = tuple(sorted(BUILDERS))

__all__ = [
    "build_oracle",
    "OracleModel",
    "OracleSession",
    "take_snapshot",
    "restore_session",
    "require_installable",
    "decode_safetensors",
    "Dialect",
    "OracleModelError",
    "ARCHITECTURES",
]
