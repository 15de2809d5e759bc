"""Tools that a model may call, as a client describes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpack.errors import FormatError
from kvpack.limits import check_range
from node.chat import fields

#: Tools of one request: what public APIs accept; and the bytes of all their descriptions, which
#: are part of every prompt.
TOOLS_MAX: Final = 128
TOOLS_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True, repr=False)
class Tool:
    """One tool.

    Attributes:
        name: Of its function.
        encoded: The description as JSON, its keys in the client's order: a template writes it so.
    """

    name: str
    encoded: bytes

    def __repr__(self) -> str:
        return f"Tool({len(self.encoded)} bytes)"

    def for_template(self) -> dict[str, Any]:
        """As templates expect it: ``{"type": "function", "function": {...}}``."""
        value: dict[str, Any] = json.loads(self.encoded)
        return value


Tools = tuple[Tool, ...]


def parse_tools(value: object, field: str = "tools") -> Tools:
    """The tools that a client sent; none for null.

    Both forms are read: chat's, with the description under ``function``, and that of responses,
    which has it beside the type.

    Raises:
        FormatError: One is not described as a function, or two have one name.
        LimitError: Too many, or too long.
    """
    if value is None:
        return ()
    given = fields.an_array(value, field)
    check_range(field, len(given), 0, TOOLS_MAX, "tools")
    tools = tuple(_tool(one, f"{field}[{index}]") for index, one in enumerate(given))
    check_range(field, sum(len(tool.encoded) for tool in tools), 0, TOOLS_BYTES_MAX, "bytes")
    if len({tool.name for tool in tools}) < len(tools):
        raise FormatError(field, "a name for each", "one name twice")
    return tools


def tool_objects(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """All of them as templates expect them."""
    return [tool.for_template() for tool in tools]


def _tool(value: object, field: str) -> Tool:
    given = fields.an_object(value, field)
    kind = given.get("type")
    if kind != "function":
        found = kind if isinstance(kind, str) and len(kind) <= 32 else fields.kind_of(kind)
        raise FormatError(f"{field}.type", "function", found)
    function = given.get("function")
    if function is None:
        function = {key: inner for key, inner in given.items() if key != "type"}
    described = fields.an_object(function, f"{field}.function")
    name = fields.text(described.get("name"), f"{field}.function.name")
    check_range(f"{field}.function.name", len(name), 1, 256, "characters")
    whole = {"type": "function", "function": dict(described)}
    return Tool(name, fields.in_order(whole, field))
