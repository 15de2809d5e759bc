"""A node that is told to stop: what runs is finished, nothing is begun, nothing is forgotten."""

from __future__ import annotations

import json
import signal
import threading
import time

import harness
import openai
import pytest
from harness import ask, code

NIGHT = [{"role": "user", "content": "It was a dark night and"}]


def streaming(node, max_tokens: int):
    client = openai.OpenAI(base_url=node.v1, api_key="x", max_retries=0, timeout=60)
    return client.chat.completions.create(
        model="default_model",
        messages=NIGHT,
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def body(**options) -> bytes:
    return json.dumps({"messages": NIGHT, "max_tokens": 2, **options}).encode()


def test_a_running_answer_ends_whole_while_new_ones_are_sent_away(tmp_path):
    with harness.served(tmp_path / "data") as node:
        stream = streaming(node, 90)
        first = next(stream)
        node.process.send_signal(signal.SIGTERM)

        def draining():
            answer = ask(f"{node.base_url}/health")
            return answer if answer[0] == 503 else None

        assert code(harness.until(draining)) == "draining"
        refused = ask(f"{node.v1}/chat/completions", "POST", body())
        assert (refused[0], code(refused)) == (503, "draining")
        assert int(refused[1]["Retry-After"]) >= 1
        chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert sum(1 for chunk in chunks if chunk.choices[0].delta.content) > 50
        assert node.process.wait(harness.STOP_S) == 0


def test_an_answer_that_takes_too_long_ends_with_an_event_that_says_so(tmp_path):
    with harness.served(tmp_path / "data", "--drain", "0.3") as node:
        stream = streaming(node, 6000)
        next(stream)
        stopped = threading.Timer(0.2, node.process.send_signal, (signal.SIGTERM,))
        stopped.start()
        with pytest.raises(openai.APIError) as caught:
            for _ in stream:
                pass
        assert caught.value.code == "draining"
        started = time.monotonic()
        assert node.process.wait(harness.STOP_S) == 0
        assert time.monotonic() - started < harness.STOP_S


def test_a_prompt_that_was_computed_before_a_kill_is_not_computed_again(tmp_path):
    """The cuts of an answer are durable; so are the exact ids of what the client sends back."""
    data = tmp_path / "data"
    with harness.served(data) as node:
        client = openai.OpenAI(base_url=node.v1, api_key="x", max_retries=0, timeout=60)
        said = client.chat.completions.create(model="default_model", messages=NIGHT, max_tokens=24)
        conversation = [
            *NIGHT,
            {"role": "assistant", "content": said.choices[0].message.content},
            {"role": "user", "content": "And then?"},
        ]
        harness.settled(node)
        node.kill()
    with harness.served(data) as node:
        client = openai.OpenAI(base_url=node.v1, api_key="x", max_retries=0, timeout=60)
        warm = client.chat.completions.create(
            model="default_model", messages=conversation, max_tokens=12
        )
        cold = client.chat.completions.create(
            model="default_model",
            messages=conversation,
            max_tokens=12,
            extra_body={"cache_prompt": False},
        )
    new = warm.usage.prompt_tokens - said.usage.total_tokens
    assert warm.kvpack["rung"] == "durable"
    assert warm.kvpack["evaluated_tokens"] <= new + 16
    assert warm.choices[0].message.content == cold.choices[0].message.content
