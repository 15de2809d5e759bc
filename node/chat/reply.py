"""Answers as they arrive: thoughts, content and tool calls apart.

Marks are text, and may arrive in pieces: what could still become one is held back. A tool call is
read when it is whole. What is marked as one and cannot be read is given out as content, marks and
all: nothing that was generated is lost.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvpack.errors import FormatError
from node.chat.messages import TOOL_CALLS_MAX, Message, Role, ToolCall
from node.chat.tools import Tool, tool_objects

if TYPE_CHECKING:
    from engine import ParsedCall, ReplyMarks

#: Characters of one tool call; beyond it the text is content.
_CALL_CHARACTERS_MAX: Final = 256 << 10


class ReplyModel(Protocol):
    """What is needed of an ``engine.Model``."""

    @property
    def reply_marks(self) -> ReplyMarks:
        """What sets thoughts and tool calls apart."""

    def parse_tool_call(
        self, text: str, tools: Sequence[dict[str, Any]] = ...
    ) -> tuple[ParsedCall, ...]:
        """The calls in ``text``."""


@dataclass(frozen=True, slots=True, repr=False)
class ReplyPart:
    """Something of an answer that is decided.

    Attributes:
        content: More of the content.
        reasoning: More of a thought.
        tool_calls: Calls that became whole.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class _State(enum.Enum):
    CONTENT = "content"
    THOUGHT = "thought"
    CALL = "call"


class ReplyReader:
    """Reads one answer.

    Args:
        model: Knows the marks and the form of tool calls.
        new_id: Gives a fresh id for a tool call that has none.
        tools: What the model was told it may call; without any, nothing is read as a call.
        in_thought: The answer begins inside of a thought.
    """

    def __init__(
        self,
        model: ReplyModel,
        new_id: Callable[[], str],
        tools: Sequence[Tool] = (),
        *,
        in_thought: bool = False,
    ) -> None:
        self._model = model
        self._new_id = new_id
        self._tools = tuple(tools)
        self._state = _State.THOUGHT if in_thought else _State.CONTENT
        self._edges = _edges(model.reply_marks, with_calls=bool(tools))
        self._held = ""
        self._call = ""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def has_tool_calls(self) -> bool:
        """Whether a call was read: the answer's finish reason is then ``tool_calls``."""
        return bool(self._calls)

    def push(self, text: str) -> ReplyPart:
        """What ``text``, the next piece of the answer, decides."""
        text, self._held = self._held + text, ""
        found: list[ReplyPart] = []
        while True:
            state = self._state
            mark, target, at = self._next_mark(text)
            if not mark:
                break
            found.append(self._take(text[:at]))
            text = text[at:]
            # A call that became too long is content by now, and so may its mark be.
            if self._state is state:
                found.append(self._cross(mark, target))
                text = text[len(mark) :]
        held = _held_characters(text, [mark for mark, _ in self._edges[self._state]])
        self._held = text[len(text) - held :]
        found.append(self._take(text[: len(text) - held]))
        return self._record(found)

    def finish(self) -> ReplyPart:
        """The rest, when no more comes: a half mark is what it says, a call ends here."""
        rest, self._held = self._held, ""
        found = [self._take(rest)]
        if self._state is _State.CALL:
            found.append(self._cross("", _State.CONTENT))
        return self._record(found)

    def message(self) -> Message:
        """The answer so far, as a message of the conversation."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = tuple(self._calls)
        return Message(Role.ASSISTANT, content, tool_calls=calls, reasoning=reasoning)

    def _next_mark(self, text: str) -> tuple[str, _State, int]:
        """The mark that is whole first when ``text`` is read letter by letter; or no mark."""
        best, end = ("", self._state, len(text)), len(text) + 1
        for mark, target in self._edges[self._state]:
            at = text.find(mark)
            if at >= 0 and (at + len(mark), at) < (end, best[2]):
                best, end = (mark, target, at), at + len(mark)
        return best

    def _take(self, text: str) -> ReplyPart:
        if self._state is _State.THOUGHT:
            return ReplyPart(reasoning=text)
        if self._state is _State.CONTENT:
            return ReplyPart(content=text)
        self._call += text
        if len(self._call) <= _CALL_CHARACTERS_MAX:
            return ReplyPart()
        # Too long for a call: from here on it is content.
        overflow = self._model.reply_marks.tool_start + self._call
        self._call, self._state = "", _State.CONTENT
        return ReplyPart(content=overflow)

    def _cross(self, mark: str, target: _State) -> ReplyPart:
        left, self._state = self._state, target
        if left is not _State.CALL:
            return ReplyPart()
        text, self._call = self._call, ""
        calls = self._read(text)
        if calls:
            return ReplyPart(tool_calls=calls)
        return ReplyPart(content=self._model.reply_marks.tool_start + text + mark)

    def _read(self, text: str) -> tuple[ToolCall, ...]:
        from engine import ToolCallError

        try:
            parsed = self._model.parse_tool_call(text, tool_objects(self._tools))
            calls = tuple(self._numbered(call) for call in parsed)
        except (ToolCallError, FormatError):
            return ()
        return calls if len(self._calls) + len(calls) <= TOOL_CALLS_MAX else ()

    def _numbered(self, call: ParsedCall) -> ToolCall:
        return ToolCall(call.call_id or self._new_id(), call.name, call.arguments)

    def _record(self, parts: Sequence[ReplyPart]) -> ReplyPart:
        content = "".join(part.content for part in parts)
        reasoning = "".join(part.reasoning for part in parts)
        calls = tuple(call for part in parts for call in part.tool_calls)
        self._content.append(content)
        self._reasoning.append(reasoning)
        self._calls.extend(calls)
        return ReplyPart(content, reasoning, calls)


_Edges = dict[_State, tuple[tuple[str, _State], ...]]


def _edges(marks: ReplyMarks, *, with_calls: bool) -> _Edges:
    """Which marks lead where, by state."""
    think = [(marks.think_start, _State.THOUGHT)] if marks.think_start else []
    unthink = [(marks.think_end, _State.CONTENT)] if marks.think_end else []
    call = [(marks.tool_start, _State.CALL)] if marks.tool_start and with_calls else []
    uncall = [(marks.tool_end, _State.CONTENT)] if marks.tool_end else []
    return {
        _State.CONTENT: (*think, *call),
        _State.THOUGHT: (*unthink, *call),
        _State.CALL: tuple(uncall),
    }


def _held_characters(text: str, marks: Sequence[str]) -> int:
    """How many last characters of ``text`` may be the beginning of a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        tail = text[-count:]
        if any(mark.startswith(tail) for mark in marks):
            return count
    return 0
