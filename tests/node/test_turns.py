"""Live moves of one node stream one after the other, and a store of cuts lets them pass."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from node_support import SECONDS, move, prompt, run

from node import tier as tier_module
from node.cli_placement import drain
from node.migration.producer import Producer
from node.migration.turns import ProducerInTurn, Turns
from node.placement.drain import PARALLEL


async def waiting(turns, consumer, entered, name):
    async with turns.turn(consumer):
        entered.append(name)
        await asyncio.sleep(0.02)
        entered.append(name)


def test_one_has_the_turn_at_a_time_first_come_first_served():
    async def work():
        turns, entered = Turns(), []
        alive = asyncio.get_running_loop().create_future()
        await asyncio.gather(*(waiting(turns, alive, entered, n) for n in range(4)))
        return entered

    assert run(work()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_nobody_waits_longer_than_his_patience_or_than_his_stream_lives():
    async def work():
        turns, entered = Turns(patience_s=0.05), []
        alive = asyncio.get_running_loop().create_future()
        broken = asyncio.get_running_loop().create_future()
        async with turns.turn(alive):
            async with turns.turn(alive):
                entered.append("without the turn")
            asyncio.get_running_loop().call_later(0.01, broken.set_exception, ValueError("cut"))
            with pytest.raises(ValueError, match="cut"):
                await waiting(turns, broken, entered, "never")
            late = asyncio.create_task(waiting(turns, alive, entered, "cancelled"))
            await asyncio.sleep(0)
            late.cancel()
            await asyncio.wait({late})
        # None of them has kept what it was not given.
        turns._patience_s = SECONDS
        async with asyncio.timeout(SECONDS / 2), turns.turn(alive):
            entered.append("at once")
        return entered

    assert run(work()) == ["without the turn", "at once"]


def test_of_live_moves_one_is_read_at_a_time_and_the_next_is_prepared_meanwhile(world, monkeypatch):
    read, prepared = [], []

    async def work():
        async with world.pair() as (_, giving, target, _taking):
            sessions = [
                await giving.append(await giving.open(f"s{i}"), prompt(1500, i)) for i in range(3)
            ]
            load = Producer._load

            async def noted(producer, first, most):
                read.append(producer.session.session_id)
                prepared.append(len(target.transfers.under_way()))
                await asyncio.sleep(0.02)
                return await load(producer, first, most)

            monkeypatch.setattr(Producer, "_load", noted)
            return await asyncio.gather(*(move(giving, target, one) for one in sessions))

    done = run(work())
    assert {one.continuation_verdict for one in done} == {"exact"}
    assert len(read) > 6
    assert [name for name, _ in itertools.groupby(read)] == sorted(set(read), key=read.index)
    assert max(prepared) > 1


@pytest.mark.parametrize("cut", [None, 300])
def test_whose_stream_broke_after_the_freeze_waits_for_nobody(cut, monkeypatch):
    """Until it has ended its session is nobody's; one that still serves waits."""
    filled = []

    async def fill(producer, index, queue, consumer):
        filled.append(index)

    async def work():
        turns, alive = Turns(), asyncio.get_running_loop().create_future()
        producer = ProducerInTurn.__new__(ProducerInTurn)
        producer._turns, producer.tape = turns, SimpleNamespace(cut=cut)
        async with turns.turn(alive):
            asked = asyncio.create_task(producer.fill(7, asyncio.Queue(), alive))
            await asyncio.sleep(0.02)
            early = list(filled)
        await asked
        return early

    monkeypatch.setattr(Producer, "fill", fill)
    assert run(work()) == ([] if cut is None else [7])
    assert filled == [7]


def test_as_many_move_at_once_by_the_command_as_by_itself():
    (parallel,) = [one.default for one in drain.params if one.name == "parallel"]
    assert parallel == PARALLEL


def test_a_pack_is_kept_when_no_session_is_on_its_way_any_more(world, monkeypatch):
    monkeypatch.setattr(tier_module, "QUIET_S", 0.05)

    async def work():
        async with world.pair() as (_, giving, target, _taking):
            busy, kept = [True], []
            monkeypatch.setattr(target.tier, "_busy", lambda: busy[0])
            monkeypatch.setattr(target.tier, "_keep", kept.append)
            session = await giving.append(await giving.open("s"), prompt(300))
            await move(giving, target, session)
            await asyncio.sleep(0.4)
            assert not kept
            busy[0] = False
            await target.tier.settled()
            assert [wish.session_id for wish in kept] == ["s"]
            # Not for ever: what nobody keeps travels again.
            monkeypatch.setattr(tier_module, "YIELD_S", 0.1)
            busy[0] = True
            back = await giving.append(await giving.open("t"), prompt(300, 2))
            await move(giving, target, back)
            await target.tier.settled()
            assert [wish.session_id for wish in kept] == ["s", "t"]

    run(work())
