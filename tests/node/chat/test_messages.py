"""What clients send becomes messages, or one error that names the field (group K)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.errors import FormatError, LimitError
from node.chat.messages import (
    Message,
    Role,
    ToolCall,
    kept_messages,
    messages_of,
    parse_messages,
)
from node.chat.tools import parse_tools
from node.state import MESSAGE_BYTES_MAX, SessionState, encode_state

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def user(content):
    return {"role": "user", "content": content}


def test_every_role_and_kind_of_content_is_read():
    read = parse_messages(
        [
            {"role": "developer", "content": "d"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
            {"role": "assistant", "content": "x", "reasoning": "why"},
        ]
    )
    assert [one.role for one in read] == [
        Role.DEVELOPER, Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT,
    ]  # fmt: skip
    assert [one.content for one in read] == ["d", "ab", "", "42", "x"]
    assert read[2].tool_calls == (ToolCall("c1", "f", '{"a": 1}'),)
    assert (read[3].tool_call_id, read[3].name, read[4].reasoning) == ("c1", "f", "why")
    assert read[0].for_template()["role"] == "system"
    assert read[2].for_template()["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("hi", "messages"),
        ([], "messages"),
        ([user("x")] * 4097, "messages"),
        (["hi"], "messages[0]"),
        ([user("a"), {"content": "x"}], "messages[1].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([user(None)], "messages[0].content"),
        ([user(5)], "messages[0].content"),
        ([user("\ud800")], "messages[0].content"),
        ([user([{"type": "text", "text": "\udfff"}])], "messages[0].content[0].text"),
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "messages[0].content[0].type"),
        ([user([{"type": "input_audio"}])], "messages[0].content[0].type"),
        ([user([{"type": "text", "text": "x"}] * 1025)], "messages[0].content"),
        ([{**user("x"), "name": 7}], "messages[0].name"),
        ([{**user("x"), "name": "n" * 257}], "messages[0].name"),
        ([{**user("x"), "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [CALL] * 129}], "messages[0].tool_calls"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
    ],
)
def test_what_is_no_message_is_named_by_its_path(value, field):
    with pytest.raises(FormatError) as refused:
        parse_messages(value)
    assert refused.value.field == field
    assert "\ud800" not in str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    ["", "[]", "nope", '{"a": NaN}', "1", '{"a":' * 70 + "1" + "}" * 70, '{"a":"\\ud800"}'],
)
def test_arguments_are_a_json_object(arguments):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    if not arguments:
        # As some clients write a call without arguments.
        assert parse_messages([message])[0].tool_calls[0].arguments == "{}"
        return
    with pytest.raises(FormatError) as refused:
        parse_messages([message])
    assert refused.value.field == "messages[0].tool_calls[0].function.arguments"


def test_a_message_may_be_as_long_as_a_session_keeps_it_and_no_longer():
    room = MESSAGE_BYTES_MAX - len(Message(Role.USER, "").to_bytes())
    assert len(Message.parse(user("x" * room)).content) == room
    with pytest.raises(LimitError) as refused:
        parse_messages([user("ok"), user("x" * (room + 1))])
    assert refused.value.field == "messages[1]"


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_calls = st.lists(
    st.builds(
        ToolCall, _text, st.text(min_size=1, max_size=5, alphabet="abc"), st.just('{"b":1,"a":2}')
    ),
    max_size=2,
).map(tuple)
_messages = st.one_of(
    st.builds(Message, st.sampled_from([Role.SYSTEM, Role.DEVELOPER, Role.USER]), _text, _text),
    st.builds(Message, st.just(Role.ASSISTANT), _text, _text, _calls, st.just(""), _text),
    st.builds(Message, st.just(Role.TOOL), _text, _text, st.just(()), _text),
)


@given(st.lists(_messages, max_size=4), st.lists(_messages, max_size=4))
def test_kept_bytes_are_the_message_and_nothing_else(first, second):
    assert messages_of(kept_messages(first)) == tuple(first)
    assert (kept_messages(first) == kept_messages(second)) == (first == second)


def test_what_is_kept_fits_a_session_to_the_byte():
    filler = Message(Role.USER, "x" * (1 << 19))
    kept = kept_messages([filler] * 5)
    assert encode_state(SessionState(1, 1, 1, kept))
    with pytest.raises(LimitError, match="messages: expected 0 to 3145728 bytes"):
        kept_messages([filler] * 6)


@pytest.mark.parametrize(("count", "size"), [(5, 1 << 19), (500, 6000)])
def test_what_is_kept_is_never_more_than_a_session_takes(count, size):
    """Filled to the last byte that is accepted, with a few long messages and with many short."""
    filler = [Message(Role.USER, "x" * size)] * count

    def filled(last: int) -> tuple[bytes, ...]:
        return kept_messages([*filler, Message(Role.USER, "x" * last)])

    low, high = 0, 1 << 20
    while low < high:
        middle = (low + high + 1) // 2
        try:
            low = middle if filled(middle) else low
        except LimitError:
            high = middle - 1
    state = SessionState((1 << 31) - 1, 1 << 62, 1 << 62, filled(low))
    assert (3 << 20) - len(encode_state(state)) < 9 * (count + 1) + 256


@pytest.mark.parametrize("encoded", [b"", b"{", b"[]", b"\xff", b'{"role":"user"}', b"[" * 9999])
def test_damaged_messages_are_no_messages(encoded):
    with pytest.raises(FormatError):
        messages_of([encoded])


def test_no_text_is_shown():
    shown = repr(parse_messages([user("secret"), {"role": "assistant", "tool_calls": [CALL]}]))
    assert "secret" not in shown and "c1" not in shown


def test_tools_keep_the_clients_order_in_both_forms():
    chat = {"type": "function", "function": {"name": "f", "zebra": 1, "apple": 2}}
    responses = {"type": "function", "name": "f", "zebra": 1, "apple": 2}
    (first,), (second,) = parse_tools([chat]), parse_tools([responses])
    assert first == second
    assert list(json.loads(first.encoded)["function"]) == ["name", "zebra", "apple"]
    assert parse_tools(None) == () == parse_tools([])


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({}, "tools"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function.name"),
        ([{"type": "function", "function": 1}], "tools[0].function"),
        ([{"type": "function", "name": ""}], "tools[0].function.name"),
        ([{"type": "function", "name": "f"}] * 2, "tools"),
        ([{"type": "function", "name": f"f{i}"} for i in range(129)], "tools"),
        ([{"type": "function", "name": "f", "description": "x" * (1 << 20)}], "tools"),
        ([{"type": "function", "name": "f", "x": float("nan")}], "tools[0]"),
    ],
)
def test_what_is_no_tool_is_named(value, field):
    with pytest.raises(FormatError) as refused:
        parse_tools(value)
    assert refused.value.field == field
