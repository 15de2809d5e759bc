"""What a producer does before anybody asks: chunks sealed ahead, and the boundary call."""

from __future__ import annotations

import asyncio
import threading

import pytest
from node_support import events, move, prompt, run

from node.migration.feed import Feed
from node.migration.sealing import AHEAD_TILES, Loaded, Sealed, Sealing

#: A thread that does not begin by then never does.
BEGUN_S = 5.0


def loaded(index: int) -> Loaded:
    return Loaded(index, None, None)


def test_the_next_chunks_are_being_sealed_before_the_one_before_is_given_out():
    """A write holds the loop up: what has not begun by then begins after it."""
    begun = [threading.Event() for _ in range(5)]

    def seal(one: Loaded) -> Sealed:
        begun[one.index].set()
        return Sealed(one.index, b"", None)

    async def work():
        queue = asyncio.Queue()
        for index in range(5):
            queue.put_nowait(loaded(index))
        queue.put_nowait(None)
        sealing = Sealing(queue, seal)
        first = await sealing.take()
        # No turn of the loop from here on.
        ahead = [begun[index].wait(BEGUN_S) for index in range(1, 1 + AHEAD_TILES)]
        bounded = not begun[1 + AHEAD_TILES].is_set()
        rest = [(await sealing.take()) for _ in range(5)]
        return [first, *rest], ahead, bounded

    taken, ahead, bounded = run(work())
    assert ahead == [True] * AHEAD_TILES and bounded
    assert [one.index for one in taken[:-1]] == [0, 1, 2, 3, 4] and taken[-1] is None


def test_chunks_keep_their_order_however_long_each_takes_and_failures_come_in_it_too():
    slow = threading.Event()

    def seal(one: Loaded) -> Sealed:
        if one.index == 0:
            slow.wait(BEGUN_S)
        if one.index == 1:
            slow.set()
            raise ValueError("no seal")
        return Sealed(one.index, b"", None)

    async def work():
        queue = asyncio.Queue()
        for index in range(3):
            queue.put_nowait(loaded(index))
        sealing = Sealing(queue, seal)
        assert (await sealing.take()).index == 0
        with pytest.raises(ValueError, match="no seal"):
            await sealing.take()

    run(work())


def test_the_boundary_call_waits_for_rows_that_were_read_and_not_for_those_to_be_written(
    world, monkeypatch
):
    """A slow link would hold it up otherwise, and the hand-over with it."""
    write, waited = Feed._write, []

    async def work():
        async with world.pair() as (_, giving, target, taking):

            async def slow(feed, call, sealed):
                producer = feed._producer
                if sealed.index == len(producer.tape.items) - 8:
                    async with asyncio.timeout(BEGUN_S):
                        while producer.finished is None:
                            await asyncio.sleep(0.005)
                    waited.append(sealed.index)
                await write(feed, call, sealed)

            monkeypatch.setattr(Feed, "_write", slow)
            result = await move(giving, target, await giving.open("s"), prompt(1800))
            assert len(await events(taking, await taking.get("s"), 1800, 2)) == 2
            return result

    assert run(work()).continuation_verdict == "exact"
    assert len(waited) == 1
