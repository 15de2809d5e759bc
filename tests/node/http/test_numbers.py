"""What a restart, an edit and hang-ups may cost, counted over HTTP on real nodes.

``python -m bench.serving`` measures the same on the trained model, with times.
"""

from __future__ import annotations

import asyncio
import random

import harness
import openai
import pytest

from node.serving.options import ServingOptions
from node.serving.slots import SlotState

WINDOW = 16
SLACK = 16
TOKENS = 8


def talk(node, messages, **more):
    """``(answer, kvpack, prompt tokens)`` of one turn."""
    with openai.OpenAI(base_url=node.v1, api_key="none", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(
            model="default_model", messages=messages, max_tokens=TOKENS,
            extra_body={"ignore_eos": True}, **more,
        )  # fmt: skip
    return answer.choices[0].message.content, answer.kvpack, answer.usage.prompt_tokens


def metric(node, name):
    body = harness.ask(f"{node.base_url}/metrics")[2].decode()
    lines = [line for line in body.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def settled(node):
    harness.until(lambda: metric(node, "kvpack_cuts_pending") == 0, 30, 0.1)


def test_after_kill_9_only_what_is_new_is_computed_and_after_an_edit_only_the_edit(
    tmp_path, model_dir
):
    messages, known = [], 0
    with harness.served(tmp_path / "data", model=model_dir) as node:
        while known < 20 * WINDOW:
            messages.append({"role": "user", "content": f"Turn {len(messages)}: " + "the sea " * 8})
            text, _, prompt = talk(node, messages)
            messages.append({"role": "assistant", "content": text})
            known = prompt + TOKENS
        settled(node)
        node.kill()

    def turn(text):
        return [*messages, {"role": "user", "content": text}]

    with harness.served(tmp_path / "data", model=model_dir) as node:
        first, reuse, prompt = talk(node, turn("And then?"))
        assert reuse["rung"] == "durable"
        assert reuse["evaluated_tokens"] <= prompt - known + SLACK
        _, reuse, prompt = talk(node, turn("No: who came to the door?"))
        assert reuse["evaluated_tokens"] <= prompt - known + SLACK
        # Warm again, and no token of it differs.
        assert talk(node, turn("And then?"))[0] == first
        _, reuse, _ = talk(node, [{"role": "user", "content": "Unrelated: 1 2 3 4 5 6 7 8 9"}])
        assert (reuse["cached_tokens"], reuse["rung"], reuse["miss"]) == (0, "none", "cold")


@pytest.mark.parametrize("requests", [24, pytest.param(60, marks=pytest.mark.slow)])
def test_requests_a_third_of_them_cancelled_leave_every_slot_and_every_count(
    tmp_path, model_dir, requests
):
    draws = random.Random(11)

    async def one(client, index):
        stops_after = draws.randrange(TOKENS) if draws.random() < 1 / 3 else None
        words = [{"role": "user", "content": f"{index % 40} " * draws.randrange(2, 30)}]
        stream = await client.chat.completions.create(
            model="default_model", messages=words, max_tokens=TOKENS, stream=True
        )
        async with stream:
            told = 0
            async for _ in stream:
                told += 1
                if stops_after is not None and told > stops_after:
                    break

    async def work():
        options = ServingOptions(slots=3, cache_bytes=1 << 20)
        async with (
            harness.web_node(tmp_path / "data", model_dir, options) as web,
            openai.AsyncOpenAI(base_url=web.v1, api_key="none", max_retries=0) as client,
        ):
            waiting = iter(range(requests))

            async def some():
                for index in waiting:
                    await one(client, index)

            await asyncio.gather(*(some() for _ in range(6)))
            floor, counts = web.serving.floor, web.serving.floor.counts
            async with asyncio.timeout(20):
                while any(slot.state is not SlotState.IDLE for slot in floor.status().slots):
                    await asyncio.sleep(0.02)
            ended = counts.finished + counts.cancelled + counts.stalled + counts.failed
            assert counts.submitted == ended == requests
            assert (counts.stalled, counts.failed, counts.refused) == (0, 0, 0)
            assert counts.cancelled <= requests // 2
            assert floor.status().waiting == 0
            await web.serving.ladder.settled()
            accounts = web.serving.ladder.accounts
            assert web.serving.ladder.pending == web.serving.ladder.pending_bytes == 0
            assert accounts.published > 0
            assert sum(counts.cached_tokens.values()) + counts.evaluated_tokens == (
                counts.prompt_tokens
            )

    harness.within(work(), 100)
