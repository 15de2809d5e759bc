"""The demo's text: read, checked, cut."""

from __future__ import annotations

import codecs
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.errors import UsageError
from node.shipped import find_shipped

#: More text than this is not read: a demo prefills some thousand tokens.
TEXT_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True, repr=False)
class DemoText:
    """A text and what to call it.

    Attributes:
        name: The file's name; for people.
        text: What was read.
        was_cut: Whether the file has more than was read.
    """

    name: str
    text: str
    was_cut: bool


def read_text(path: Path | None) -> DemoText:
    """Read ``path``, or the text that ships with the project.

    Raises:
        UsageError: Missing, not a file, not text.
    """
    source = default_text() if path is None else path
    content = _read_bytes(source)
    was_cut = len(content) > TEXT_BYTES_MAX
    try:
        # Not final: a character that the cut splits is dropped, not an error.
        decoder = codecs.getincrementaldecoder("utf-8")()
        text = decoder.decode(content[:TEXT_BYTES_MAX], final=not was_cut)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"text {source}: not UTF-8 text (byte {error.start}); is it a binary file?"
        ) from error
    if "\0" in text:
        raise UsageError(f"text {source}: holds NUL bytes; is it a binary file?")
    return DemoText(source.name, text, was_cut)


def _read_bytes(path: Path) -> bytes:
    try:
        # Not blocking: opening a named pipe would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UsageError(f"text {path}: expected a regular file")
            return file.read(TEXT_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"text {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"text {str(path)!r}: not a file name") from error


def default_text() -> Path:
    """The project's own text: in the package, or beside it in a checkout.

    Raises:
        UsageError: Neither is there.
    """
    path = find_shipped("prompt.txt")
    if path is None:
        raise UsageError("the text that ships with the project is missing; give one with --text")
    return path


def require_window(text: DemoText, count: int, window_tokens: int, unit: str) -> None:
    """Refuse a text that does not fill one window.

    Raises:
        UsageError: ``count`` is below ``window_tokens``.
    """
    if count < window_tokens:
        raise UsageError(
            f"text {text.name}: {count} {unit} are shorter than one window of "
            f"{window_tokens} tokens; give a longer text"
        )
