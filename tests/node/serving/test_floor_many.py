"""Many answers, many of them cancelled anywhere: nothing is lost, counted twice, or kept."""

from __future__ import annotations

import asyncio
import random
import resource

import pytest
from floor_support import Watched, alone, ask, consistent, loaded, order, read, same
from node_support import prompt, run

from node.errors import RunCancelledError
from node.serving.floor import Floor
from node.serving.order import Piece
from node.serving.run import RunState
from node.serving.slots import SlotState


async def client(floor, chance, number):
    """One that reads to the end, or, one of three, leaves somewhere; gives which it was."""
    await asyncio.sleep(chance.random())
    ids = prompt(chance.randrange(1, 50), chance.randrange(12))
    each = floor.submit(order(ids, chance.randrange(1, 5), tenant=chance.choice("tu")))
    if number % 3:
        answer = await read(each)
        assert len(answer.ids) == each.order.max_tokens
        return "whole"
    how = chance.randrange(4)
    async with each:
        if how == 0:
            await asyncio.sleep(chance.random() * 0.05)
        elif how == 1:
            async for event in each:
                if isinstance(event, Piece) and chance.random() < 0.5:
                    break
        elif how == 2:
            each.cancel()
        else:
            asyncio.get_running_loop().call_later(chance.random() * 0.1, each.cancel)
            with pytest.raises(RunCancelledError):
                async for _ in each:
                    pass
                raise RunCancelledError("it was quicker")
    assert each.state is RunState.ENDED
    return "whole" if each.error is None else "cancelled"


async def many(floor, chance, count):
    """So many clients at once; how each ended."""
    clients = [asyncio.create_task(client(floor, chance, number)) for number in range(count)]
    while not all(task.done() for task in clients):
        assert consistent(floor)
        await asyncio.sleep(0.05)
    return [task.result() for task in clients]


@pytest.mark.parametrize(
    ("count", "rounds"),
    [
        pytest.param(60, 1, id="sixty"),
        pytest.param(300, 4, marks=pytest.mark.slow, id="twelve hundred, memory watched"),
    ],
)
def test_many_answers_a_third_of_them_cancelled_anywhere(model_dir, count, rounds):
    seed = 20261130
    print("seed", seed)
    chance = random.Random(seed)

    async def work():
        async with loaded(model_dir) as engine:
            ladder = Watched(engine)
            floor = Floor(engine, ladder, slots=3, waiting=count)
            floor.start()
            ends = await many(floor, chance, count)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(rounds - 1):
                ends += await many(floor, chance, count)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1.05 * peak
            counts, view = floor.counts, floor.status()
            assert all(slot.state is SlotState.IDLE for slot in view.slots)
            assert view.waiting == 0 and not view.staging
            assert counts.submitted == count * rounds == counts.finished + counts.cancelled
            assert counts.finished == ends.count("whole") >= count * 2 // 3 * rounds
            assert counts.cancelled == ends.count("cancelled") > count // 15 * rounds
            # Every trail that was begun is ended, but those of what slots still hold.
            held = sum(slot.known_tokens > 0 for slot in view.slots)
            assert sum(trail.ended == 0 for trail in ladder.trails) == held
            assert max(trail.ended for trail in ladder.trails) == 1
            # One more, as if nothing had been.
            answer = await ask(floor, prompt(80, 99), 4, top_logprobs=3)
            (expected,) = await alone(engine, [prompt(80, 99)], 4)
            assert same(answer, expected)
            await floor.close()
            assert all(trail.ended == 1 for trail in ladder.trails)

    run(work(), 240.0)
