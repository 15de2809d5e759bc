"""Reading values that a client sent: one error that names the field, what is expected, and what
was found. What was found is named by its kind; a value may be the user's text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from kvpack.errors import FormatError

#: How deep JSON of a client may be nested, in tools and arguments. Real schemas have about ten.
_DEPTH_MAX: Final = 64

_KINDS: Final[Mapping[type, str]] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def kind_of(value: object) -> str:
    """What ``value`` is in JSON's words."""
    return _KINDS.get(type(value), type(value).__name__)


def refuse(field: str, expected: str, found: object) -> NoReturn:
    """Raise the error for a value of the wrong kind."""
    raise FormatError(field, expected, kind_of(found))


def an_object(value: object, field: str) -> Mapping[str, Any]:
    """``value`` as a JSON object.

    Raises:
        FormatError: It is another kind of value.
    """
    if not isinstance(value, dict):
        refuse(field, "an object", value)
    return value


def an_array(value: object, field: str) -> Sequence[Any]:
    """``value`` as a JSON array.

    Raises:
        FormatError: It is another kind of value.
    """
    if not isinstance(value, list | tuple):
        refuse(field, "an array", value)
    return value


def text(value: object, field: str) -> str:
    """``value`` as a string that has a UTF-8 form.

    Raises:
        FormatError: It is no string, or holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        refuse(field, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise FormatError(field, "Unicode text", "a lone surrogate") from None
    return value


def canonical(value: object, field: str) -> bytes:
    """The one JSON form of ``value``: keys in order, no spaces, UTF-8.

    Raises:
        FormatError: It has none: not a number, nested too deeply, half of a surrogate pair.
    """
    _check_depth(value, field)
    return _encode(value, field, sort_keys=True)


def in_order(value: object, field: str) -> bytes:
    """JSON of ``value`` with its keys as they came, since a template writes them so.

    Raises:
        FormatError: As :func:`canonical`.
    """
    _check_depth(value, field)
    return _encode(value, field, sort_keys=False)


def _encode(value: object, field: str, *, sort_keys: bool) -> bytes:
    try:
        return json.dumps(
            value, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys, separators=(",", ":")
        ).encode()
    except (ValueError, TypeError):
        raise FormatError(field, "plain JSON", "a value that JSON does not have") from None


def _check_depth(value: object, field: str) -> None:
    """Level by level, since a recursion over what a client sent has no bound of its own."""
    level: list[object] = [value]
    for _ in range(_DEPTH_MAX):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise FormatError(field, f"at most {_DEPTH_MAX} levels", "more")


def _inside(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list | tuple) else ()
