"""Events and items of responses, held against the real SDK's types."""

from __future__ import annotations

import pytest
from openai.types.conversations import ConversationItem
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from node.chat.messages import Message, Role, ToolCall
from node.chat.reply import ReplyPart
from node.http.errors import ApiError
from node.http.pages import page_of
from node.http.responses_answer import Head, Telling, replayed
from node.http.responses_body import CreateResponse, asked_in
from node.http.responses_items import items_of, said_in, without_item
from node.http.responses_run import said_answer, with_told_ids
from node.serving.order import MissReason, Rung, RunUsage
from node.serving.said import Said

EVENTS = TypeAdapter(ResponseStreamEvent)
ITEMS = TypeAdapter(ConversationItem)
CALL = ToolCall("call_1", "look", '{"at":"sea"}')
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def told(parts, message, status="completed"):
    """``(events, answer, response)`` of an answer that came in these parts."""
    body = CreateResponse(input="x", tools=[TOOL], metadata={"a": "b"})
    head = Head(asked_in(body), "m", "resp_1", 5, 0.0, 1.0, "auto")
    telling = Telling(head)
    events = list(telling.begun())
    for part in parts:
        events += telling.part(part)
    answer = said_answer(message, telling.message_id)
    events += telling.over(answer, status)
    answer = with_told_ids(answer, telling)
    usage = RunUsage(9, 3, 4, 5, Rung.RESIDENT, MissReason.CONTEXT_SHIFTED, 1, 0.0, 0.0)
    response = head.response(status, telling.items, usage)
    events.append(telling.ended(response))
    return events, answer, response


ANSWERS = {
    "text": (
        [ReplyPart("Good "), ReplyPart("day")],
        Message(Role.ASSISTANT, "Good day"),
        ["message"],
    ),
    "thought": (
        [ReplyPart(reasoning="Hm"), ReplyPart(reasoning="m"), ReplyPart("Day")],
        Message(Role.ASSISTANT, "Day", reasoning="Hmm"),
        ["reasoning", "message"],
    ),
    "call": (
        [ReplyPart(tool_calls=(CALL,))],
        Message(Role.ASSISTANT, "", tool_calls=(CALL,)),
        ["function_call"],
    ),
    "both": (
        [ReplyPart("I look."), ReplyPart(tool_calls=(CALL, CALL))],
        Message(Role.ASSISTANT, "I look.", tool_calls=(CALL, CALL)),
        ["message", "function_call", "function_call"],
    ),
    "nothing": ([], Message(Role.ASSISTANT, ""), ["message"]),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_events_are_those_that_the_sdk_knows(name, status):
    parts, message, kinds = ANSWERS[name]
    events, answer, response = told(parts, message, status)
    for event in events:
        EVENTS.validate_python(event)
    Response.model_validate(response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [item["type"] for item in response["output"]] == kinds
    # Each item is announced once, told, and closed, before the next one.
    framed = [
        (event["type"].rpartition(".")[2], event["output_index"])
        for event in events
        if event["type"].startswith("response.output_item")
    ]
    assert framed == [(kind, i) for i in range(len(kinds)) for kind in ("added", "done")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    said = [item for item in response["output"] if item["type"] != "reasoning"]
    assert [item["id"] for item in said] == list(answer.ids)
    assert {event["item_id"] for event in events if "item_id" in event} <= {
        item["id"] for item in response["output"]
    }
    deltas = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert deltas == message.content
    assert Said.decode(answer.encode()) == answer


@pytest.mark.parametrize("name", ANSWERS)
def test_replayed_events_tell_the_same_response(name):
    parts, message, _ = ANSWERS[name]
    _, _, response = told(parts, message)
    events = list(replayed(response))
    for event in events:
        EVENTS.validate_python(event)
    assert events[-1]["response"] == response
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_items_become_messages_and_items_again():
    given = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look!"}]},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at":"sea"}'},
        {"type": "function_call", "call_id": "d", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "blue"},
        {"type": "function_call", "call_id": "e", "name": "look", "arguments": "{}"},
    ]
    said = said_in(given)
    assert [one.message["role"] for one in said] == [
        "developer", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert [len(one.ids) for one in said] == [1, 1, 3, 1, 1]
    items = items_of(said)
    for item in items:
        ITEMS.validate_python(item)
    assert [item["type"] for item in items] == [
        "message", "message", "message", "function_call", "function_call",
        "function_call_output", "function_call",
    ]  # fmt: skip
    again = said_in(items)
    assert [one.message for one in again] == [one.message for one in said]


def test_part_of_a_message_is_taken_back_alone():
    (one,) = said_in(
        [
            {"role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call", "call_id": "d", "name": "look", "arguments": "{}"},
        ]
    )
    text, first, second = one.ids
    without_text = without_item(one, text)
    assert (without_text.ids, without_text.message["content"]) == ((first, second), "")
    without_call = without_item(one, first)
    assert [call["id"] for call in without_call.message["tool_calls"]] == ["d"]
    bare = without_item(without_call, second)
    assert (bare.ids, bare.message) == ((text,), {"role": "assistant", "content": "I look."})
    assert without_item(bare, text) is None


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ({}, [4, 3, 2, 1, 0], False),
        ({"order": "asc", "limit": "2"}, [0, 1], True),
        ({"order": "asc", "limit": "2", "after": "3"}, [4], False),
        ({"after": "0"}, [], False),
    ],
)
def test_lists_are_walked_through_in_pieces(query, ids, more):
    page = page_of([{"id": str(number)} for number in range(5)], query)
    assert [int(item["id"]) for item in page["data"]] == ids
    assert page["has_more"] is more
    assert page["last_id"] == (str(ids[-1]) if ids else None)


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "9"}]
)
def test_other_questions_are_refused(query):
    with pytest.raises(ApiError) as caught:
        page_of([{"id": "1"}], query)
    assert caught.value.param == next(iter(query))
