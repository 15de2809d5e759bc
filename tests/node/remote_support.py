"""A producer and a consumer of prompts: two real nodes on loopback, pinned both ways."""

from __future__ import annotations

import asyncio
import contextlib

from node_support import World

from node.client import NodeClient
from node.config import Address
from node.placement.notice import notice_name
from node.serving.remote import ProducerOrder, RemotePrefill
from node.transient import is_transient
from node.trust import Role, pin

PRODUCER, CONSUMER = "source", "target"


def enroll_consumer(world: World) -> None:
    """Let the consumer call the producer's Session service."""
    pin(world.credentials(PRODUCER), world.certificate(CONSUMER), Role.CLIENT)


def remote_of(world: World, consumer, address: Address, **options) -> RemotePrefill:
    """The consumer's remote prefill, with the producer at ``address``."""
    chosen = {"own_address": consumer.address, "min_tokens": 64, **options}
    order = ProducerOrder(PRODUCER, address, **chosen)
    return RemotePrefill(
        order,
        lambda: NodeClient(world.credentials(CONSUMER), PRODUCER, address),
        consumer.transfers,
        consumer.sessions,
    )


@contextlib.asynccontextmanager
async def producing(world: World, producer_model=None, **options):
    """Both nodes and the consumer's remote prefill; afterwards nothing may be left on either."""
    enroll_consumer(world)
    async with (
        world.node(PRODUCER, producer_model) as (producer, _),
        world.node(CONSUMER) as (consumer, _),
    ):
        remote = remote_of(world, consumer, producer.address, **options)
        yield producer, consumer, remote
        await remote.close()
        await nothing_left(world, producer, consumer)


async def nothing_left(world: World, *nodes) -> None:
    """No session, no transfer, no entry in the directory and no file of a remote prefill."""
    async with asyncio.timeout(40):
        while left := await left_over(*nodes):
            await asyncio.sleep(0.02)
    assert not left
    assert world.spool(CONSUMER) == []


async def left_over(*nodes) -> list[str]:
    """What a remote prefill left on nodes so far."""
    found = []
    for node in nodes:
        found += [one.session_id for one in node.sessions.page("", 1000)[0]]
        found += [offer.session_id for offer in node.transfers.open_offers()]
        owned = await node.sessions.directory.owned_by(node.name)
        found += [entry.session_id for entry in owned]
    # What a node says of itself stands under such a name, too, for as long as the node runs.
    notices = {notice_name(node.name) for node in nodes}
    return [name for name in found if is_transient(name) and name not in notices]


async def cold(node, tokens):
    """The rows of all tokens but the boundary token, computed on ``node`` itself."""
    from engine import prefill_calls

    engine = node.sessions.engine
    generation = await engine.call(engine.model.new_generation)
    done = 0
    for call_tokens in prefill_calls(0, len(tokens) - 1):
        await engine.call(generation.prefill, tokens[done : done + call_tokens])
        done += call_tokens
    return generation


async def steps(node, generation, token_id, count):
    """Logits of ``count`` greedy single-token calls from ``token_id`` on."""
    found = []
    for _ in range(count):
        logits = await node.sessions.engine.call(generation.step, token_id)
        token_id = logits.argmax()
        found.append(logits.data)
    return found
