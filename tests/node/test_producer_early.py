"""The tiles of the last prefill call of a known prompt: they leave while it computes."""

from __future__ import annotations

import asyncio
import threading

import pytest
from node_support import events, move, prompt, run

from engine import Generation
from kvpack.layout import LayerKind
from kvpack.snapshot import Tile, TileSpec
from node.engine_thread import EngineThread
from node.errors import NodeBusyError, PeerAnswerError, PeerUnavailableError
from node.migration import producer
from node.migration.early import EARLY_TILES, EarlyTiles
from node.migration.feed import Feed

#: What has not left by then waits for the call.
LEFT_S = 10.0

#: Two calls, the last one of them within one block.
TOKENS = 560


class LastCalls:
    """Watches the last prefill call, which waits after its first tile until a chunk of it left."""

    def __init__(self, monkeypatch, *, waits: bool = True) -> None:
        self.given: list[TileSpec] = []
        self.left: list[tuple[TileSpec, bool]] = []
        self.over = False
        self._first = threading.Event()
        inner, write = Generation.prefill_giving, Feed._write

        def prefill_giving(generation, token_ids, specs, give):
            def watched(spec, copy):
                self.given.append(spec)
                give(spec, copy)
                if waits and len(self.given) == 1:
                    assert self._first.wait(LEFT_S), "nothing left while the call was under way"

            inner(generation, token_ids, specs, watched)
            self.over = True

        async def watched_write(feed, call, sealed):
            await write(feed, call, sealed)
            item = feed.tape.items[sealed.index]
            if item in self.given:
                self.left.append((item, self.over))
                self._first.set()

        monkeypatch.setattr(Generation, "prefill_giving", prefill_giving)
        monkeypatch.setattr(Feed, "_write", watched_write)


@pytest.fixture
def twin(world):
    """What a session that never moved goes on with."""

    async def work():
        async with world.node("source") as (_, client):
            session = await client.append(await client.open("twin"), prompt(TOKENS))
            return [event[1:] for event in await events(client, session, TOKENS, 8)]

    return run(work())


async def moved(world, resumed=0):
    """What a session goes on with that was moved while its prompt was computed."""
    async with world.pair() as (_, giving, target, taking):
        result = await move(giving, target, await giving.open("s"), prompt(TOKENS))
        assert (result.resumed, result.continuation_verdict) == (resumed, "exact")
        return [e[1:] for e in await events(taking, await taking.get("s"), TOKENS, 8)]


def test_rows_of_the_last_call_leave_before_it_is_over_and_are_the_ones_of_a_twin(
    world, twin, monkeypatch
):
    calls = LastCalls(monkeypatch)

    assert run(moved(world)) == twin
    assert calls.given and all(spec.kind is LayerKind.SWA for spec in calls.given)
    assert (calls.given[0], False) in calls.left


def test_a_link_that_breaks_in_the_last_call_loses_no_tile_of_it(world, twin, monkeypatch):
    calls = LastCalls(monkeypatch)
    watched, broken = Feed._write, []

    async def breaks(feed, call, sealed):
        await watched(feed, call, sealed)
        if calls.left and not broken:
            broken.append(calls.over)
            raise PeerUnavailableError("cut")

    monkeypatch.setattr(Feed, "_write", breaks)

    assert run(moved(world, resumed=1)) == twin
    assert broken == [False]


def test_a_last_call_that_fails_ends_the_move_and_what_it_gave_is_not_sealed(world, monkeypatch):
    inner = Generation.prefill_giving

    def fails(generation, token_ids, specs, give):
        def stop(spec, copy):
            give(spec, copy)
            raise NodeBusyError("the card is gone")

        inner(generation, token_ids, specs, stop)

    monkeypatch.setattr(Generation, "prefill_giving", fails)

    async def work():
        async with world.pair() as (source, giving, target, _):
            with pytest.raises(PeerAnswerError):
                await move(giving, target, await giving.open("s"), prompt(TOKENS))
            assert not target.transfers.under_way()
            assert not source.sessions.engine.pace._turn.locked()

    run(work())


def test_a_line_that_is_full_ends_the_move_and_not_the_turns_of_all_others(world, monkeypatch):
    submit, full = EngineThread.submit, []

    def submitted(engine, work, *arguments, **named):
        if work is producer._prefill_giving:
            full.append(work)
            raise NodeBusyError("64 calls wait for the engine")
        return submit(engine, work, *arguments, **named)

    monkeypatch.setattr(EngineThread, "submit", submitted)

    async def work():
        async with world.pair() as (source, giving, target, _):
            session = await giving.open("s")
            with pytest.raises(PeerAnswerError, match="calls wait for the engine; the session"):
                await move(giving, target, session, prompt(TOKENS))
            assert full and not source.sessions.engine.pace._turn.locked()
            async with asyncio.timeout(LEFT_S):
                again = await giving.append(await giving.open("next"), prompt(TOKENS))
                return [event[1:] for event in await events(giving, again, TOKENS, 2)]

    assert len(run(work())) == 2


def test_a_tile_that_there_is_no_memory_for_is_read_after_the_call(world, twin, monkeypatch):
    """A call that stopped half way would leave nothing to go on from but the last cut."""
    copied, refused = Generation._copied, []

    def copy(generation, spec):
        if generation._torn and not refused:
            refused.append(spec)
            raise MemoryError
        return copied(generation, spec)

    monkeypatch.setattr(Generation, "_copied", copy)

    assert run(moved(world)) == twin
    assert len(refused) == 1


def test_no_more_is_copied_ahead_than_there_is_room_for_and_all_else_is_read_afterwards():
    specs = [TileSpec(LayerKind.SWA, (layer,), 0, 1) for layer in range(EARLY_TILES + 3)]
    copied = []

    def copying(spec):
        def copy():
            copied.append(spec)
            return Tile(spec, b"")

        return copy

    async def work():
        tiles = EarlyTiles(specs)
        for spec in specs[:-1]:
            await asyncio.to_thread(tiles.give, spec, copying(spec))
        assert copied == specs[:EARLY_TILES]
        assert (await tiles.take(specs[0])).spec == specs[0]
        # There is room again, once: taken twice it is the same tile no more.
        assert await tiles.take(specs[0]) is None
        for _ in range(2):
            await asyncio.to_thread(tiles.give, specs[-1], copying(specs[-1]))
        assert copied == [*specs[:EARLY_TILES], specs[-1]]
        waiting = asyncio.ensure_future(tiles.take(specs[EARLY_TILES]))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        tiles.close()
        assert await waiting is None
        assert (await tiles.take(specs[-1])).spec == specs[-1]
        assert await tiles.take("no tile") is None

    run(work())
