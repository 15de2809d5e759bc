"""Prompts computed by another node: the same bits as here, and nothing left on either end."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from node_support import prompt, run
from remote_support import PRODUCER, cold, producing, remote_of, steps

from kvpack.errors import LimitError
from node.config import Address
from node.serving.order import Fallback, MissReason, Rung
from node.serving.producer import Arrival, Failure, ProducerOrder
from node.serving.remote_ladder import RemoteLadder
from node.serving.reuse import ForeignTrail, NoReuse


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
        async with producing(world) as (producer, _, remote):
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


def test_the_last_rung_is_asked_only_where_much_is_missing_and_says_why_it_was_not(world):
    ids = prompt(200)

    async def work():
        async with producing(world) as (_, consumer, remote):
            ladder = RemoteLadder(NoReuse(consumer.sessions.engine), remote, "tests")
            base = await ladder.begin("tests", ids)
            assert (base.position, base.rung, base.fallback) == (199, Rung.REMOTE, Fallback.NONE)
            assert base.generation.position == 199 and base.restored_bytes > 0
            asked = remote.counts.asked
            for tenant, tokens, above in (("tests", 64, 0), ("other", 200, 0), ("tests", 200, 140)):
                base = await ladder.begin(tenant, ids[:tokens], above=above)
                assert (base.position, base.rung) == (0, Rung.NONE)
            assert remote.counts.asked == asked
            away = remote_of(world, consumer, Address("127.0.0.1", 1))
            base = await RemoteLadder(NoReuse(consumer.sessions.engine), away, "tests").begin(
                "tests", ids
            )
            assert (base.position, base.rung, base.fallback) == (0, Rung.NONE, Fallback.AWAY)
            assert base.miss is MissReason.DISABLED
            await away.close()

    run(work())


def test_no_cut_is_kept_of_rows_that_are_not_of_this_nodes_numerics(world):
    class Keeper(NoReuse):
        def trail(self, tenant, stream, base):
            return "kept"

    async def work():
        async with producing(world) as (_, consumer, remote):
            ladder = RemoteLadder(Keeper(consumer.sessions.engine), remote, "tests")
            base = await ladder.begin("tests", prompt(100))
            assert ladder.trail("tests", None, base) == "kept"
            foreign = dataclasses.replace(base, exact=False)
            assert isinstance(ladder.trail("tests", None, foreign), ForeignTrail)

    run(work())


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_tokens": 1},
        {"answer_s": 0},
        {"stall_s": float("nan")},
        {"total_s": 1e9},
        {"own_address": Address("0.0.0.0", 1)},  # noqa: S104 - refused
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_order_that_cannot_work_is_refused(wrong):
    place = Address("127.0.0.1", 1)
    with pytest.raises(LimitError, match=f"remote.{next(iter(wrong))}"):
        ProducerOrder(PRODUCER, place, **{"own_address": place, **wrong})
