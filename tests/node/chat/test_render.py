"""Conversations in the forms of real templates, from scratch and continued."""

from __future__ import annotations

import concurrent.futures

import pytest
from chat_support import (
    CHATML,
    COUNTING,
    STRIPPING,
    TOOLS,
    TRIMMING,
    by_character,
    conversation,
)

from engine import ChatTemplateError
from kvpack.errors import FormatError
from node.chat.messages import Message, Role, parse_messages
from node.chat.render import Known, Renderer
from node.chat.splice import Splice
from node.chat.tools import parse_tools

END = 6  # <|end|> of the trained model
OTHER_END = 2  # <|eos|>, which also ends an answer and which its template never writes

ANSWERS = [
    "Hello",
    " trailing  ",
    "lines\n\n",
    "🙂 👩\u200d👩\u200d👦 \U0001f1ee\U0001f1f1",
    "```py\nx = 1\n```",
    "cut of",
    "e\u0301 \u00e9",
    "",
]


def answered(model, messages, answer: str, end: tuple[int, ...] = (END,)) -> Known:
    """What is known after ``answer``, generated in other tokens than an encoder gives."""
    prompt = Renderer(model).prompt(messages)
    ids = (*prompt.token_ids, *by_character(model, answer), *end)
    return Known((*messages, Message(Role.ASSISTANT, answer)), ids)


def text_of(model, prompt) -> str:
    of = model.token_bytes()
    return b"".join(map(of, prompt.token_ids)).decode(errors="replace")


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("end", [(END,), ()], ids=["ended", "cut"])
def test_an_answer_is_never_encoded_again(trained, renderer, answer, end):
    """Fault 32, in the trained model's own form; also an answer that max_tokens cut off."""
    known = answered(trained, conversation("hi", system="be brief"), answer, end)
    more = conversation("and now?")
    found = renderer.continue_from(known, more)
    assert found.splice is Splice.EXACT and found.kept_tokens == len(known.token_ids)
    assert found.token_ids[: len(known.token_ids)] == known.token_ids
    fresh = renderer.prompt((*known.messages, *more))
    assert text_of(trained, found) == text_of(trained, fresh)
    rest = trained.encode(("" if end else "<|end|>") + "<|user|>and now?<|end|><|assistant|>")
    assert list(found.token_ids[len(known.token_ids) :]) == rest


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_form_without_marks_of_its_own_is_continued_too(variant, answer):
    """The trained model has no tokens for ChatML's marks: they are letters like any others."""
    model = variant(CHATML)
    known = answered(model, conversation("hi"), answer, ())
    found = Renderer(model).continue_from(known, conversation("more"))
    assert found.splice is Splice.EXACT
    assert text_of(model, found).endswith(
        f"{answer}<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_turn_after_turn_only_grows(trained, renderer):
    messages, ids = conversation("hi"), ()
    for turn in range(5):
        known = Known(messages[:-1], ids)
        prompt = renderer.continue_from(known, messages[-1:]) if ids else renderer.prompt(messages)
        assert prompt.token_ids[: len(ids)] == ids
        answer = f"no. {turn} 🙂"
        ids = (*prompt.token_ids, *by_character(trained, answer), END)
        messages = (*messages, *(Message(Role.ASSISTANT, answer), Message(Role.USER, "go on")))
    assert prompt.turn_ends[-1] == len(known.token_ids)


def test_an_end_token_that_the_form_does_not_write_is_left_out(trained, renderer):
    known = answered(trained, conversation("hi"), "Hello", (OTHER_END,))
    found = renderer.continue_from(known, conversation("more"))
    assert found.splice is Splice.REWOUND and found.kept_tokens == len(known.token_ids) - 1
    assert "<|eos|>" not in text_of(trained, found)


def test_what_a_stop_string_took_from_the_client_is_not_in_the_next_turn(trained, renderer):
    """Fault 39: the session holds the stop string's tokens, the client never saw them."""
    known = answered(trained, conversation("hi"), "Hello ", trained.encode(" STOP"))
    found = renderer.continue_from(known, conversation("more"))
    assert found.splice is Splice.REWOUND
    assert "STOP" not in text_of(trained, found)
    assert found.kept_tokens >= len(renderer.prompt(conversation("hi")).token_ids)


def test_a_form_that_changes_its_beginning_is_rendered_from_scratch(variant):
    model = variant(COUNTING)
    known = answered(model, conversation("hi"), "Hello")
    found = Renderer(model).continue_from(known, conversation("more"))
    fresh = Renderer(model).prompt((*known.messages, *conversation("more")))
    assert found.splice is Splice.FULL and found.token_ids == fresh.token_ids
    assert found.turn_ends == ()
    assert found.kept_tokens == 1  # <|system|>, and then another number


def test_a_form_that_leaves_out_earlier_thoughts_goes_back_to_before_them(variant):
    model = variant(STRIPPING)
    prompt = Renderer(model).prompt(conversation("hi"))
    said = "because</think>Hello"
    ids = (*prompt.token_ids, *by_character(model, said), END)
    answer = Message(Role.ASSISTANT, f"<think>\n{said}")
    found = Renderer(model).continue_from(
        Known((*conversation("hi"), answer), ids), conversation("more")
    )
    assert found.splice is not Splice.EXACT and found.kept_tokens < len(prompt.token_ids)
    assert "because" not in text_of(model, found)
    assert text_of(model, found).startswith("<|user|>hi<|end|><|assistant|>Hello<|end|>")


def test_a_form_that_trims_answers_says_so(variant):
    model = variant(TRIMMING)
    kept = Renderer(model).continue_from(
        answered(model, conversation("hi"), "Hello"), conversation("more")
    )
    assert kept.splice is Splice.EXACT
    lost = Renderer(model).continue_from(
        answered(model, conversation("hi"), " Hello  "), conversation("more")
    )
    assert lost.splice in (Splice.REWOUND, Splice.FULL)
    assert "<|assistant|>Hello<|end|>" in text_of(model, lost)


def test_a_client_that_changed_an_answer_gets_what_it_sent(trained, renderer):
    """CRLF for LF, a composed accent for a decomposed one: other text, other ids."""
    for said, sent in [("a\nb", "a\r\nb"), ("e\u0301", "\u00e9"), ("Hello", "Hullo")]:
        known = answered(trained, conversation("hi"), said)
        changed = Known((*known.messages[:-1], Message(Role.ASSISTANT, sent)), known.token_ids)
        found = renderer.continue_from(changed, conversation("more"))
        assert found.splice is not Splice.EXACT
        fresh = renderer.prompt((*changed.messages, *conversation("more")))
        assert text_of(trained, found) == text_of(trained, fresh)


def test_tools_and_their_calls_go_through_the_form(variant):
    model, tools = variant(TOOLS), parse_tools([{"type": "function", "name": "add", "z": 1}])
    renderer = Renderer(model)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = parse_messages([{"role": "user", "content": "1+1?"}])
    prompt = renderer.prompt(messages, tools)
    assert '{"type": "function", "function": {"name": "add", "z": 1}}' in text_of(model, prompt)
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ids = (*prompt.token_ids, *by_character(model, written), END)
    answer = parse_messages([{"role": "assistant", "tool_calls": [call]}])
    result = parse_messages([{"role": "tool", "content": "2", "tool_call_id": "c"}])
    found = renderer.continue_from(Known((*messages, *answer), ids), result, tools)
    assert found.splice is Splice.EXACT and found.token_ids[: len(ids)] == ids
    assert text_of(model, found).endswith("<|user|>(tool)2<|end|><|assistant|>")


def test_tools_are_refused_where_the_form_writes_none(renderer):
    tools = parse_tools([{"type": "function", "name": "f"}])
    with pytest.raises(FormatError, match="tools: expected none"):
        renderer.prompt(conversation("hi"), tools)


def test_a_message_that_the_form_refuses_is_refused_without_its_text(trained, renderer):
    tool = Message(Role.TOOL, "secret", tool_call_id="c")
    with pytest.raises(ChatTemplateError) as refused:
        renderer.prompt((*conversation("hi"), tool))
    assert "secret" not in str(refused.value) and refused.value.detail == "unknown role: tool"


def test_a_thought_that_the_prompt_opens_is_known(variant, renderer, monkeypatch):
    """The mark at the prompt's end opens it; the same letters in a message do not."""
    model = variant(STRIPPING)
    marks = type(model.reply_marks)("<think>", "</think>")
    monkeypatch.setattr(type(model), "reply_marks", property(lambda self: marks))
    assert Renderer(model).prompt(conversation("hi")).in_thought
    assert not renderer.prompt(conversation("<think>")).in_thought


@pytest.mark.parametrize("turns", [1, 2, 7])
def test_ends_of_turns_are_where_a_shorter_conversation_ends(trained, renderer, turns):
    texts = [f"message {index} 🙂" for index in range(2 * turns - 1)]
    messages = conversation(*texts, system="s")
    found = renderer.prompt(messages)
    expected = [
        len(trained.encode(trained.render_chat(
            [one.for_template() for one in messages[: 1 + 2 * turn]], add_generation_prompt=False
        )))
        for turn in range(1, turns)
    ]  # fmt: skip
    assert list(found.turn_ends) == expected[-4:]
    assert renderer.count(messages) == len(found.token_ids)


def test_a_turn_that_ends_inside_of_a_token_has_no_end(variant):
    """A form without anything between messages: tokens lie across their edges."""
    model = variant("{% for message in messages %}{{ message.content }}{% endfor %}")
    messages = conversation("th", "e ca", "t sat ", "down", " there ", "aga", "in")
    found = Renderer(model).prompt(messages)
    edges = {len(text_of(model, found)[: len("".join(m.content for m in messages[:end]))])
             for end in (2, 4, 6)}  # fmt: skip
    of = model.token_bytes()
    lengths = [len(b"".join(map(of, found.token_ids[:end]))) for end in found.turn_ends]
    assert set(lengths) < edges


def test_many_threads_render_and_encode_at_once(trained, renderer):
    """Any thread may: the tokenizer is settled when it is loaded, and nothing changes it later."""
    cases = [conversation("hi " * n, "🙂" * n, "more", system="s" * n) for n in range(1, 9)]
    expected = [renderer.prompt(case) for case in cases]
    of = trained.token_bytes()

    def work(turn: int):
        case = turn % len(cases)
        found = renderer.prompt(cases[case])
        shown = trained.decode(found.token_ids)
        return found == expected[case] and shown and b"".join(map(of, found.token_ids))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(160)))
