"""New files that appear together, or not at all as far as a living process can see to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from node.errors import CredentialsError
from node.files import make_private_folder, read_public, write_private


@dataclass(frozen=True, slots=True)
class NewFile:
    """A private file that is to be: one that is there with the same bytes is left alone."""

    path: Path
    content: bytes = field(repr=False)


@contextlib.contextmanager
def writing(files: Sequence[NewFile]) -> Iterator[None]:
    """Write ``files`` in order; unless the block ends well, remove again what was written.

    A process that is killed in between leaves a beginning of the list. It holds nothing that
    lets anybody in (pins come last), and the same pairing, done again, completes it.

    Raises:
        CredentialsError: A file cannot be written, or is there with other bytes.
    """
    with contextlib.ExitStack() as undo:
        for file in files:
            _make_folder(file.path.parent, undo)
            if file.path.exists():
                if read_public(file.path) != file.content:
                    raise CredentialsError(f"{file.path}: exists already, and is not replaced")
                continue
            write_private(file.path, file.content)
            undo.callback(_remove, file.path)
        yield
        undo.pop_all()


def _make_folder(folder: Path, undo: contextlib.ExitStack) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    make_private_folder(folder)
    # Entered outermost first, so that they are left innermost first.
    for path in reversed(missing):
        undo.callback(_remove_folder, path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _remove_folder(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()
