"""What the command says, and where: results on stdout, ``error:`` and ``hint:`` on stderr."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Final

import click

from kvpack.errors import (
    EXIT_FAILURE,
    AuthenticationError,
    FormatError,
    IdentityMismatchError,
    IncompleteError,
    KeyFileError,
    KvpackError,
    LayoutMismatchError,
    PublishError,
    UnknownKeyError,
    VersionError,
)
from kvpack.interchange import (
    CacheFileError,
    CacheFormatError,
    CacheMismatchError,
    ExtraMissingError,
    PromptFileError,
)

#: The first class that fits gives the hint.
_HINTS: Final[tuple[tuple[type[KvpackError], str], ...]] = (
    (CacheFormatError, "only prompt caches that mlx-lm 0.32 saves, unquantised, are read"),
    (CacheFileError, "the cache file is cut, damaged, or was changed by somebody; save it again"),
    (CacheMismatchError, "give the model folder and the ids that the cache was made with"),
    (PromptFileError, "ids are a JSON list, or four bytes each in a .u32 file; a prompt is UTF-8"),
    (ExtraMissingError, "pip install 'kvpack[mlx]' brings the engine that reads it"),
    (VersionError, "a newer kvpack may read it"),
    (FormatError, "the file is cut, damaged, or no .kvpack at all"),
    (UnknownKeyError, "give the key of that tenant and epoch with --key"),
    (AuthenticationError, "bytes changed after sealing, or it is another's key; do not restore it"),
    (IdentityMismatchError, "the pack is authentic and of another model; do not delete it"),
    (LayoutMismatchError, "the pack is authentic and of another shape; do not delete it"),
    (IncompleteError, "it is a delta: it can only be used together with its parent"),
    (KeyFileError, "a key file is made by kvpack keygen and has mode 0600"),
    (PublishError, "choose a new name: nothing is ever overwritten"),
)


def display_name(path: str | os.PathLike[str]) -> str:
    """``path`` as people may see it: whatever is not printable is escaped."""
    text = os.fsencode(path).decode("utf-8", errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def message_of(error: KvpackError | OSError) -> str:
    """One line about ``error``."""
    if isinstance(error, OSError) and not isinstance(error, KvpackError):
        return error.strerror or type(error).__name__
    return " ".join(str(error).split())


def reason_of(error: KvpackError | OSError) -> str:
    """The stable word for ``error``."""
    return error.reason if isinstance(error, KvpackError) else "io"


def exit_code_of(error: KvpackError | OSError) -> int:
    """What the command exits with after ``error``."""
    return error.exit_code if isinstance(error, KvpackError) else EXIT_FAILURE


def fail(error: KvpackError | OSError, name: str = "") -> None:
    """Say on stderr what went wrong, and what to do about it."""
    say_error(f"{name}: {message_of(error)}" if name else message_of(error))
    for kind, hint in _HINTS:
        if isinstance(error, kind):
            say_hint(hint)
            return


def say_error(text: str) -> None:
    """One ``error:`` line on stderr."""
    click.echo(f"kvpack: error: {text}", err=True)


def say_hint(text: str) -> None:
    """One ``hint:`` line on stderr."""
    click.echo(f"kvpack: hint: {text}", err=True)


def say(text: str) -> None:
    """One line of the result on stdout."""
    click.echo(text)


def say_json(value: Mapping[str, object]) -> None:
    """One JSON object on one line of stdout."""
    click.echo(json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=False))


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Rows as aligned lines: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first, *others = zip(row, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(padded).rstrip())
    return lines
