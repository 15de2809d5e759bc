"""What a conversation carries with its session, and what of it may be forgotten."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.errors import FormatError, KvpackError, LimitError
from node.records import Context, ConversationRecord
from node.serving import conversations
from node.serving.conversations import carried_by, with_messages
from node.serving.said import Heading, Said

TEXTS = st.text(max_size=40)


def said(role, text="x", name="msg_1"):
    return Said((name,), {"role": role, "content": text})


@settings(max_examples=40, deadline=None)
@given(TEXTS, TEXTS)
def test_message_comes_back_with_its_ids(text, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    one = Said(("msg_1", "fc_1"), {"role": "assistant", "content": text, "tool_calls": [call]})
    assert Said.decode(one.encode()) == one
    assert Said.decode(one.encode()).encode() == one.encode()


def test_bytes_are_those_of_the_specification():
    one = Said(("msg_1",), {"role": "user", "content": "Grüße"})
    assert one.encode() == (
        b'{"ids":["msg_1"],"message":{"content":"Gr\xc3\xbc\xc3\x9fe","role":"user"}}'
    )
    assert Heading(5, 7, 1, b'{"a":"b"}').encode() == (
        b'{"conversation":{"created_at":5,"lead":1,"metadata":{"a":"b"},"revision":7}}'
    )


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(TEXTS, TEXTS, max_size=4))
def test_heading_comes_back(metadata):
    packed = json.dumps(metadata, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    one = Heading(5, 7, 1, packed.encode())
    assert Heading.decode(one.encode()) == one


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_other_bytes_are_refused_as_such(data):
    for kind in (Said, Heading):
        with pytest.raises(KvpackError):
            kind.decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b'{"ids":[],"message":{"role":"user"}}',
        b'{"ids":["a","b"],"message":{"role":"user"}}',
        b'{"ids":["a"],"message":{"content":"x"}}',
        b'{"ids":[1],"message":{"role":"user"}}',
        b'{"ids":["a"],"message":{"role":"assistant","tool_calls":[1,2]}}',
        b'{"conversation":{"created_at":1,"revision":1,"lead":0}}',
        b'{"conversation":{"created_at":-1,"revision":1,"lead":0,"metadata":{}}}',
        b'{"conversation":{"created_at":1,"revision":1,"lead":true,"metadata":{}}}',
        b'{"conversation":{"created_at":1,"revision":1,"lead":0,"metadata":[]}}',
        b"[" * 100_000,
    ],
)
def test_what_a_peer_sends_is_checked(data):
    with pytest.raises((FormatError, LimitError)):
        Said.decode(data)
    with pytest.raises((FormatError, LimitError)):
        Heading.decode(data)


def test_leading_system_messages_lead_and_later_ones_do_not():
    first = with_messages(Context(), [said("system"), said("developer"), said("user")])
    assert (first.lead, first.kept_from) == (2, 2)
    later = with_messages(first, [said("system")])
    assert (later.lead, len(later.messages)) == (2, 4)
    alone = with_messages(with_messages(Context(), [said("system")]), [said("system")])
    assert alone.lead == 2


def test_dropped_messages_go_before_a_conversation_is_full(monkeypatch):
    monkeypatch.setattr(conversations, "MESSAGES_MAX", 6)
    texts = [said("system", "s"), *(said("user", str(i)) for i in range(5))]
    whole = Context(tuple(one.encode() for one in texts), lead=1, kept_from=3)
    more = with_messages(whole, [said("user", "new")])
    assert [Said.decode(one).message["content"] for one in more.messages] == [
        "s", "1", "2", "3", "4", "new",
    ]  # fmt: skip
    assert (more.lead, more.kept_from) == (1, 2)
    assert more.kept == (whole.messages[0], *whole.messages[3:], said("user", "new").encode())


def test_more_text_than_a_session_carries_is_refused():
    big = said("user", "x" * 900_000)
    record = ConversationRecord("a", "conv_1", 1, context=with_messages(Context(), [big] * 3))
    assert len(carried_by(record)) == 4
    with pytest.raises(LimitError, match=r"conversation: .* bytes of text"):
        carried_by(
            ConversationRecord("a", "conv_1", 1, context=with_messages(Context(), [big] * 4))
        )
