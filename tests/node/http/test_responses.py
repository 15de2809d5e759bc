"""``/v1/responses`` with the real SDK against a real node process."""

from __future__ import annotations

import json
import threading

import harness
import httpx2
import openai
import pytest

FIELDS = {"model": "default_model", "max_output_tokens": 10}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """One node process for all of these: they look at different responses."""
    with harness.served(tmp_path_factory.mktemp("responses") / "data") as served:
        yield served


@pytest.fixture
def client(node):
    with openai.OpenAI(base_url=node.v1, api_key="none", max_retries=0) as made:
        yield made


def refused(call, status):
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    assert caught.value.status_code == status, caught.value.message
    return caught.value


def test_answer_is_kept_as_it_was_given_and_forgotten_when_deleted(client):
    made = client.responses.create(**FIELDS, input="Who are you?", metadata={"for": "a test"})
    assert (made.status, made.object, made.metadata) == (
        "incomplete",
        "response",
        {"for": "a test"},
    )
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage.output_tokens == 10
    assert made.usage.total_tokens == made.usage.input_tokens + 10
    assert client.responses.retrieve(made.id) == made
    (item,) = client.responses.input_items.list(made.id)
    assert (item.role, item.content[0].text) == ("user", "Who are you?")
    client.responses.delete(made.id)
    assert refused(lambda: client.responses.retrieve(made.id), 404).code == "record_not_found"
    assert refused(lambda: client.responses.delete(made.id), 404)


def test_chain_computes_only_what_is_new_and_a_fork_is_a_point_of_its_own(client):
    first = client.responses.create(**FIELDS, input="The sea was calm that night. " * 8)
    asked = {**FIELDS, "previous_response_id": first.id}
    second = client.responses.create(**asked, input="And then?")
    # The same question again from the same point, after the chain went on: the same answer.
    client.responses.create(**FIELDS, previous_response_id=second.id, input="Go on.")
    fork = client.responses.create(**asked, input="And then?")
    assert fork.output_text == second.output_text
    assert fork.id != second.id
    for made in (second, fork):
        assert made.usage.input_tokens > first.usage.input_tokens
        cached = made.usage.input_tokens_details.cached_tokens
        assert cached >= first.usage.total_tokens - 1
        assert made.usage.input_tokens - cached <= 16


def test_chain_equals_the_same_messages_in_one_request(client):
    first = client.responses.create(**FIELDS, input="Who are you?")
    second = client.responses.create(**FIELDS, previous_response_id=first.id, input="Go on.")
    items = [
        {"role": "user", "content": "Who are you?"},
        *[item.to_dict() for item in first.output],
        {"role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ]
    whole = client.responses.create(**FIELDS, input=items)
    assert whole.output_text == second.output_text
    assert whole.usage.input_tokens == second.usage.input_tokens
    # What is deleted is no place to begin from; what began there goes on.
    client.responses.delete(first.id)
    error = refused(
        lambda: client.responses.create(**FIELDS, previous_response_id=first.id, input="x"), 404
    )
    assert (error.code, error.param) == ("previous_response_not_found", "previous_response_id")
    assert client.responses.create(**FIELDS, previous_response_id=second.id, input="x").id


def test_instructions_are_for_one_answer_alone(client):
    told = {"instructions": "Answer like a sailor who has been at sea for many years."}
    first = client.responses.create(**FIELDS, input="Who are you?", **told)
    bare = client.responses.create(**FIELDS, input="Who are you?")
    assert first.usage.input_tokens > bare.usage.input_tokens
    chain = client.responses.create(**FIELDS, previous_response_id=first.id, input="Go on.")
    items = [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on."},
    ]
    without = client.responses.create(**FIELDS, input=items, store=False)
    assert chain.output_text == without.output_text
    again = client.responses.create(**FIELDS, previous_response_id=first.id, input="Go on.", **told)
    assert again.usage.input_tokens > chain.usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


def test_what_is_not_stored_leaves_nothing(client, node):
    secret = "the unrepeatable word is quillhammer"
    made = client.responses.create(**FIELDS, input=secret, store=False)
    refused(lambda: client.responses.retrieve(made.id), 404)
    refused(lambda: client.responses.create(**FIELDS, previous_response_id=made.id, input="x"), 404)
    for path in node.data_dir.iterdir():
        if path.is_file():
            assert b"quillhammer" not in path.read_bytes(), path.name
    kept = client.responses.create(**FIELDS, input=secret)
    assert any(
        b"quillhammer" in path.read_bytes() for path in node.data_dir.glob("records.sqlite*")
    )
    client.responses.delete(kept.id)
    for path in node.data_dir.glob("records.sqlite*"):
        assert b"quillhammer" not in path.read_bytes(), path.name


def test_stream_tells_every_event_once_and_says_what_the_whole_answer_says(client):
    asked = {**FIELDS, "input": "Who are you?", "include": ["message.output_text.logprobs"]}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", *["response.output_text.delta"] * len(deltas),
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert "".join(event.delta for event in deltas) == last.output_text == whole.output_text
    assert last.id == events[0].response.id
    assert {event.item_id for event in deltas} == {last.output[0].id}
    assert client.responses.retrieve(last.id) == last
    logprobs = whole.output[0].content[0].logprobs
    assert len(logprobs) == 10
    assert "".join(one.token for one in logprobs) == whole.output_text
    assert all(one.logprob <= 0 for one in logprobs)
    assert [one.token for event in deltas for one in event.logprobs] == [
        one.token for one in logprobs
    ]


def test_retry_with_a_key_is_told_what_was_answered(client):
    asked = {**FIELDS, "input": "Who are you?"}
    key = {"Idempotency-Key": "the-first-one"}
    made = client.responses.create(**asked, extra_headers=key)
    again = client.responses.with_raw_response.create(**asked, extra_headers=key)
    assert again.parse() == made
    assert again.headers["x-idempotent-replay"] == "true"
    streamed = list(client.responses.create(**asked, extra_headers=key, stream=False).output)
    assert streamed == made.output
    other = {**asked, "input": "Who am I?"}
    error = refused(lambda: client.responses.create(**other, extra_headers=key), 409)
    assert error.code == "conflict"
    assert error.response.headers["x-should-retry"] == "false"
    without = client.responses.create(**asked)
    assert without.id != made.id
    refused(lambda: client.responses.create(**asked, extra_headers={"Idempotency-Key": ""}), 400)


def test_retry_while_the_request_still_runs_is_told_to_wait(client):
    asked = {**FIELDS, "input": "Tell me all of it.", "max_output_tokens": 120, "stream": True}
    key = {"Idempotency-Key": "a-long-one"}
    stream = client.responses.create(**asked, extra_headers=key)
    next(iter(stream))
    error = refused(lambda: client.responses.create(**asked, extra_headers=key), 409)
    assert error.code == "busy"
    assert error.response.headers["x-should-retry"] == "true"
    # Whoever asks again after the first one hung up runs it: nothing was answered.
    stream.close()
    patient = client.with_options(max_retries=5)
    last = list(patient.responses.create(**asked, extra_headers=key))[-1].response
    assert last.usage.output_tokens > 0
    # And a stream that is asked for again is the same answer, told once more.
    replay = list(client.responses.create(**asked, extra_headers=key))
    assert replay[-1].response == last
    assert [event.sequence_number for event in replay] == list(range(len(replay)))
    text = "".join(e.delta for e in replay if e.type == "response.output_text.delta")
    assert text == last.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"extra_body": {"expected_revision": 1}}, "expected_revision"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"model": "another"}, "model"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(client, fields, param):
    asked = {**FIELDS, "input": "x", **fields}
    error = refused(lambda: client.responses.create(**asked), 404 if param == "model" else 400)
    assert error.param == param


def test_harmless_fields_are_ignored(client):
    made = client.responses.create(
        **FIELDS, input="x", user="u", safety_identifier="s", prompt_cache_key="k",
        service_tier="auto", parallel_tool_calls=False, max_tool_calls=3, tool_choice="auto",
        extra_body={"some_new_field": {"a": [1]}},
    )  # fmt: skip
    assert made.user == "u"


def test_temperature_and_seed_give_the_same_text_again(client):
    asked = {**FIELDS, "input": "Tell me of the sea.", "temperature": 0.8}
    texts = [client.responses.create(**asked, extra_body={"seed": 7}).output_text for _ in "ab"]
    assert texts[0] == texts[1]
    others = {
        client.responses.create(**asked, extra_body={"seed": s}).output_text for s in (1, 2, 3, 4)
    }
    assert len(others | {texts[0]}) > 1


def test_hang_up_ends_the_answer_and_frees_its_slot(client):
    for cut in (0, 1, 4):
        stream = client.responses.create(
            **{**FIELDS, "max_output_tokens": 400}, input="Tell me all.", stream=True
        )
        for _, _event in zip(range(cut), stream, strict=False):
            pass
        stream.close()

    # Both slots are free again: more answers than there are slots are made after as many ended.
    assert client.responses.create(**FIELDS, input="Who are you?").output_text


def test_several_at_once_each_get_their_own(client):
    asked = ["Who are you?", "The sea was", "Once upon a time", "Good evening, said"]
    alone = [client.responses.create(**FIELDS, input=one).output_text for one in asked]
    found = {}

    def ask(index):
        found[index] = client.responses.create(**FIELDS, input=asked[index]).output_text

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[index] for index in range(len(asked))] == alone


def test_curl_reads_it_too(node):
    with httpx2.Client() as web:
        made = web.post(f"{node.v1}/responses", json={"input": "x", "max_output_tokens": 2}).json()
        assert made["output"][0]["content"][0]["type"] == "output_text"
        cancelled = web.post(f"{node.v1}/responses/{made['id']}/cancel")
        assert cancelled.status_code == 400
        assert json.loads(cancelled.text)["error"]["code"] == "not_in_background"
