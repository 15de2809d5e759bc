"""What the command says, and where: results on stdout, ``error:`` and ``hint:`` on stderr."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
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
from kvpack.expectation import ExpectationError
from kvpack.interchange import (
    CacheFileError,
    CacheFormatError,
    CacheMismatchError,
    ExtraMissingError,
    PromptFileError,
)
from kvpack.store import NotStoredError, StoreBusyError, StoreError, StoreFullError
from kvpack.store.errors import (
    StoreAwayError,
    StoreDeniedError,
    StoreExtraError,
    StoreUnsafeError,
)
from kvpack.store.places import shown

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
    (ExpectationError, "kvpack inspect --json PACK > FILE writes such a file"),
    (KeyFileError, "a key file is made by kvpack keygen and has mode 0600"),
    (StoreFullError, "kvpack gc STORE shows what can go, and with --yes makes room"),
    (StoreBusyError, "another process is at work on this store; try again"),
    (NotStoredError, "kvpack ls STORE shows what is there"),
    (StoreExtraError, "pip install 'kvpack[s3]' brings what reaches it"),
    (StoreDeniedError, "credentials come from AWS_* variables or ~/.aws, never from a URL"),
    (StoreUnsafeError, "choose a service whose conditional writes hold: docs/stores.md"),
    (StoreAwayError, "try again; what was written before stays and is whole"),
    (StoreError, "nothing was changed"),
    (PublishError, "choose a new name: nothing is ever overwritten"),
)


def display_name(path: str | os.PathLike[str]) -> str:
    """``path`` as people may see it: no secret of a URL, and what is not printable is escaped."""
    return _on_terminal(shown(os.fsencode(path).decode("utf-8", errors="backslashreplace")))


def _on_terminal(text: str) -> str:
    """``text`` with what could steer a terminal escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def message_of(error: KvpackError | OSError) -> str:
    """One line about ``error``."""
    if isinstance(error, OSError) and not isinstance(error, KvpackError):
        return error.strerror or type(error).__name__
    return _on_terminal(" ".join(str(error).split()))


def reason_of(error: KvpackError | OSError) -> str:
    """The stable word for ``error``."""
    return error.reason if isinstance(error, KvpackError) else "io"


def exit_code_of(error: KvpackError | OSError) -> int:
    """What the command exits with after ``error``."""
    return error.exit_code if isinstance(error, KvpackError) else EXIT_FAILURE


def fail(error: KvpackError | OSError, name: str = "") -> None:
    """Say on stderr what went wrong, and what to do about it."""
    message = message_of(error)
    # Errors about keys, stores and publishing name their path themselves.
    say_error(f"{name}: {message}" if name and not message.startswith(name) else message)
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


class NamedError(Exception):
    """A failure of one named pack, on its way to the one place that reports failures."""

    def __init__(self, name: str, error: KvpackError | OSError, as_json: bool) -> None:
        self.name = name
        self.error = error
        self.wants_json = as_json
        super().__init__(name)

    def as_json(self) -> dict[str, object]:
        """The failure for programs."""
        return {
            "name": self.name,
            "ok": False,
            "reason": reason_of(self.error),
            "message": message_of(self.error),
            "exit_code": exit_code_of(self.error),
        }


@contextlib.contextmanager
def named(name: str, as_json: bool) -> Iterator[None]:
    """Say of a failure inside which file or store it is about, as JSON too where that is wanted.

    Raises:
        NamedError: Instead of the failure.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # it is about our own output, and main answers it
    except (KvpackError, OSError) as error:
        raise NamedError(name, error, as_json) from error
