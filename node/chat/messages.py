"""Messages of a conversation, as values.

They are read from the objects that OpenAI's clients send, shown to chat templates, and kept with a
session as bytes. All of it is the user's text: none of it is ever logged.
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpack.errors import FormatError
from kvpack.limits import check_range
from node.chat import fields
from node.state import MESSAGE_BYTES_MAX, MESSAGES_MAX, STATE_BYTES_MAX

#: Characters of a name or an id; public APIs have 64.
_NAME_CHARACTERS_MAX: Final = 256

#: Tool calls of one message, and parts of one content: what public APIs accept at most.
TOOL_CALLS_MAX: Final = 128
PARTS_MAX: Final = 1024

#: Kinds of content parts that are text: chat's, and those of responses.
_TEXT_PARTS: Final = ("text", "input_text", "output_text")

#: What one message takes in a session's record beyond its bytes, and the record beyond them all.
_RECORD_BYTES_PER_MESSAGE: Final = 8
_RECORD_BYTES: Final = 256


class Role(enum.Enum):
    """Who speaks."""

    SYSTEM = "system"
    DEVELOPER = "developer"  # the newer name of system; templates get the older one
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"

    @property
    def is_system(self) -> bool:
        """Whether it is the system's content, under either name."""
        return self in (Role.SYSTEM, Role.DEVELOPER)


@dataclass(frozen=True, slots=True, repr=False)
class ToolCall:
    """A call of a tool that an assistant asked for.

    Attributes:
        call_id: By which the result names it.
        name: Of the tool.
        arguments: A JSON object, as text.

    Raises:
        FormatError: ``arguments`` is no JSON object, or a name has no UTF-8 form.
        LimitError: A name is empty or too long.
    """

    call_id: str
    name: str
    arguments: str = "{}"

    def __post_init__(self) -> None:
        call_id = len(fields.text(self.call_id, "tool_call.id"))
        check_range("tool_call.id", call_id, 0, _NAME_CHARACTERS_MAX, "characters")
        name = len(fields.text(self.name, "tool_call.name"))
        check_range("tool_call.name", name, 1, _NAME_CHARACTERS_MAX, "characters")
        _arguments(self.arguments, "tool_call.arguments")

    def to_json(self) -> dict[str, Any]:
        """As OpenAI's clients know it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}

    def for_template(self) -> dict[str, Any]:
        """As templates expect it: arguments as an object, not as its text."""
        arguments = _arguments(self.arguments, "tool_call.arguments")
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, repr=False)
class Message:
    """One message.

    Attributes:
        role: Who speaks.
        content: Its text; parts of text are joined without anything between.
        name: Of the speaker, where there are several.
        tool_calls: What an assistant asks for.
        tool_call_id: Which call a tool's message answers.
        reasoning: Thoughts before the content, where they are kept apart from it.

    Raises:
        FormatError: A field that this role does not have.
        LimitError: Too long, or too many tool calls.
    """

    role: Role
    content: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""

    def __post_init__(self) -> None:
        check_range("message.name", len(self.name), 0, _NAME_CHARACTERS_MAX, "characters")
        call_id = len(self.tool_call_id)
        check_range("message.tool_call_id", call_id, 0, _NAME_CHARACTERS_MAX, "characters")
        check_range("message.tool_calls", len(self.tool_calls), 0, TOOL_CALLS_MAX)
        if self.role is not Role.ASSISTANT and (self.tool_calls or self.reasoning):
            raise FormatError("message.tool_calls", "none but an assistant's", self.role.value)
        if self.role is not Role.TOOL and self.tool_call_id:
            raise FormatError("message.tool_call_id", "none but a tool's", self.role.value)

    def __repr__(self) -> str:
        return f"Message({self.role.value}, {len(self.content)} characters)"

    @classmethod
    def parse(cls, value: object, field: str = "message") -> Message:
        """The message that a client sent; keys that change nothing are not looked at.

        Args:
            value: An object of OpenAI's chat API.
            field: Its path, for errors.

        Raises:
            FormatError: A field is missing, of another kind, or not supported: named by its path.
            LimitError: It is too long.
        """
        given = _Given(fields.an_object(value, field), field)
        role = _role(given.values.get("role"), f"{field}.role")
        if given.values.get("function_call") is not None:
            raise FormatError(f"{field}.function_call", "tool_calls in its place", "the old form")
        content = given.values.get("content")
        assistant = role is Role.ASSISTANT
        with given.path():
            message = cls(
                role,
                _content(content, f"{field}.content", optional=assistant),
                given.optional("name"),
                _tool_calls(given.values.get("tool_calls"), f"{field}.tool_calls", role),
                given.optional("tool_call_id") if role is Role.TOOL else "",
                given.first("reasoning_content", "reasoning") if assistant else "",
            )
        check_range(field, len(message.to_bytes()), 1, MESSAGE_BYTES_MAX, "bytes")
        return message

    def to_json(self) -> dict[str, Any]:
        """As OpenAI's clients know it: what :meth:`parse` reads, without empty fields."""
        value: dict[str, Any] = {"role": self.role.value, "content": self.content}
        if self.tool_calls:
            value["tool_calls"] = [call.to_json() for call in self.tool_calls]
        others = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning,
        }
        return value | {key: text for key, text in others.items() if text}

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        value = self.to_json()
        value["role"] = Role.SYSTEM.value if self.role.is_system else self.role.value
        if self.tool_calls:
            value["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return value

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal messages give equal bytes, and other messages other bytes."""
        return fields.canonical(self.to_json(), "message")

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Message:
        """The message whose bytes ``encoded`` are.

        Raises:
            FormatError: They are no message.
        """
        try:
            value = json.loads(encoded)
        except (ValueError, RecursionError):
            raise FormatError("message", "JSON", f"{len(encoded)} other bytes") from None
        return cls.parse(value)


Messages = tuple[Message, ...]


def parse_messages(value: object, field: str = "messages") -> Messages:
    """The conversation that a client sent.

    Raises:
        FormatError: A message is not one; the error names which, and which field.
        LimitError: None, too many, or one that is too long.
    """
    given = fields.an_array(value, field)
    check_range(field, len(given), 1, MESSAGES_MAX, "messages")
    return tuple(Message.parse(one, f"{field}[{index}]") for index, one in enumerate(given))


def kept_messages(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """``messages`` as a session keeps them.

    Raises:
        LimitError: More of them, or more bytes, than a session can take with it.
    """
    check_range("messages", len(messages), 0, MESSAGES_MAX, "messages")
    kept = tuple(message.to_bytes() for message in messages)
    taken = sum(len(one) + _RECORD_BYTES_PER_MESSAGE for one in kept) + _RECORD_BYTES
    check_range("messages", taken, 0, STATE_BYTES_MAX, "bytes")
    return kept


def messages_of(kept: Sequence[bytes]) -> Messages:
    """The messages that a session kept.

    Raises:
        FormatError: One is damaged.
    """
    return tuple(Message.from_bytes(one) for one in kept)


@dataclass(frozen=True, slots=True, repr=False)
class _Given:
    """The fields of one message that may be left out."""

    values: Mapping[str, Any]
    field: str

    def optional(self, key: str) -> str:
        value = self.values.get(key)
        return "" if value is None else fields.text(value, f"{self.field}.{key}")

    def first(self, *keys: str) -> str:
        """The first of ``keys`` that is there and not empty: some have an older name."""
        return next((text for key in keys if (text := self.optional(key))), "")

    @contextlib.contextmanager
    def path(self) -> Iterator[None]:
        """Let what a message says of itself be an error of the field that was given."""
        try:
            yield
        except FormatError as error:
            if not error.field.startswith("message."):
                raise
            field = self.field + error.field.removeprefix("message")
            raise type(error)(field, error.expected, error.found) from None


def _role(value: object, field: str) -> Role:
    names = [role.value for role in Role]
    if value not in names:
        found = value if isinstance(value, str) and len(value) <= 32 else fields.kind_of(value)
        raise FormatError(field, f"one of {', '.join(names)}", found)
    return Role(value)


def _content(value: object, field: str, *, optional: bool) -> str:
    if value is None and optional:
        return ""
    if isinstance(value, str):
        return fields.text(value, field)
    if not isinstance(value, list):
        fields.refuse(field, "a string or an array of text parts", value)
    check_range(field, len(value), 0, PARTS_MAX, "parts")
    return "".join(_part(part, f"{field}[{index}]") for index, part in enumerate(value))


def _part(value: object, field: str) -> str:
    part = fields.an_object(value, field)
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        found = kind if isinstance(kind, str) and len(kind) <= 32 else fields.kind_of(kind)
        raise FormatError(f"{field}.type", "text: this model takes nothing else", found)
    return fields.text(part.get("text"), f"{field}.text")


def _tool_calls(value: object, field: str, role: Role) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    given = fields.an_array(value, field)
    if given and role is not Role.ASSISTANT:
        raise FormatError(field, "none but an assistant's", role.value)
    check_range(field, len(given), 0, TOOL_CALLS_MAX)
    return tuple(_tool_call(one, f"{field}[{index}]") for index, one in enumerate(given))


def _tool_call(value: object, field: str) -> ToolCall:
    call = fields.an_object(value, field)
    if call.get("type", "function") != "function":
        raise FormatError(f"{field}.type", "function", fields.kind_of(call["type"]))
    function = fields.an_object(call.get("function"), f"{field}.function")
    name = fields.text(function.get("name"), f"{field}.function.name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, dict):
        arguments = fields.in_order(arguments, f"{field}.function.arguments").decode()
    arguments = fields.text(arguments, f"{field}.function.arguments")
    _arguments(arguments, f"{field}.function.arguments")
    call_id = call.get("id")
    return ToolCall("" if call_id is None else fields.text(call_id, f"{field}.id"), name, arguments)


def _arguments(encoded: str, field: str) -> dict[str, Any]:
    """Arguments as an object; clients send its text."""
    try:
        value = json.loads(encoded)
    except (ValueError, RecursionError):
        raise FormatError(field, "a JSON object", "other text") from None
    if not isinstance(value, dict):
        fields.refuse(field, "a JSON object", value)
    # Also what Python's reader takes and JSON does not have, such as NaN.
    fields.canonical(value, field)
    return value
