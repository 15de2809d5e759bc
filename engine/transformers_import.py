"""Importing transformers in half the time: it reads all of its 3,300 files twice for their names.

It keeps what it found, but for 128 folders, and has 560; and to find one line of a file it splits
the whole text. Both functions are pure. They are replaced by ones with the same results from
transformers' import on; where a version has neither, or has them otherwise, it is imported as it
comes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Final

_SCANNER: Final = "transformers.utils.import_utils"
_MARK: Final = "__all__"


@contextlib.contextmanager
def quick_scan() -> Iterator[None]:
    """While the block imports transformers for the first time, each of its files is read once."""
    finder = _Finder()
    # A new list each time: an import of another thread that is half through the old one would
    # leave a finder out if that grew or shrank.
    sys.meta_path = [finder, *sys.meta_path]
    try:
        yield
    finally:
        sys.meta_path = [one for one in sys.meta_path if one is not finder]


def quicken(scanner: ModuleType) -> None:
    """Replace the two functions of transformers' ``import_utils``, where they are there.

    Args:
        scanner: The module, run, and not yet used.
    """
    names_in = getattr(scanner, "fetch__all__", None)
    structure_of = getattr(scanner, "create_import_structure_from_path", None)
    if callable(names_in):
        _put(scanner, "fetch__all__", from_last_mark(names_in))
    if isinstance(structure_of, functools._lru_cache_wrapper):
        # Calls of its own go through the module, so that each folder is kept.
        kept = functools.cache(structure_of.__wrapped__)
        _put(scanner, "create_import_structure_from_path", kept)


def from_last_mark(names_in: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """``names_in``, given a file's text only from its last line that begins with ``__all__``.

    That is the line which it looks for, so that the answer is the same.
    """

    @functools.wraps(names_in)
    def quick(file_content: str) -> list[str]:
        at = file_content.rfind(f"\n{_MARK}")
        return names_in(file_content[at + 1 :])

    return quick


def _put(module: ModuleType, name: str, value: object) -> None:
    setattr(module, name, value)


class _Finder:
    """Finds the one module that lists names, where the path does, and has it quickened once run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _SCANNER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Quickened(spec.loader.name, spec.loader.path)
        return spec


class _Quickened(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        quicken(module)
