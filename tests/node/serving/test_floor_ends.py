"""Readers that stall or hang up, keepers that fail, engines that break, nodes that stop."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
from floor_support import Calls, Watched, alone, ask, consistent, floor_of, order, read, same, until
from node_support import prompt, run

from kvpack.errors import LimitError
from kvpack.store import StoreError
from node.errors import (
    DrainingError,
    NodeBusyError,
    NodeError,
    RunCancelledError,
    StalledReaderError,
    UnhealthyError,
)
from node.serving.floor import Floor
from node.serving.health import HealthState
from node.serving.order import MissReason, Piece, Prefilled
from node.serving.reuse import NoTrail
from node.serving.run import EVENTS_MAX, RunState
from node.serving.slots import SlotState


def free(floor) -> bool:
    return all(slot.state is SlotState.IDLE for slot in floor.status().slots)


def test_an_answer_that_nobody_reads_pauses_and_then_gives_its_slot_back(model_dir):
    async def work():
        async with floor_of(model_dir, slots=1, stall_s=2.0) as (floor, engine):
            calls = Calls(engine)
            stalled = floor.submit(order(prompt(20), 500))
            waiting = floor.submit(order(prompt(20, 2), 2))
            await until(lambda: floor.status().slots[0].state is SlotState.PAUSED)
            steps = len(calls.log)
            await asyncio.sleep(0.1)
            # It costs the engine nothing, and nobody else a long prefill's worth of short calls.
            assert len(calls.log) == steps <= EVENTS_MAX + 5
            assert engine.pace.grid_tokens() == 512
            assert len((await read(waiting)).ids) == 2
            pieces = []
            with pytest.raises(StalledReaderError, match="not read for"):
                async for event in stalled:
                    pieces.append(event)
            assert len(pieces) == EVENTS_MAX and isinstance(pieces[0], Prefilled)
            with pytest.raises(StalledReaderError):
                await anext(stalled)
            assert floor.counts.stalled == 1 and consistent(floor)

    run(work())


def test_a_reader_that_takes_a_token_now_and_then_does_not_keep_a_slot(model_dir):
    async def work():
        async with floor_of(model_dir, slots=1, stall_s=0.2) as (floor, _):
            dripping = floor.submit(order(prompt(20), 500))
            with pytest.raises(StalledReaderError):
                async for _ in dripping:
                    await asyncio.sleep(0.03)
            assert free(floor)

    run(work())


def test_a_slow_reader_gets_all_of_its_answer(model_dir):
    async def work():
        async with floor_of(model_dir, slots=1, stall_s=1.0) as (floor, engine):
            slow = floor.submit(order(prompt(20), 150, top_logprobs=3))
            await until(lambda: slow.is_full)
            await asyncio.sleep(0.3)
            answer = await read(slow)
            (expected,) = await alone(engine, [prompt(20)], 150)
            assert same(answer, expected)

    run(work())


@pytest.mark.parametrize("where", ["waiting", "begin", "prefill", "first token", "middle", "last"])
def test_a_hang_up_frees_the_slot_wherever_it_comes(model_dir, where):
    """Fault 41, in the slot. Whatever was computed stands, and can be gone on from."""

    async def work():
        async with floor_of(model_dir) as (_, engine):
            ladder, calls = Watched(engine), Calls(engine)
            floor = Floor(engine, ladder, slots=1)
            floor.start()
            # One whole prefill call and some more.
            ids = prompt(540)
            blocker = floor.submit(order(prompt(20, 9), 400)) if where == "waiting" else None
            if where == "begin":
                ladder.gate.clear()
            hung = floor.submit(order(ids, 8))
            if where == "begin":
                await until(lambda: ladder.begun)
            elif where == "prefill":
                await until(lambda: calls.of("prefill_next"))
            elif where != "waiting":
                wanted = {"first token": 1, "middle": 4, "last": 8}[where]
                await until(lambda: len(calls.of("decode_next")) == wanted)
            async with hung:
                pass
            # Left: it has no slot any more, and no call under way.
            assert hung.state is RunState.ENDED
            done = len(calls.of("prefill_next", "decode_next"))
            if blocker is not None:
                async with blocker:
                    pass
            assert free(floor)
            ladder.gate.set()
            await asyncio.sleep(0.05)
            if where in ("waiting", "begin"):
                assert not [c for c in calls.of("prefill_next") if c[2][0] > 20]
            else:
                assert len(calls.of("prefill_next", "decode_next")) == done
            if hung.error is not None:
                with pytest.raises(RunCancelledError):
                    async for _ in hung:
                        pass
            answer = await ask(floor, ids, 8, top_logprobs=3)
            if where not in ("first token", "middle", "last"):
                (expected,) = await alone(engine, [ids], 8)
                assert same(answer, expected)
            if where == "prefill":
                assert answer.usage.cached_tokens == 512
            assert consistent(floor) and floor.counts.failed == 0
            await floor.close()

    run(work())


def test_a_second_cancel_and_a_late_one_change_nothing(model_dir):
    async def work():
        async with floor_of(model_dir, slots=1) as (floor, _):
            each = floor.submit(order(prompt(20), 3))
            answer = await read(each)
            each.cancel()
            assert each.error is None and len(answer.ids) == 3
            other = floor.submit(order(prompt(700), 3))
            await asyncio.sleep(0.01)
            for _ in range(3):
                other.cancel()
                await asyncio.sleep(0)
            await until(lambda: other.state is RunState.ENDED)
            assert floor.counts.cancelled == 1 and floor.counts.finished == 1

    run(work())


def test_a_keeper_of_rows_that_fails_makes_an_answer_later_and_not_wrong(model_dir):
    async def work():
        async with floor_of(model_dir) as (_, engine):
            ladder = Watched(engine)
            floor = Floor(engine, ladder, slots=1)
            floor.start()
            for failure in (StoreError("the disk is gone"), NodeBusyError("full")):
                ladder.failure = failure
                answer = await ask(floor, prompt(60), 4, top_logprobs=3)
                (expected,) = await alone(engine, [prompt(60)], 4)
                assert same(answer, expected)
                assert answer.usage.miss is MissReason.DAMAGED
            assert floor.health.state is HealthState.OK
            await floor.close()

    run(work())


def broken(engine, after=0):
    """The model's network, which fails in its call number ``after``."""
    parts, count = engine.model._parts, iter(range(10**9))

    def call(token_ids, caches):
        if next(count) == after:
            raise RuntimeError("the accelerator is gone")
        return parts.call(token_ids, caches)

    engine.model._parts = dataclasses.replace(parts, call=call)


@pytest.mark.parametrize("after", [0, 3])
def test_a_broken_engine_call_latches_the_node_and_loses_no_slot(model_dir, after):
    async def work():
        async with floor_of(model_dir, slots=2) as (floor, engine):
            await ask(floor, prompt(30), 2)
            broken(engine, after)
            runs = [floor.submit(order(prompt(40, k), 50)) for k in range(4)]
            for each in runs:
                with pytest.raises(UnhealthyError, match="RuntimeError; restart"):
                    async for _ in each:
                        pass
            assert floor.health.state is HealthState.UNHEALTHY
            assert floor.status().why == "RuntimeError"
            with pytest.raises(UnhealthyError):
                floor.submit(order(prompt(20)))
            # What a slot held may be torn, too: nothing is gone on from.
            assert free(floor) and all(s.known_tokens == 0 for s in floor.status().slots)
            assert floor.counts.failed == 4 and consistent(floor)

    run(work())


def test_a_break_in_a_call_of_somebody_who_hung_up_is_not_overlooked(model_dir):
    async def work():
        async with floor_of(model_dir, slots=1) as (floor, engine):
            broken(engine)
            calls = Calls(engine)
            each = floor.submit(order(prompt(512), 5))
            await until(lambda: calls.of("prefill_next"))
            async with each:
                pass
            assert floor.health.state is HealthState.UNHEALTHY

    run(work())


def test_a_break_in_a_call_that_is_no_answer_latches_too_and_a_refusal_does_not(model_dir):
    """A session over gRPC, rows that are read for a cut: all run on the one engine."""

    async def work():
        async with floor_of(model_dir, slots=1) as (floor, engine):
            with pytest.raises(LimitError):
                generation = await engine.call(engine.model.new_generation)
                await engine.call(generation.prefill, [100_000])
            assert floor.health.state is HealthState.OK
            running = floor.submit(order(prompt(20), 500))
            await anext(running)
            with pytest.raises(ZeroDivisionError):
                await engine.call(lambda: 1 / 0)
            with pytest.raises(UnhealthyError, match="ZeroDivisionError"):
                async for _ in running:
                    pass
            assert floor.health.state is HealthState.UNHEALTHY and free(floor)

    run(work())


def test_a_break_in_a_call_that_nobody_waits_for_any_more_latches_too(model_dir):
    """A client over gRPC hung up while its call was under way."""

    async def work():
        async with floor_of(model_dir, slots=1) as (floor, engine):
            entered, go = threading.Event(), threading.Event()

            def breaks():
                entered.set()
                assert go.wait(10)
                raise RuntimeError("the accelerator is gone")

            waiting = asyncio.ensure_future(engine.call(breaks))
            await asyncio.to_thread(entered.wait, 10)
            waiting.cancel()
            await asyncio.wait({waiting})
            go.set()
            await until(lambda: floor.health.state is HealthState.UNHEALTHY)

    run(work())


def test_a_trail_that_fails_costs_no_slot(model_dir):
    class Fails(NoTrail):
        def end(self):
            raise KeyError("trail")

    async def work():
        async with floor_of(model_dir) as (_, engine):
            ladder = Watched(engine)
            ladder.trail = lambda tenant, stream, base: Fails()
            floor = Floor(engine, ladder, slots=1)
            floor.start()
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            await ask(floor, prompt(20), 2, keep=False)
            assert free(floor) and consistent(floor)
            await ask(floor, prompt(20), 2)
            # What the slot holds cannot be ended: that costs one answer, and not the next one.
            with pytest.raises(NodeError, match="KeyError"):
                await ask(floor, prompt(30, 2), 2)
            assert len((await ask(floor, prompt(30, 2), 2)).ids) == 2
            assert free(floor) and consistent(floor)

    run(work())


def test_an_error_of_this_program_ends_one_answer_and_no_other(model_dir, caplog):
    async def work():
        async with floor_of(model_dir, slots=2) as (floor, _):
            known = floor._tools.token_bytes

            def fails(token_id):
                if floor.counts.finished == 0:
                    raise ZeroDivisionError("secret text")
                return known(token_id)

            floor._tools = dataclasses.replace(floor._tools, token_bytes=fails)
            with pytest.raises(NodeError, match="ended with ZeroDivisionError") as raised:
                await ask(floor, prompt(20), 3)
            assert "secret" not in str(raised.value)
            assert floor.health.state is HealthState.OK and free(floor)
            floor._tools = dataclasses.replace(floor._tools, token_bytes=known)
            assert len((await ask(floor, prompt(20), 3)).ids) == 3

    run(work())


def test_a_full_engine_line_is_waited_for(model_dir):
    async def work():
        async with floor_of(model_dir, slots=1) as (floor, engine):
            flood = [engine.submit(lambda: __import__("time").sleep(0.002)) for _ in range(64)]
            answer = await ask(floor, prompt(30), 3)
            assert len(answer.ids) == 3
            await asyncio.gather(*flood)

    run(work())


def test_a_node_that_stops_lets_answers_end_and_ends_the_rest(model_dir):
    async def work():
        async with floor_of(model_dir, slots=1) as (floor, _):
            short, after = floor.submit(order(prompt(20), 5)), floor.submit(order(prompt(20, 2), 5))
            closing = asyncio.create_task(floor.close(20))
            await asyncio.sleep(0)
            assert floor.health.state is HealthState.DRAINING
            with pytest.raises(DrainingError):
                floor.submit(order(prompt(20)))
            assert [len((await read(each)).ids) for each in (short, after)] == [5, 5]
            await closing
        async with floor_of(model_dir, slots=1) as (floor, _):
            long, waiting = (floor.submit(order(prompt(20, k), 1500)) for k in (1, 2))
            task = asyncio.create_task(count_pieces(long))
            await floor.close(0.2)
            assert isinstance(await task, DrainingError)
            with pytest.raises(DrainingError):
                await anext(waiting)
            assert free(floor) and consistent(floor)

    run(work())


async def count_pieces(each):
    try:
        async for event in each:
            assert isinstance(event, Piece | Prefilled)
    except NodeError as error:
        return error
    return None
