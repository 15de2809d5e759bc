"""Answers whose tokens are set: tools that are called, and characters split over tokens.

All of a real node runs; only which token is chosen is not the model's.
"""

from __future__ import annotations

import json

import harness
import openai
import pytest

from node.serving.options import ServingOptions

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
}
ASK = [{"role": "user", "content": "1+1?"}]

#: mlx-lm reads calls in this form as ``json_tools``.
TOOLS_TEMPLATE = r"""
{%- if tools -%}{{ '<|system|>' }}{%- for tool in tools -%}
{{ tool | tojson ~ '\n' }}{%- endfor -%}{{ '<|end|>' }}{%- endif -%}
{%- for message in messages -%}
{{ '<|user|>' if message.role == 'tool' else '<|' ~ message.role ~ '|>' }}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}{%- set tool_call = call.function -%}
{{ '<tool_call>\n{"name": "' ~ tool_call.name ~ '", "arguments": ' ~
   tool_call.arguments | tojson ~ '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""


@pytest.fixture
def script(monkeypatch):
    """Tokens that are chosen, one after the other; then the model's own again."""
    from node import stream

    waiting: list[int] = []
    choose = stream._choose

    def chosen(sampler, logits):
        token, after = choose(sampler, logits)
        return (waiting.pop(0), after) if waiting else (token, after)

    monkeypatch.setattr(stream, "_choose", chosen)
    return waiting


def asked(data_dir, script, work, model=harness.TRAINED, template=None):
    """What ``work(create, model)`` gives: ``create(text or bytes, ...)`` is one answer."""

    async def all_of_it():
        options = ServingOptions(chat_template=template)
        async with (
            harness.web_node(data_dir, model, options) as web,
            openai.AsyncOpenAI(base_url=web.v1, api_key="x", max_retries=0) as client,
        ):
            loaded = web.serving.engine.model
            end = min(loaded.end_token_ids)

            async def create(said, messages=ASK, ends=True, **options):
                ids = list(said) if isinstance(said, bytes) else loaded.encode(said)
                script[:] = [*ids, *([end] if ends else [])]
                return await client.chat.completions.create(
                    model="default_model", messages=messages, **{"max_tokens": 200, **options}
                )

            return await work(create)

    return harness.within(all_of_it(), 100)


async def told(stream) -> list:
    return [chunk async for chunk in stream]


def joined(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


CALL = 'Let me add.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_a_tool_that_is_called_is_told_as_one_and_its_result_goes_on_exactly(tmp_path, script):
    async def work(create):
        first = await create(CALL, tools=[ADD])
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me add."
        (call,) = choice.message.tool_calls
        assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1}
        assert call.id and call.type == "function"
        chunks = await told(await create(CALL, tools=[ADD], stream=True))
        assert joined(chunks) == "Let me add."
        (delta,) = [c.choices[0].delta for c in chunks if c.choices[0].delta.tool_calls]
        assert delta.tool_calls[0].index == 0
        assert delta.tool_calls[0].function.arguments == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        sent_back = choice.message.model_dump(exclude_none=True)
        second = await create("Two.", [*ASK, sent_back, result], tools=[ADD])
        assert second.choices[0].message.content == "Two."
        # All but the tokens of the result and of the form around it stood in the rows.
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached >= first.usage.total_tokens - 1
        without = await create("No.", tools=[ADD], tool_choice="none")
        assert without.usage.prompt_tokens < first.usage.prompt_tokens
        listed = (await create("Hi there.", logprobs=True)).choices[0]
        spelled = b"".join(bytes(entry.bytes) for entry in listed.logprobs.content)
        # The token that ended the answer is no part of it.
        assert spelled.decode() == listed.message.content == "Hi there."
        plain = await create(CALL)
        assert plain.choices[0].message.content == CALL and not plain.choices[0].message.tool_calls

    asked(tmp_path / "data", script, work, template=TOOLS_TEMPLATE)


def test_tools_are_refused_where_the_template_writes_none(tmp_path, script):
    async def work(create):
        with pytest.raises(openai.BadRequestError) as caught:
            await create("x", tools=[ADD])
        assert caught.value.param == "tools"

    asked(tmp_path / "data", script, work)


TEXTS = ("\U0001f600 ok", "\U0001f468\u200d\U0001f469\u200d\U0001f467!", "漢字かな", "שלום")


def test_characters_split_over_tokens_are_told_whole_streamed_or_not(tmp_path, script, model_dir):
    """A token of the tiny model is one byte."""

    async def work(create):
        for text in TEXTS:
            data = text.encode()
            whole = await create(data)
            chunks = await told(await create(data, stream=True))
            assert whole.choices[0].message.content == joined(chunks) == text
            assert not any("\ufffd" in (c.choices[0].delta.content or "") for c in chunks)
            # Cut in the middle of its first character: that becomes one replacement character.
            cut = await create(data[:1], ends=False, max_tokens=1)
            halved = await told(await create(data[:1], ends=False, max_tokens=1, stream=True))
            assert cut.choices[0].message.content == joined(halved) == "\ufffd"
            assert cut.choices[0].finish_reason == "length"

    asked(tmp_path / "data", script, work, model_dir)


def test_stop_strings_over_tokens_and_characters_and_the_turn_after(tmp_path, script, model_dir):
    async def work(create):
        for said, stop, expected in (
            ("aaab!", "aab", "a"),
            ("one END two", "END", "one "),
            ("half EN", "END", "half EN"),
            ("smile \U0001f600.", "\U0001f600", "smile "),
            ("x" * 9 + "123456789tail", ["nope", "123456789"], "x" * 9),
            ("left right", ["right", "left right"], ""),  # The longest of two that end at once.
        ):
            whole = await create(said.encode(), stop=stop)
            streamed = joined(await told(await create(said.encode(), stop=stop, stream=True)))
            assert whole.choices[0].message.content == streamed == expected, said
            script.clear()
            back = [*ASK, {"role": "assistant", "content": expected}, ASK[0]]
            warm = await create(b"yes", back)
            cold = await create(b"yes", back, extra_body={"cache_prompt": False})
            assert warm.usage.prompt_tokens == cold.usage.prompt_tokens
            assert warm.usage.prompt_tokens_details.cached_tokens > 0

    asked(tmp_path / "data", script, work, model_dir)
