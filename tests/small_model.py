"""Tiny models with a fifth of the arithmetic, for tests that are about nodes.

MLX's CPU multiplies halves one by one, and most of what the node's tests took was that. Rows are as
wide as those of ``kvnode model tiny``; what lies between them is narrower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import tiny

#: Cohere2 wants as many as all its heads have together.
NARROWER = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}


@contextlib.contextmanager
def narrower() -> Iterator[None]:
    """Tiny models that are made meanwhile are small ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NARROWER.items():
            patch.setitem(tiny._GEOMETRY, name, value)
        yield


def make_small_model(folder: Path, arch: str, *, seed: int, window: int, layers: int) -> Path:
    """Write such a model into the new folder ``folder``."""
    # Not at the top: the engine's tests need no node.
    from node.tiny import make_tiny_model

    with narrower():
        make_tiny_model(folder, arch, seed=seed, window=window, layers=layers)
    return folder
