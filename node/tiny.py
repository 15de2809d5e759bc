"""Tiny model folders on disk."""

from __future__ import annotations

from pathlib import Path

from node.errors import UsageError


def make_tiny_model(folder: Path, arch: str, *, seed: int, window: int, layers: int) -> None:
    """Write the files of a tiny model into the new folder ``folder``.

    Raises:
        UsageError: The folder exists or cannot be made, or an argument is outside its range.
    """
    from engine import tiny_model_files

    try:
        files = tiny_model_files(arch, seed=seed, window=window, layers=layers)
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from error
