"""What a conversation is refused with, or loses, where it is longer than the context."""

from __future__ import annotations

import harness
import openai

from node.serving.options import ContextPolicy, ServingOptions

NEWEST = {"role": "user", "content": "And then?"}
TURNS = [
    {"role": role, "content": f"{index} " + "the old house stood " * 12}
    for index in range(4)
    for role in ("user", "assistant")
]
LONG = [{"role": "system", "content": "Be brief."}, *TURNS, NEWEST]


def asked(data_dir, policy, *conversations):
    """What each conversation is answered or refused with, by a node with a context of 256."""

    async def one(client, messages):
        try:
            return await client.chat.completions.create(
                model="default_model", messages=messages, max_tokens=8
            )
        except openai.BadRequestError as error:
            return error

    async def all_of_them():
        options = ServingOptions(max_context=256, context_policy=policy)
        async with (
            harness.web_node(data_dir, serving=options) as web,
            openai.AsyncOpenAI(base_url=web.v1, api_key="x", max_retries=0) as client,
        ):
            return [await one(client, messages) for messages in conversations]

    return harness.within(all_of_them())


def test_a_long_conversation_loses_its_oldest_turns_and_the_same_ones_next_time(tmp_path):
    first, again, huge = asked(
        tmp_path / "data",
        ContextPolicy.SHIFT,
        LONG,
        LONG,
        [{"role": "user", "content": "far too long " * 200}],
    )
    assert first.kvpack["dropped_turns"] >= 1
    assert first.usage.prompt_tokens + 8 <= 256
    assert again.kvpack["dropped_turns"] == first.kvpack["dropped_turns"]
    assert again.usage.prompt_tokens == first.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
    assert (huge.code, huge.param) == ("context_length_exceeded", "messages")
    assert "256" in str(huge) and "far" not in str(huge)


def test_the_other_policy_refuses_it_and_says_by_how_much(tmp_path):
    refused, answered = asked(tmp_path / "data", ContextPolicy.ERROR, LONG, [NEWEST])
    assert (refused.code, refused.param) == ("context_length_exceeded", "messages")
    assert "256" in str(refused)
    assert answered.usage.completion_tokens >= 1
