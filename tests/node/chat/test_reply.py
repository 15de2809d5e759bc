"""Answers in pieces: however they are cut, the parts are the same (fault 39's kind)."""

from __future__ import annotations

import itertools
import json

import pytest
from chat_support import TOOLS
from hypothesis import given
from hypothesis import strategies as st

from engine import ReplyMarks, ToolCallError
from node.chat.messages import ToolCall
from node.chat.reply import ReplyReader
from node.chat.tools import parse_tools

TOOL = parse_tools([{"type": "function", "name": "add"}])
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Thinker:
    """A model with all marks; reads calls as ``json_tools`` does, through the real parser."""

    reply_marks = ReplyMarks("<think>", "</think>", "<tool_call>", "</tool_call>")

    def __init__(self, model):
        self._model = model

    def parse_tool_call(self, text, tools=()):
        return self._model.parse_tool_call(text, tools)


class Open(Thinker):
    """One whose calls reach to the end of the answer."""

    reply_marks = ReplyMarks(tool_start="[CALL]")


@pytest.fixture(scope="module")
def thinker(variant):
    return Thinker(variant(TOOLS))


def read(model, pieces, tools=TOOL, in_thought=False):
    numbers = itertools.count()
    reader = ReplyReader(model, lambda: f"id{next(numbers)}", tools, in_thought=in_thought)
    parts = [*map(reader.push, pieces), reader.finish()]
    message = reader.message()
    assert message.content == "".join(part.content for part in parts)
    assert message.reasoning == "".join(part.reasoning for part in parts)
    assert message.tool_calls == tuple(call for part in parts for call in part.tool_calls)
    assert reader.has_tool_calls == bool(message.tool_calls)
    return message.content, message.reasoning, message.tool_calls


_TEXT = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            CALL,
            "<tool_call>",
            "</tool_call>",
            "<",
            "think>",
            "a",
            "\n",
            "🙂",
            "</",
        ]
    ),
    max_size=8,
).map("".join)


@given(text=_TEXT, cuts=st.lists(st.integers(0, 200), max_size=12), in_thought=st.booleans())
def test_how_an_answer_is_cut_changes_nothing(thinker, text, cuts, in_thought):
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = read(thinker, [text], in_thought=in_thought)
    assert read(thinker, pieces, in_thought=in_thought) == whole
    assert read(thinker, list(text), in_thought=in_thought) == whole
    # Nothing that is neither mark nor call is lost.
    for letter in "a🙂\n":
        calls = len(whole[2]) * CALL.count(letter)
        assert (whole[0] + whole[1]).count(letter) == text.count(letter) - calls


def test_parts_of_an_answer(thinker):
    add = ToolCall("id0", "add", '{"a": 1}')
    assert read(thinker, [f"<think>so</think>Well. {CALL}"]) == ("Well. ", "so", (add,))
    assert read(thinker, ["so</think>Well."], in_thought=True) == ("Well.", "so", ())
    assert read(thinker, [f"<think>so{CALL}ok"]) == ("ok", "so", (add,))
    two = read(thinker, [CALL + CALL])[2]
    assert [call.call_id for call in two] == ["id0", "id1"]


class Nested(Thinker):
    """Marks that lie in one another."""

    reply_marks = ReplyMarks("<a>", "</a>", "x<a>y", "</")


_NESTED = st.lists(st.sampled_from(["<a>", "x<a>y", "</a>", "</", "x", "y", "<"]), max_size=6)


@given(_NESTED.map("".join), st.lists(st.integers(0, 20), max_size=4))
def test_marks_that_lie_in_one_another_are_read_in_order_too(thinker, text, cuts):
    model = Nested(thinker)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert read(model, pieces) == read(model, [text]) == read(model, list(text))


def test_without_tools_nothing_is_a_call(thinker):
    assert read(thinker, [CALL], tools=()) == (CALL, "", ())


@pytest.mark.parametrize(
    "inside",
    [
        *("", "nope", "[1]", "[" * 100_000, '{"name": "add"}', '{"name": 1, "arguments": {}}'),
        *('{"name": "", "arguments": {}}', '{"name": "add", "arguments": [1]}'),
        *('{"name": "add", "arguments": {"a": NaN}}', '{"name": "\\ud800", "arguments": {}}'),
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
    ],
)
def test_what_is_no_call_is_content(thinker, inside):
    text = f"a<tool_call>{inside}</tool_call>b"
    assert read(thinker, [text]) == (text, "", ())


def test_a_call_that_was_cut_off_is_content_and_a_whole_one_is_a_call(thinker):
    cut = '<tool_call>\n{"name": "add", "argum'
    assert read(thinker, [cut]) == (cut, "", ())
    assert read(thinker, [CALL.removesuffix("</tool_call>")])[2]
    assert read(thinker, ["x<tool_ca"]) == ("x<tool_ca", "", ())


def test_a_call_without_an_end_reaches_to_the_end(variant):
    inside = json.dumps({"name": "add", "arguments": {}})
    assert read(Open(variant(TOOLS)), ["so ", "[CA", "LL]", inside]) == (
        "so ", "", (ToolCall("id0", "add", "{}"),)
    )  # fmt: skip


def test_a_call_that_never_ends_is_content_and_takes_bounded_memory(thinker):
    long = "x" * (256 << 10)
    text = f"<tool_call>{long}y</tool_call>z"
    assert read(thinker, [text]) == (text, "", ())
    reader = ReplyReader(thinker, str, TOOL)
    pieces = [reader.push(text[at : at + 4096]) for at in range(0, len(text), 4096)]
    assert "".join(part.content for part in pieces) + reader.finish().content == text


def test_a_model_without_marks_says_content_only(trained):
    assert read(trained, ["<think>a</think>", CALL]) == ("<think>a</think>" + CALL, "", ())
    with pytest.raises(ToolCallError):
        trained.parse_tool_call("{}")
