"""``--prefill remote`` from the web door: text as computed here, and why it was not there."""

from __future__ import annotations

import contextlib
import dataclasses

import harness
import httpx2
import pytest
from node_support import World
from remote_support import CONSUMER, PRODUCER, enroll_consumer, nothing_left

from node.config import Address
from node.errors import CredentialsError
from node.http.options import HttpOptions
from node.server import running
from node.serving.options import PrefillAt, ServingOptions

LONG = "It was the best of times, it was the worst of times. " * 30


@contextlib.asynccontextmanager
async def asking(world: World, address):
    """``(node, client)`` of a node that has long prompts computed at ``address``."""
    options = ServingOptions(
        prefill=PrefillAt.REMOTE, producer=f"{PRODUCER}@{address}", remote_tokens_min=256
    )
    config = dataclasses.replace(
        world.config(CONSUMER),
        http=HttpOptions(Address("127.0.0.1", 0), drain_s=2.0),
        serving=options,
    )
    async with (
        running(config) as node,
        httpx2.AsyncClient(base_url=node.entrance.url, timeout=60) as client,
    ):
        yield node, client


async def complete(client, text, **fields):
    body = {"prompt": text, "max_tokens": 12, "temperature": 0, **fields}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_long_prompt_is_computed_there_and_says_what_one_computed_here_says(world):
    async def work():
        enroll_consumer(world)
        async with contextlib.AsyncExitStack() as stack:
            producer, _ = await stack.enter_async_context(world.node(PRODUCER))
            async with asking(world, producer.address) as (node, client):
                short = await complete(client, "It was")
                assert short["kvpack"]["rung"] == "none"
                there = await complete(client, LONG)
                assert there["kvpack"]["rung"] == "remote"
                assert there["kvpack"]["evaluated_tokens"] == 1
                assert "prefill_fallback" not in there["kvpack"]
                await node.entrance.door.serving.ladder.settled()
                again = await complete(client, LONG)
                assert again["kvpack"]["rung"] != "remote", again["kvpack"]
                texts = {one["choices"][0]["text"] for one in (there, again)}
                await nothing_left(world, producer, node)
                counts = node.entrance.door.serving.remote.counts
                assert counts.asked == counts.arrived == 1
        async with asking(world, Address("127.0.0.1", 1)) as (node, client):
            here = await complete(client, "Now " + LONG)
            assert here["kvpack"]["prefill_fallback"] == "away"
            cold = await complete(client, LONG, cache_prompt=False)
            assert cold["kvpack"]["prefill_fallback"] == "resting"
            texts.add(cold["choices"][0]["text"])
            scraped = (await client.get("/metrics")).text
            assert 'reason="away"} 1.0' in scraped or "away" in scraped
        assert len(texts) == 1

    harness.within(work())


def test_a_producer_that_is_not_pinned_is_found_at_the_start(world):
    async def work():
        config = dataclasses.replace(
            world.config("third"),
            http=HttpOptions(Address("127.0.0.1", 0)),
            serving=ServingOptions(prefill=PrefillAt.REMOTE, producer="client@127.0.0.1:1"),
        )
        with pytest.raises(CredentialsError, match="client"):
            async with running(config):
                pass

    harness.within(work())


@pytest.mark.slow
def test_a_producer_that_is_killed_while_it_computes_costs_an_answer_nothing_but_time(
    tmp_path, world
):
    """Real processes: the producer ends by kill -9 in the middle of a prompt."""
    import asyncio
    import json
    import subprocess
    import sys

    from node.config import child_environment

    enroll_consumer(world)
    command = [
        *(sys.executable, "-P", "-m", "node", "serve", "--model", str(harness.TRAINED)),
        *("--grpc", "127.0.0.1:0", "--credentials", str(world.credentials(PRODUCER))),
        *("--data-dir", str(tmp_path / "producer"), "--volume-worst", "20"),
        *("--directory", f"sqlite:{tmp_path / 'd.sqlite'}", "--stop-on-stdin-end"),
    ]

    async def work(address, process):
        world_of_trained = dataclasses.replace(world, model_dir=harness.TRAINED)
        async with asking(world_of_trained, address) as (node, client):
            asked = asyncio.create_task(complete(client, LONG * 3))
            async with asyncio.timeout(30):
                while not node.transfers.open_offers():
                    await asyncio.sleep(0.01)
            process.kill()
            answer = await asked
            assert answer["kvpack"]["prefill_fallback"] == "broken"
            assert answer["usage"]["completion_tokens"] == 12
            await nothing_left(world, node)

    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=child_environment(harness.ROOT), stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            said = json.loads(process.stdout.readline())
            harness.within(work(Address.parse(said["address"]), process))
        finally:
            process.kill()
