"""What ships with the project: a text and a trained model, in the package or beside it."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Final

from node.errors import UsageError

#: The trained model, and its window in tokens.
TRAINED: Final = "muse-novels-6m"
TRAINED_WINDOW_TOKENS: Final = 256


def find_shipped(*parts: str, package: Path | None = None) -> Path | None:
    """Where ``parts`` is: inside an installed package, or in the examples of a checkout."""
    here = package or Path(str(importlib.resources.files("node")))
    for folder in (here / "assets", here.parent / "examples"):
        path = folder.joinpath(*parts)
        if path.exists():
            return path
    return None


def trained_model() -> Path | None:
    """Folder of the trained model; None where it was not installed."""
    return find_shipped("models", TRAINED)


def require_model(model: Path | None) -> Path:
    """The model that was asked for, or the trained one; no file that it needs is missing.

    Looked at here, a wrong folder is refused before the seconds that importing mlx-lm takes.

    Raises:
        UsageError: None was given and none is installed.
        ModelFolderError: One line naming what is not there.
    """
    from engine import find_folder

    chosen = model or trained_model()
    if chosen is None:
        raise UsageError(f"the trained model {TRAINED} is not installed; give one with --model")
    find_folder(chosen)
    return chosen
