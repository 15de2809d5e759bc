"""What a model folder says of conversations: template, end tokens, marks, tool calls."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_support import ModelCase, write_model

import engine
from engine import ChatTemplateError, ModelFolderError, ReplyMarks, ToolCallError
from engine.chat import TOOL_CALL_CHARACTERS_MAX
from kvpack.errors import LimitError

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "models" / "muse-novels-6m"
HI = [{"role": "user", "content": "hi"}]
HERMES = "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>{{ tools }} tool_call.name"


@pytest.fixture(scope="module")
def trained():
    return engine.load_model(TRAINED)


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model", ModelCase())


def edited(folder: Path, name: str, **changes) -> Path:
    path = folder / name
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**value, **changes}))
    return folder


def test_end_tokens_are_the_configured_ones_and_the_tokenizers(trained, folder):
    assert trained.end_token_ids == {2, 6}
    assert engine.load_model(folder).end_token_ids == {257}
    edited(folder, "config.json", eos_token_id=[258, 259])
    assert engine.load_model(folder).end_token_ids == {257, 258, 259}
    edited(folder, "generation_config.json", eos_token_id=260)
    assert engine.load_model(folder).end_token_ids == {257, 260}
    edited(folder, "generation_config.json", eos_token_id=None)
    edited(folder, "config.json", eos_token_id=None)
    assert engine.load_model(folder).end_token_ids == {257}


@pytest.mark.parametrize("value", ["x", 320, -1, [257, True], [[1]], {"a": 1}, 1.5])
def test_end_tokens_that_are_none_are_refused(folder, value):
    edited(folder, "config.json", eos_token_id=value)
    with pytest.raises(ModelFolderError, match="eos_token_id: expected ids below 320"):
        engine.load_model(folder)


def test_another_template_is_another_identity(trained):
    other = engine.load_model(TRAINED, chat_template=HERMES)
    assert other.render_chat(HI) == "hi<tool_call>None tool_call.name"
    ours, theirs = trained.identity("t"), other.identity("t")
    assert ours.chat_template_digest != theirs.chat_template_digest
    assert ours.tokenizer_digest == theirs.tokenizer_digest
    same = engine.load_model(TRAINED, chat_template=(TRAINED / "chat_template.jinja").read_text())
    assert same.identity("t") == ours
    assert (trained.takes_tools, other.takes_tools) == (False, True)
    assert trained.reply_marks == ReplyMarks()
    assert other.reply_marks == ReplyMarks(tool_start="<tool_call>", tool_end="</tool_call>")
    (call,) = other.parse_tool_call('{"name": "f", "arguments": {"é": 1}}')
    assert (call.name, call.arguments, call.call_id) == ("f", '{"é": 1}', "")


def test_a_template_that_is_none_is_refused_when_it_is_loaded(folder):
    with pytest.raises(ModelFolderError, match="chat_template: "):
        engine.load_model(folder, chat_template="{% for m %}")


def test_without_a_template_a_plain_form_is_used(folder):
    (folder / "chat_template.jinja").unlink()
    model = engine.load_model(folder)
    assert not model.has_chat_template and not model.takes_tools
    assert model.identity("t").chat_template_digest == bytes(32)
    messages = [
        {"role": "system", "content": "be brief"},
        *HI,
        {"role": "assistant", "content": "Hello"},
    ]
    text = model.render_chat(messages)
    assert text == (
        "<|begin|>### System\nbe brief\n\n### User\nhi\n\n### Assistant\nHello<|end|>\n\n"
        "### Assistant\n"
    )
    # An answer stands, when it is rendered again, where it was generated.
    asked = model.render_chat(messages[:2])
    assert text.startswith(asked + "Hello<|end|>")
    assert model.encode(asked)[0] == 256


def test_options_reach_the_template_and_cannot_replace_its_input():
    template = "{{ mood }}|{{ messages | length }}"
    model = engine.load_model(TRAINED, chat_template=template)
    assert model.render_chat(HI, options={"mood": "glad"}) == "glad|1"
    for name in ("messages", "tools", "chat_template", "tokenize", "add_generation_prompt"):
        with pytest.raises(ChatTemplateError, match="is reserved"):
            model.render_chat(HI, options={name: "x"})


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no ' ~ messages[0].content) }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.more }}",
        "{{ messages[5].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_what_a_template_cannot_write_is_one_error_without_the_text(folder, template):
    model = engine.load_model(folder, chat_template=template)
    with pytest.raises(ChatTemplateError) as refused:
        model.render_chat([{"role": "user", "content": "secret"}])
    assert str(refused.value) == "the chat template refuses these messages"
    assert refused.value.detail


def test_what_is_no_tool_call_is_one_error(trained):
    model = engine.load_model(TRAINED, chat_template=HERMES)
    for text in ("", "x", "[]", "{}", '{"name": "f", "arguments": 1}', "[" * 200_000):
        with pytest.raises(ToolCallError):
            model.parse_tool_call(text)
    with pytest.raises(LimitError):
        model.parse_tool_call(" " * (TOOL_CALL_CHARACTERS_MAX + 1))
    with pytest.raises(ToolCallError, match="no form for tool calls"):
        trained.parse_tool_call('{"name": "f", "arguments": {}}')


def test_a_settled_tokenizer_is_never_changed_again(tmp_path, trained):
    """A tokenizer's file may ask for truncation: left in place, the first of several threads to
    encode would change what the others use."""
    folder = tmp_path / "model"
    shutil.copytree(TRAINED, folder)
    truncation = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    edited(folder, "tokenizer.json", truncation=truncation)
    model = engine.load_model(folder)
    inner = model._parts.tokenizer.backend_tokenizer
    before = inner.to_str()
    assert inner.truncation is None
    texts = ["word 🙂 " * count for count in (1, 50, 400)]
    expected = [trained.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda turn: model.encode(texts[turn % 3]), range(90)))
    assert found == expected * 30
    model.render_chat(HI)
    model.decode(expected[0])
    assert inner.to_str() == before
