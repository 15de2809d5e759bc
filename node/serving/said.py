"""Messages of a stored conversation: each with the ids of the items that clients know it by."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvpack.errors import FormatError
from kvpack.limits import check_range

_ID_BYTES: Final = 24
_IDS_MAX: Final = 1024
_ID_CHARS_MAX: Final = 100

_Object = dict[str, Any]


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(_ID_BYTES)}"


@dataclass(frozen=True, slots=True, repr=False)
class Said:
    """One message of a chat, and the ids of the items that it is.

    Attributes:
        ids: One for its text if it has any, then one for each tool call.
        message: As chat completions write it. The user's text.

    Raises:
        LimitError: No id, or too many.
    """

    ids: tuple[str, ...]
    message: Mapping[str, Any]

    def __post_init__(self) -> None:
        check_range("item.ids", len(self.ids), 1, _IDS_MAX, "ids")

    def __repr__(self) -> str:
        return f"Said({len(self.ids)} items)"

    def encode(self) -> bytes:
        """As records and sessions keep it: the same value gives the same bytes."""
        return _encode({"ids": list(self.ids), "message": dict(self.message)})

    @classmethod
    def decode(cls, data: bytes) -> Said:
        """Read what :meth:`encode` wrote, here or on another node.

        Raises:
            FormatError: Something else.
        """
        found = _decode(data)
        ids, message = found.get("ids"), found.get("message")
        if not isinstance(ids, list) or not all(_is_id(one) for one in ids):
            raise FormatError("item.ids", "a list of names", "something else")
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise FormatError("item.message", "a message with a role", "something else")
        calls = message.get("tool_calls", [])
        if not isinstance(calls, list) or not len(calls) <= len(ids) <= len(calls) + 1:
            raise FormatError("item.ids", "one for each part of the message", f"{len(ids)}")
        return cls(tuple(ids), message)


@dataclass(frozen=True, slots=True, repr=False)
class Heading:
    """What a conversation is beside its messages: travels before them, with its session.

    Attributes:
        created_at: Seconds since 1970.
        revision: How often the conversation was changed.
        lead: How many of the messages that follow are system content.
        metadata: The client's, a JSON object.
    """

    created_at: int
    revision: int
    lead: int = 0
    metadata: bytes = b"{}"

    def __post_init__(self) -> None:
        for name in ("created_at", "revision", "lead"):
            check_range(f"conversation.{name}", getattr(self, name), 0, (1 << 63) - 1)

    def __repr__(self) -> str:
        return f"Heading(revision {self.revision})"

    def encode(self) -> bytes:
        """As sessions carry it."""
        return _encode(
            {
                "conversation": {
                    "created_at": self.created_at,
                    "revision": self.revision,
                    "lead": self.lead,
                    "metadata": json.loads(self.metadata),
                }
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Heading:
        """Read what :meth:`encode` wrote, here or on another node.

        Raises:
            FormatError: Something else.
            LimitError: A number is outside its range.
        """
        found = _decode(data).get("conversation")
        if not isinstance(found, dict):
            raise FormatError("conversation", "a heading", "something else")
        if any(name not in found for name in ("created_at", "revision", "lead")):
            raise FormatError("conversation", "created_at, revision and lead", "one is missing")
        metadata = found.get("metadata")
        if not isinstance(metadata, dict):
            raise FormatError("conversation.metadata", "an object", "something else")
        created_at, revision, lead = (found[name] for name in ("created_at", "revision", "lead"))
        return cls(created_at, revision, lead, _encode(metadata))


def _encode(value: _Object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise FormatError("conversation", "text", "half of a surrogate pair") from None


def _decode(data: bytes) -> _Object:
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise FormatError("conversation", "JSON", f"{len(data)} other bytes") from None
    if not isinstance(found, dict):
        raise FormatError("conversation", "a JSON object", "another value")
    return found


def _is_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _ID_CHARS_MAX
