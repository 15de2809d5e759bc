"""One session copied to several targets at once, and one target that several sources push to."""

from __future__ import annotations

import contextlib

import pytest
from node_support import events, prompt, run

from node.migration import producer as producer_module
from node.migration.moves import NotMoved, Targets
from node.migration.source import Moved, Order


@contextlib.asynccontextmanager
async def three(world):
    """A source and two targets, each with its client."""
    async with (
        world.pair() as (source, giving, target, taking),
        world.node("third") as (third, its_client),
    ):
        yield source, giving, (target, third), (taking, its_client)


def orders(*nodes):
    return Targets(
        tuple(
            Order(node.name, node.address, copy_as=f"c{number}")
            for number, node in enumerate(nodes, 1)
        )
    )


async def fan_out(source, session_id, token_ids, targets):
    """What became of each target."""
    session = await source.sessions.find(session_id)
    told = [
        event.event
        async for event in source.moves.fan_out(session_id, session.token, token_ids, targets)
    ]
    return [one for one in told if isinstance(one, Moved | NotMoved)]


class Sealing:
    """Counts what is sealed, by the item of the tape."""

    def __init__(self, monkeypatch) -> None:
        self.items = []
        self.tokens = 0
        seal_item, seal_token_ids = producer_module.seal_item, producer_module.seal_token_ids

        def counted(binding, token_ids, states, item, tile):
            self.items.append(item)
            return seal_item(binding, token_ids, states, item, tile)

        def counted_tokens(*arguments):
            self.tokens += 1
            return seal_token_ids(*arguments)

        monkeypatch.setattr(producer_module, "seal_item", counted)
        monkeypatch.setattr(producer_module, "seal_token_ids", counted_tokens)


@pytest.mark.parametrize("known", [True, False], ids=["prompt", "live"])
def test_two_targets_get_the_bits_of_one_session_and_each_chunk_is_sealed_once(
    world, monkeypatch, known
):
    tokens = prompt(1500)
    sealing = Sealing(monkeypatch)

    async def work():
        async with three(world) as (source, giving, nodes, clients):
            session = await giving.open("s")
            if not known:
                session = await giving.append(session, tokens)
            results = await fan_out(source, "s", tokens if known else (), orders(*nodes))
            assert all(isinstance(one, Moved) for one in results), results
            copies = [
                await events(client, await client.get(f"c{number}"), 1500, 12)
                for number, client in enumerate(clients, 1)
            ]
            twin = await giving.append(await giving.open("twin"), tokens)
            expected = await events(giving, twin, 1500, 12)
            kept = await events(giving, await giving.get("s"), 1500, 12)
            return results, copies, expected, kept

    results, copies, expected, kept = run(work())
    assert copies == [expected, expected] and kept == expected
    assert len({one.objects for one in results}) == 1
    # The same chunks went to both; all of them were sealed, and none of them twice.
    assert len(sealing.items) == len(set(sealing.items)) == results[0].objects
    # Prepare offers the known tokens, once for both; the cut's own are the tape's.
    assert sealing.tokens == 2
    assert all(one.timeline.payload_bytes == results[0].timeline.payload_bytes for one in results)
