"""Chat and completions by the real ``openai`` SDK, against a real node in a process of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess

import harness
import openai
import pytest

NIGHT = [{"role": "user", "content": "It was a dark night and"}]


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with harness.served(tmp_path_factory.mktemp("chat") / "data") as running:
        yield running


@pytest.fixture
def client(node):
    with openai.OpenAI(base_url=node.v1, api_key="unused", max_retries=0, timeout=30) as found:
        yield found


def chat(client, messages=NIGHT, **options):
    return client.chat.completions.create(
        model="muse-novels-6m", messages=messages, **{"max_tokens": 8, **options}
    )


def joined(stream) -> str:
    return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


def refusal(client, **options):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    return caught.value


def test_an_answer_is_the_same_whole_and_streamed_and_says_what_it_took(client):
    whole = chat(client)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens == 8
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    last = chunks[-1].usage
    assert (last.prompt_tokens, last.completion_tokens) == (whole.usage.prompt_tokens, 8)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_include_usage_has_none(client):
    assert all(chunk.usage is None and chunk.choices for chunk in chat(client, stream=True))


def test_an_answer_sent_back_is_not_computed_again(client):
    """Usage counts are those of a cold run; only cached_tokens tells that it was warm."""
    first = chat(client, max_tokens=24)
    messages = [
        *NIGHT,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    warm = chat(client, messages)
    cold = chat(client, messages, extra_body={"cache_prompt": False})
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert cold.kvpack["miss"] == "disabled"
    assert warm.usage.prompt_tokens == cold.usage.prompt_tokens
    cached = warm.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens + 24 - 1
    assert warm.kvpack["rung"] in ("current", "resident", "durable")
    assert warm.kvpack["evaluated_tokens"] == warm.usage.prompt_tokens - cached <= 16
    assert warm.choices[0].message.content == cold.choices[0].message.content


def test_the_helper_of_the_sdk_for_streams_reads_ours(client):
    full = chat(client).choices[0].message.content
    with client.chat.completions.stream(
        model="muse-novels-6m", messages=NIGHT, max_tokens=8, stop=full[12:]
    ) as stream:
        final = stream.until_done().get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == full[:12]


def test_an_unpinned_seed_differs_and_a_pinned_one_does_not(client):
    def told(seed):
        return chat(client, temperature=0.8, seed=seed, max_tokens=12).choices[0].message.content

    assert told(7) == told(7) != told(8)
    assert told(-1) == told(2**64 - 1)
    free = {chat(client, temperature=1.5, max_tokens=12).choices[0].message.content for _ in "ab"}
    assert len(free) == 2


def test_logprobs_are_those_of_the_tokens_told(client):
    whole = chat(client, logprobs=True, top_logprobs=3, max_tokens=8)
    entries = whole.choices[0].logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == whole.choices[0].message.content
    assert len(entries) == 8
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0  # Greedy: the most probable one is taken.
    told = [
        entry.logprob
        for chunk in chat(client, logprobs=True, max_tokens=8, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert told == [entry.logprob for entry in entries]
    assert chat(client).choices[0].logprobs is None


def test_no_part_of_a_stop_string_is_told_streamed_or_not(client):
    full = chat(client, max_tokens=14).choices[0].message.content
    for start, stop in enumerate((full[10:11], full[9:14], full[5:20])):
        expected = full[: full.index(stop)]
        whole = chat(client, max_tokens=14, stop=stop)
        assert whole.choices[0].message.content == expected, start
        assert whole.choices[0].finish_reason == "stop"
        assert joined(chat(client, max_tokens=14, stop=[stop, "QQ"], stream=True)) == expected
    near = full[9:14] + "\x01"
    assert joined(chat(client, max_tokens=14, stop=near, stream=True)) == full
    assert chat(client, max_tokens=14, stop=None).choices[0].message.content == full


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["fine", ""]}, "stop[1]"),
        ({"temperature": -1}, "sampling.temperature"),
        ({"top_p": 0}, "sampling.top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"extra_body": {"xtc_probability": 0.5}}, "xtc_probability"),
        ({"extra_body": {"grammar": "root ::= x"}}, "grammar"),
        ({"extra_body": {"adapters": "/tmp/x"}}, "adapters"),
        ({"extra_body": {"stream": "yes"}}, "stream"),
    ],
)
def test_what_would_change_the_answer_and_cannot_be_done_is_refused_by_name(client, options, param):
    error = refusal(client, **options)
    assert error.param == param, error
    assert error.type == "invalid_request_error" and error.code


def test_harmless_and_unknown_fields_are_ignored(client):
    plain = chat(client).choices[0].message.content
    told = chat(
        client, user="me", store=True, metadata={"a": "b"}, service_tier="auto", n=1,
        prompt_cache_key="k", presence_penalty=0, frequency_penalty=0,
        extra_body={"id_slot": 3, "num_draft_tokens": 3, "unheard": [1], "repetition_penalty": 0},
    )  # fmt: skip
    assert told.choices[0].message.content == plain


def test_penalties_and_biases_change_the_answer(client):
    plain = chat(client, max_tokens=24).choices[0].message.content
    assert chat(client, max_tokens=24, frequency_penalty=2).choices[0].message.content != plain
    forced = chat(client, max_tokens=3, logit_bias={"65": 100}, logprobs=True)
    assert len({entry.token for entry in forced.choices[0].logprobs.content}) == 1


def test_completions_go_on_from_text_and_from_ids(client):
    def complete(prompt, **options):
        return client.completions.create(
            model="muse-novels-6m", prompt=prompt, max_tokens=6, **options
        )

    whole = complete("It was a dark night and")
    assert whole.object == "text_completion" and whole.choices[0].text
    streamed = list(complete("It was a dark night and", stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    assert complete(["It was a dark night and"]).choices[0].text == whole.choices[0].text
    listed = complete("It was a dark night and", logprobs=2).choices[0].logprobs
    assert "".join(listed.tokens) == whole.choices[0].text
    assert listed.text_offset[:2] == [0, len(listed.tokens[0])]
    assert all(len(top) <= 2 for top in listed.top_logprobs)
    assert complete([5, 6, 7]).usage.prompt_tokens == 3
    for prompt, options in (
        (["a", "b"], {}), ("", {}), ([], {}), ([10**6], {}),
        ("a", {"echo": True}), ("a", {"suffix": "b"}), ("a", {"best_of": 2}), ("a", {"n": 2}),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError):
            complete(prompt, **options)


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=NIGHT)
    assert caught.value.code == "model_not_found"
    assert client.models.list().data[0].id == "muse-novels-6m"
    for name in ("default_model", str(harness.TRAINED)):
        told = client.chat.completions.create(model=name, messages=NIGHT, max_tokens=1)
        assert told.model == "muse-novels-6m"


def test_the_async_client_streams_several_at_once(node):
    async def one(client, index):
        stream = await client.chat.completions.create(
            model="muse-novels-6m", messages=NIGHT, max_tokens=8, stream=True, user=str(index)
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def several():
        async with openai.AsyncOpenAI(base_url=node.v1, api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, index) for index in range(5)))

    told = harness.within(several())
    assert len(set(told)) == 1 and told[0]


def test_curl_reads_a_stream_line_by_line(node):
    body = json.dumps({"messages": NIGHT, "max_tokens": 4, "stream": True})
    told = subprocess.run(
        ["curl", "-sN", "-m", "20", f"{node.v1}/chat/completions", "-d", body],
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    events = [part for part in told.split("\n\n") if part]
    assert events[-1] == "data: [DONE]"
    assert any(part.startswith(": prefill ") for part in events)
    data = [json.loads(part[6:]) for part in events[:-1] if part.startswith("data: ")]
    assert {one["object"] for one in data} == {"chat.completion.chunk"}
    assert data[-1]["choices"][0]["finish_reason"] == "length"
    assert data[-1]["kvpack"]["evaluated_tokens"] >= 1
