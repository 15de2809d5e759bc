"""The one error tree. Order of the classes is the order in which verification can fail.

``reason`` is a stable word for programs, ``exit_code`` is what both commands exit with
(design: 1 other, 2 usage, 10 malformed, 11 not authentic, 12 other layout or identity,
13 ``check`` found damage, 14 incomplete). The message is for people and says where, what was
expected and what was found. It never holds tokens, text, tensor bytes or keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar, Final

EXIT_GOOD: Final = 0
EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_MALFORMED: Final = 10
EXIT_NOT_AUTHENTIC: Final = 11
EXIT_MISMATCH: Final = 12
EXIT_DAMAGE: Final = 13
EXIT_INCOMPLETE: Final = 14
EXIT_INTERRUPTED: Final = 130


class KvpackError(Exception):
    """Root of every error that this project raises on purpose."""

    reason: ClassVar[str] = "failure"
    exit_code: ClassVar[int] = EXIT_FAILURE


class FieldError(KvpackError):
    """An error about one field: which, what was expected, what was found."""

    def __init__(self, field: str, expected: object, found: object) -> None:
        self.field = field
        self.expected = expected
        self.found = found
        super().__init__(f"{field}: expected {expected}, found {found}")


class FormatError(FieldError):
    """The bytes are not a pack of this format: wrong magic, wrong length, not canonical."""

    reason = "malformed"
    exit_code = EXIT_MALFORMED


class VersionError(FormatError):
    """The bytes name a version that this build cannot read; ``expected`` lists what it can."""

    reason = "unsupported_version"


class LimitError(FormatError):
    """A declared or given size is outside its cap. Raised before memory is taken for it."""

    reason = "over_limit"


class UnknownKeyError(KvpackError):
    """No key for the tenant and epoch that the header names. Nothing was checked."""

    reason = "unknown_key"
    exit_code = EXIT_NOT_AUTHENTIC


class KeyFileError(KvpackError):
    """A key file cannot be used: wrong mode, a link, another owner, not a key."""

    reason = "bad_key_file"


class AuthenticationError(KvpackError):
    """A tag or MAC does not match: the bytes were changed, or the key is another.

    ``where`` is a path such as ``chunks[3]`` or ``manifest``. Nothing from there was released.
    """

    reason = "not_authentic"
    exit_code = EXIT_NOT_AUTHENTIC

    def __init__(self, where: str, detail: str = "") -> None:
        self.where = where
        tail = f" ({detail})" if detail else ""
        super().__init__(f"{where}: not authentic under this key{tail}")


class LayoutMismatchError(FieldError):
    """Authentic, but made for another cache layout. Not damage: do not delete, do not retry."""

    reason = "layout_mismatch"
    exit_code = EXIT_MISMATCH


class IdentityMismatchError(FieldError):
    """Authentic, but made by another model, tokenizer, adapter or tenant than the one expected."""

    reason = "identity_mismatch"
    exit_code = EXIT_MISMATCH


class IncompleteError(KvpackError):
    """Whole and authentic as far as it goes, but it needs a parent pack that was not given."""

    reason = "incomplete"
    exit_code = EXIT_INCOMPLETE


class PublishError(KvpackError):
    """A file could not be published: the name exists, the disk is full, the volume lacks links."""

    reason = "publish_failed"


@contextlib.contextmanager
def malformed_not_mismatched() -> Iterator[None]:
    """While bytes are parsed: fields that contradict each other are malformed, not another layout.

    A layout mismatch says that a pack is authentic; bytes that were only parsed are not.

    Raises:
        FormatError: Instead of a :class:`LayoutMismatchError` from inside.
    """
    try:
        yield
    except LayoutMismatchError as error:
        raise FormatError(error.field, error.expected, error.found) from error
