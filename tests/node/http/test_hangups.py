"""Clients that go away, that do not read, that are too many: no slot is lost for any of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import harness
import openai
import pytest

from node.http import sse
from node.serving.options import ServingOptions
from node.serving.slots import SlotState

NIGHT = [{"role": "user", "content": "It was a dark night and"}]
LONG = [{"role": "user", "content": "the old house stood by the sea and " * 80}]


def head(path: str, body: bytes) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", "", "")
    return "\r\n".join(lines).encode() + body


def asking(messages=NIGHT, **options) -> bytes:
    body = json.dumps({"messages": messages, "max_tokens": 400, "stream": True, **options})
    return head("/v1/chat/completions", body.encode())


@contextlib.asynccontextmanager
async def connection(web, request: bytes, limit: int = 1 << 16):
    host, port = web.base_url.removeprefix("http://").rsplit(":", 1)
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limit)
    wire.connect((host, int(port)))
    wire.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=wire, limit=limit)
    writer.write(request)
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def eventually(found, seconds: float = 40.0) -> None:
    async with asyncio.timeout(seconds):
        while not found():
            await asyncio.sleep(0.005)


async def all_idle(web, seconds: float = 40.0) -> None:
    """Wait until no slot works, and check that the floor's numbers agree."""
    floor = web.serving.floor

    def idle():
        view = floor.status()
        return not view.waiting and all(slot.state is SlotState.IDLE for slot in view.slots)

    await eventually(lambda: idle() and web.node.entrance.door.is_empty, seconds)
    assert floor.counts.submitted == floor.counts.ended


async def answered(web) -> str:
    async with openai.AsyncOpenAI(base_url=web.v1, api_key="x", max_retries=0) as client:
        told = await client.chat.completions.create(
            model="default_model", messages=NIGHT, max_tokens=4
        )
    return told.choices[0].message.content


async def read_until(reader, mark: bytes) -> None:
    seen = b""
    while mark not in seen:
        seen += await reader.readuntil(b"\n\n")


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_stops_wherever_its_client_goes(tmp_path, streams):
    async def work():
        async with harness.web_node(tmp_path / "data") as web:
            floor = web.serving.floor
            for messages, mark in (
                (NIGHT, None),
                (LONG, b": prefill" if streams else None),
                (NIGHT, b'"content":"' if streams else None),
            ):
                before = floor.counts.generated_tokens
                async with connection(web, asking(messages, stream=streams)) as (reader, _):
                    if mark is not None:
                        await read_until(reader, mark)
                    else:
                        taken = floor.counts.submitted
                        await eventually(lambda taken=taken: floor.counts.submitted > taken)
                await all_idle(web)
                # Far from all 400: it stopped soon after its client.
                assert floor.counts.generated_tokens - before < 200
            assert floor.counts.cancelled == floor.counts.submitted > 0
            assert await answered(web)

    harness.within(work(), 100)


def test_a_client_that_goes_between_order_and_stream_leaves_no_run(tmp_path):
    """Closed at once, often: some close before the stream was ever begun."""

    async def work():
        async with harness.web_node(tmp_path / "data") as web:
            for pause in range(30):
                async with connection(web, asking(max_tokens=20)):
                    await asyncio.sleep(0.002 * (pause % 10))
            await eventually(lambda: web.serving.floor.counts.submitted >= 3)
            await all_idle(web)
            assert await answered(web)

    harness.within(work(), 100)


def test_a_reader_that_does_not_read_is_cut_off_and_costs_no_slot(tmp_path, monkeypatch):
    monkeypatch.setattr(sse, "WRITE_S", 0.1)

    async def work():
        async with harness.web_node(tmp_path / "data") as web:
            wide = asking(max_tokens=4000, logprobs=True, top_logprobs=20, ignore_eos=True)
            async with connection(web, wide, limit=1 << 10) as (_, writer):
                writer.transport.pause_reading()
                counts = web.serving.floor.counts
                floor = web.serving.floor
                await eventually(lambda: counts.submitted == 1)
                await eventually(
                    lambda: floor.status().slots[0].state in (SlotState.IDLE, SlotState.PAUSED), 60
                )
                # A writer that goes on after each wait would let the slot's events pile up.
                assert floor.status().slots[0].state is SlotState.IDLE
                await all_idle(web)
                # Cut off by the door, before the floor's own patience was over.
                assert (counts.finished, counts.stalled, counts.cancelled) == (0, 0, 1)
            assert await answered(web)

    harness.within(work(), 100)


def test_more_than_may_wait_are_told_when_to_come_again(tmp_path):
    async def work():
        async with (
            harness.web_node(tmp_path / "data", serving=ServingOptions(slots=1)) as web,
            contextlib.AsyncExitStack() as stack,
        ):
            full = asking(max_tokens=2000, ignore_eos=True)
            for _ in range(65):
                await stack.enter_async_context(connection(web, full))
            floor = web.serving.floor
            await eventually(lambda: floor.status().waiting == 64, 20)
            client = openai.AsyncOpenAI(base_url=web.v1, api_key="x", max_retries=0)
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(
                    model="default_model", messages=NIGHT, stream=True
                )
            assert caught.value.code == "overloaded"
            assert int(caught.value.response.headers["retry-after"]) >= 1
            audit = web.node.entrance.door.audit
            assert audit.recent()[0].code == "overloaded"
            await stack.aclose()
            await all_idle(web, 30)
            # The SDK's own retries come again after that time, and are served.
            patient = openai.AsyncOpenAI(base_url=web.v1, api_key="x", max_retries=3)
            told = await patient.chat.completions.create(
                model="default_model", messages=NIGHT, max_tokens=2
            )
            assert told.usage.completion_tokens == 2

    harness.within(work(), 100)
