"""What ends a stream while the engine works on the session: nobody is next before that is done."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from node_support import move, prompt, run
from test_fan_out import fan_out, orders
from test_sessions import Held, generated

from node.errors import InventoryError, PeerAnswerError
from node.migration.fan import SharedFeed
from node.migration.moves import NotMoved

#: A call that did not begin by then never does.
BEGUN_S = 10.0


async def entered(held: Held) -> None:
    async with asyncio.timeout(BEGUN_S):
        while not held.entered:
            await asyncio.sleep(0.005)


async def cancelled_twice(giving, target, asked, given, held):
    ending = asyncio.create_task(move(giving, target, asked, given))
    await entered(held)
    await giving.cancel_move(asked)
    # The second one meets the end that the first one began.
    await asyncio.sleep(0.05)
    with contextlib.suppress(PeerAnswerError):
        await giving.cancel_move(asked)
    yield
    with pytest.raises(PeerAnswerError, match="cancelled; the session stays"):
        await ending


async def copies_failed(source, target, given, held, monkeypatch):
    async def fails(*_):
        await entered(held)
        raise InventoryError("enough of it")

    monkeypatch.setattr(SharedFeed, "_write", fails)
    ending = asyncio.create_task(fan_out(source, "s", given, orders(target)))
    await entered(held)
    await asyncio.sleep(0.1)
    yield
    (copy,) = await ending
    assert isinstance(copy, NotMoved) and "enough of it" in str(copy.error)


@pytest.mark.parametrize("ends", ["move", "copies"])
@pytest.mark.parametrize("call", ["decode_next", "prefill_next", "prefill_giving"])
def test_who_is_next_finds_no_call_of_an_ended_stream_under_way(world, call, ends, monkeypatch):
    """The boundary call's token would be passed over, or computed by a prefill call."""
    first, length = (40, 40) if call == "decode_next" else (300, 600)
    known, given = prompt(length)[:first], prompt(length)[first:]

    async def work():
        async with world.pair() as (source, giving, target, _):
            sessions = source.sessions
            asked = await giving.append(await giving.open("s"), known)
            session = await sessions.find("s")
            held = Held(session, call)
            ending = contextlib.asynccontextmanager(
                cancelled_twice if ends == "move" else copies_failed
            )
            of = (giving, target, asked) if ends == "move" else (source, target)
            also = () if ends == "move" else (monkeypatch,)
            async with ending(*of, given, held, *also):
                again = asyncio.create_task(generated(sessions, session, length, 4))
                await asyncio.sleep(0.1)
                held.let_go()
                found = await again
            await giving.append(await giving.append(await giving.open("twin"), known), given)
            twin = await sessions.find("twin")
            assert found == await generated(sessions, twin, length, 4)
            assert session.generation.schedule == twin.generation.schedule

    run(work())
