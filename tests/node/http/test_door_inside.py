"""The door of a node in this process: health, counters that fail, pings, pages of others."""

from __future__ import annotations

import asyncio
import json
import threading

from harness import ask, code, web_node, within

from node.errors import NodeBusyError
from node.http import sse
from node.http.auth import add_key
from node.http.door import Served
from node.http.hangup import ClientGone, unless_gone
from node.serving.options import ServingOptions

NIGHT = {"messages": [{"role": "user", "content": "It was a dark night and"}], "max_tokens": 2}


def chat(web, **options):
    body = json.dumps({**NIGHT, **options}).encode()
    return asyncio.to_thread(ask, f"{web.v1}/chat/completions", "POST", body)


def test_an_uncertain_engine_is_told_and_nothing_more_is_served(tmp_path, model_dir):
    async def work():
        async with web_node(tmp_path / "data", model_dir) as web:
            assert (await chat(web))[0] == 200
            web.serving.floor.health.latch(RuntimeError("secret text"))
            answer = await asyncio.to_thread(ask, f"{web.base_url}/health")
            assert (answer[0], code(answer)) == (503, "unhealthy")
            refused = await chat(web)
            assert (refused[0], code(refused)) == (503, "unhealthy")
            assert b"secret" not in answer[2] + refused[2]

    within(work())


def test_no_request_feels_a_counter_that_fails(tmp_path, model_dir):
    async def work():
        async with web_node(tmp_path / "data", model_dir) as web:
            door, seen = web.node.entrance.door, []

            def fails(_):
                raise ValueError("counting went wrong")

            door.observers[:0] = [fails, seen.append]
            door.refusal_observers[:0] = [fails]
            assert (await chat(web))[0] == 200
            assert (await chat(web, n=3))[0] == 400
            assert [type(one) for one in seen] == [Served, Served]
            assert [one.status for one in seen] == [200, 400]
            assert {one.route for one in seen} == {"/v1/chat/completions"}

    within(work())


def test_who_waits_for_a_slot_hears_something_now_and_then(tmp_path, monkeypatch):
    # Of sixty tokens two take longer than this on any machine.
    monkeypatch.setattr(sse, "PING_S", 0.005)

    async def work():
        async with web_node(tmp_path / "data", serving=ServingOptions(slots=1)) as web:
            long = chat(web, max_tokens=60, ignore_eos=True)
            first = asyncio.create_task(long)
            while not web.serving.floor.counts.generated_tokens:
                await asyncio.sleep(0.01)
            waited = await chat(web, stream=True)
            assert waited[2].count(b": waiting\n\n") >= 2
            assert waited[2].endswith(b"data: [DONE]\n\n")
            assert (await first)[0] == 200

    within(work(), 90)


def test_pages_that_were_allowed_may_call_and_others_may_not(tmp_path, model_dir):
    ours, others = "https://app.example", "https://evil.example"

    async def work():
        async with web_node(tmp_path / "data", model_dir, allowed_origins=(ours,)) as web:
            url = f"{web.v1}/models"

            def called(origin, method="GET", **headers):
                return asyncio.to_thread(ask, url, method, None, Origin=origin, **headers)

            allowed = await called(ours)
            assert allowed[0] == 200 and allowed[1]["Access-Control-Allow-Origin"] == ours
            preflight = {"Access-Control-Request-Method": "POST"}
            assert (await called(ours, "OPTIONS", **preflight))[0] == 200
            assert (await called(others, "OPTIONS", **preflight))[0] == 400
            refused = await called(others)
            assert (refused[0], code(refused)) == (403, "origin_refused")

    within(work())


def test_every_answer_has_a_name_and_is_no_page_by_guess(tmp_path, model_dir):
    async def work():
        async with web_node(tmp_path / "data", model_dir) as web:
            names = set()
            for path in ("/health", "/v1/models", "/v1/models/none"):
                _, headers, _ = await asyncio.to_thread(ask, web.base_url + path)
                assert headers["X-Content-Type-Options"] == "nosniff"
                names.add(headers["X-Request-Id"])
            assert len(names) == 3

    within(work())


def test_work_for_a_client_that_goes_is_cancelled_and_an_error_of_it_is_told():
    async def work():
        leave = asyncio.Event()
        ended = []

        async def receive():
            await leave.wait()
            return {"type": "http.disconnect"}

        async def long():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("long")

        async def fails():
            raise ValueError("told")

        async def gives():
            return 7

        assert await unless_gone(receive, gives()) == 7
        try:
            await unless_gone(receive, fails())
        except ValueError as error:
            ended.append(str(error))
        leaving = asyncio.create_task(unless_gone(receive, long()))
        await asyncio.sleep(0)
        leave.set()
        try:
            await leaving
        except ClientGone:
            ended.append("gone")
        assert ended == ["told", "long", "gone"]

    within(work(), 10)


def test_what_feeds_a_stream_is_told_also_where_the_stream_was_never_begun(monkeypatch):
    monkeypatch.setattr(sse, "WRITE_S", 0.05)

    async def work():
        told = []

        async def events():
            told.append("begun")
            yield b"data: 1\n\n"

        async def never(*_):
            await asyncio.sleep(60)

        stream = sse.EventStream(events(), closing=lambda: told.append("closed"))
        try:
            await stream({"type": "http"}, never, never)
        except ClientGone:
            told.append("gone")
        assert told == ["closed", "gone"]

    within(work(), 10)


def test_an_error_of_a_stream_is_its_last_event_and_says_nothing_it_should_not():
    async def work():
        sent = []

        async def events(error):
            yield b"data: 1\n\n"
            raise error

        async def receive():
            await asyncio.sleep(60)

        async def send(message):
            sent.append(message.get("body", b""))

        for error, word in (
            (NodeBusyError("full"), b'"code":"busy"'),
            (ValueError("secret"), b'"code":"internal_error"'),
        ):
            sent.clear()
            await sse.EventStream(events(error))({"type": "http"}, receive, send)
            assert sent[1] == b"data: 1\n\n" and word in sent[2] and sent[3] == b""
            assert b"secret" not in b"".join(sent)

    within(work(), 10)


def test_an_error_of_a_route_says_nothing_of_a_text_in_the_log(tmp_path, model_dir, caplog):
    """uvicorn itself would log its words."""
    secret = "what somebody wrote"

    def breaks(_name):
        raise RuntimeError(secret)

    async def work():
        async with web_node(tmp_path / "data", model_dir) as web:
            web.serving.tenants.prepare = breaks
            return await chat(web)

    answer = within(work())
    assert (answer[0], code(answer)) == (500, "internal_error")
    assert secret.encode() not in answer[2] and secret not in caplog.text
    said = "/v1/chat/completions: an error of this program: RuntimeError at "
    assert caplog.text.count(said) == 1


def test_a_new_tenants_key_is_not_written_on_the_loop(tmp_path, model_dir):
    keys = tmp_path / "api-keys"
    key = add_key(keys, "alice")
    threads = []

    async def work():
        async with web_node(tmp_path / "data", model_dir, api_key_file=keys) as web:
            tenant_keys = web.serving.tenants._keys
            plain = tenant_keys.key

            def seen(tenant):
                threads.append((tenant, threading.get_ident()))
                return plain(tenant)

            tenant_keys.key = seen
            body, url = json.dumps(NIGHT).encode(), f"{web.v1}/chat/completions"
            headers = {"Authorization": f"Bearer {key}"}
            asked = [asyncio.to_thread(ask, url, "POST", body, **headers) for _ in range(2)]
            return [answer[0] for answer in await asyncio.gather(*asked)]

    assert within(work()) == [200, 200]
    # Once, though two came at once; and not where everybody would wait for it.
    assert [tenant for tenant, _ in threads] == ["alice"]
    assert threads[0][1] != threading.get_ident()
    assert (tmp_path / "data" / "keys" / "alice.key").exists()
