"""Prompts computed by another node: the same bits as here, and nothing left on either end."""

from __future__ import annotations

import asyncio

import pytest
from node_support import HandSource, prompt, refusal, run
from remote_support import CONSUMER, PRODUCER, cold, left_over, producing, remote_of, steps

from kvpack.errors import LimitError
from node.config import Address
from node.directory import Ownership
from node.serving.order import Fallback, MissReason, Rung
from node.serving.producer import Arrival, Failure, ProducerOrder
from node.serving.remote_ladder import RemoteLadder
from node.serving.reuse import NoReuse, NoTrail
from node.sessions import Sessions


@pytest.mark.parametrize("tokens", [2, 17, 256, 1300])
def test_rows_from_a_producer_go_on_with_the_bits_of_rows_computed_here(world, tokens):
    ids = prompt(tokens)

    async def work():
        async with producing(world) as (_, consumer, remote):
            arrival = await remote.prefill(ids)
            assert isinstance(arrival, Arrival), arrival
            here = await cold(consumer, ids)
            assert arrival.exact
            assert arrival.generation.position == tokens - 1
            assert arrival.generation.schedule == here.schedule
            assert remote.counts.asked == remote.counts.arrived == 1
            assert remote.counts.tokens == tokens - 1
            came = await steps(consumer, arrival.generation, ids[-1], 24)
            assert came == await steps(consumer, here, ids[-1], 24)

    run(work())


def test_prompts_one_after_the_other_and_two_at_once_leave_nothing(world):
    async def work():
        async with producing(world) as (producer, consumer, remote):
            for seed in range(3):
                assert isinstance(await remote.prefill(prompt(90, seed + 1)), Arrival)
            outcomes = await asyncio.gather(*(remote.prefill(prompt(700, s)) for s in (4, 5, 6)))
            kinds = [one.kind if isinstance(one, Failure) else None for one in outcomes]
            assert kinds == [None, None, Fallback.BUSY]
            assert remote.counts.fallbacks == {Fallback.BUSY: 1}
            # What lives there for its own clients is not touched.
            await producer.sessions.open("s")
            assert isinstance(await remote.prefill(prompt(90, 7)), Arrival)
            assert "s" in producer.sessions

    run(work())
