"""Who waits for whom: steps take turns, prefill comes between them in short calls, lines end."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from floor_support import Calls, Watched, alone, ask, floor_of, order, read, same, until
from node_support import prompt, run

from node import pace as pace_module
from node.errors import OverloadedError
from node.pace import SHORT_CALL_TOKENS, STILL_S, Pace
from node.serving.floor import Floor
from node.serving.order import Prefilled
from node.serving.run import RunState
from node.serving.slots import SlotState


@pytest.mark.parametrize("top_logprobs", [None, 3])
def test_four_answers_take_turns_and_each_has_the_bits_of_one_alone(model_dir, top_logprobs):
    async def work():
        async with floor_of(model_dir, slots=4) as (floor, engine):
            calls = Calls(engine)
            prompts = [prompt(30, k) for k in range(4)]
            runs = [floor.submit(order(ids, 12, top_logprobs=top_logprobs)) for ids in prompts]
            answers = await asyncio.gather(*map(read, runs))
            for ids, answer in zip(prompts, answers, strict=True):
                (expected,) = await alone(engine, [ids], 12)
                assert answer.ids == [decoded.token_id for decoded in expected]
                assert top_logprobs is None or same(answer, expected)
            steps = [stream for name, stream, _ in calls.of("decode_next")][:48]
            streams = set(steps)
            assert len(streams) == 4
            # While all four decode, each makes one step before any makes its next. One whose
            # probabilities take longer may be overtaken, but not twice.
            round_steps = 4 if top_logprobs is None else 8
            begun = max(steps.index(stream) for stream in streams)
            ended = min(len(steps) - steps[::-1].index(stream) for stream in streams)
            assert ended - begun > 20
            for at in range(begun, ended - round_steps):
                assert set(steps[at : at + round_steps]) == streams

    run(work())


def test_a_long_prompt_delays_a_running_answer_by_one_short_call_at_most(model_dir, monkeypatch):
    # On a machine with better things to do, too.
    monkeypatch.setattr(pace_module, "GRACE_S", 5.0)

    async def work():
        async with floor_of(model_dir, slots=3) as (floor, engine):
            calls = Calls(engine)
            talking = floor.submit(order(prompt(20), 60, top_logprobs=3))
            assert isinstance(await anext(talking), Prefilled)
            await until(lambda: calls.of("decode_next"))
            long = [floor.submit(order(prompt(700, k), 2, top_logprobs=3)) for k in (1, 2)]
            answer, *others = await asyncio.gather(read(talking), *map(read, long))
            talker = calls.of("decode_next")[0][1]
            log = calls.of("decode_next", "prefill_next")
            first = log.index(next(e for e in log if e[0] == "decode_next" and e[1] == talker))
            last = (
                len(log)
                - 1
                - log[::-1].index(
                    next(e for e in log[::-1] if e[0] == "decode_next" and e[1] == talker)
                )
            )
            between = 0
            for name, stream, args in log[first : last + 1]:
                if stream == talker:
                    between = 0
                elif name == "prefill_next":
                    between += 1
                    assert args[0] <= SHORT_CALL_TOKENS
                    assert between <= 1
            # Two that prefill take turns.
            chunks = [stream for name, stream, _ in log[first : last + 1] if name == "prefill_next"]
            assert len(chunks) > 8
            assert all(a != b for a, b in itertools.pairwise(chunks[2:-2]))
            (expected,) = await alone(engine, [prompt(20)], 60)
            assert same(answer, expected)
            assert all(len(other.ids) == 2 for other in others)

    run(work())


def test_prefill_comes_back_to_the_coarse_grid_when_nobody_decodes(model_dir):
    async def work():
        async with floor_of(model_dir, slots=2) as (floor, engine):
            calls = Calls(engine)
            talking = floor.submit(order(prompt(20), 300))
            assert isinstance(await anext(talking), Prefilled)
            await until(lambda: calls.of("decode_next"))
            long = floor.submit(order(prompt(1200, 3), 1))
            await until(lambda: len(calls.of("prefill_next")) > 3)
            talking.cancel()
            await read(long)
            sizes = [args[0] for _, _, args in calls.of("prefill_next")][1:]
            assert sizes[0] == SHORT_CALL_TOKENS and 512 in sizes
            position = 0
            for size in sizes:
                assert position % 512 == 0 or size <= 512 - position % 512
                position += size
            assert position == 1199

    run(work())


def test_who_waits_is_let_in_by_priority_then_by_arrival(model_dir):
    async def work():
        async with floor_of(model_dir, slots=1) as (floor, _):
            begun = []
            first = floor.submit(order(prompt(20), 20))
            waiting = [
                floor.submit(order(prompt(20, k), 1, priority=p))
                for k, p in enumerate([1, 0, 1, -3])
            ]
            runs = [first, *waiting]
            assert first.state is RunState.RUNNING
            assert all(each.state is RunState.WAITING for each in waiting)

            async def follow(index, each):
                await read(each)
                begun.append((each.started_s, index))

            await asyncio.gather(*(follow(i, each) for i, each in enumerate(runs)))
            assert [index for _, index in sorted(begun)] == [0, 4, 2, 1, 3]

    run(work())


def test_more_than_may_wait_are_sent_away_and_told_when_to_come_again(model_dir):
    async def work():
        async with floor_of(model_dir, slots=1, waiting=64) as (floor, _):
            runs = [floor.submit(order(prompt(20, k), 1)) for k in range(65)]
            assert floor.status().waiting == 64
            with pytest.raises(OverloadedError, match="64 answers wait") as refused:
                floor.submit(order(prompt(20)))
            assert 1 <= refused.value.retry_after_s <= 60
            # Whoever leaves the line makes room at once, and is no text in it any more.
            runs[30].cancel()
            assert runs[30].state is RunState.ENDED and floor.status().waiting == 63
            runs.append(floor.submit(order(prompt(20), 1)))
            for each in runs[1:60]:
                each.cancel()
            answers = await asyncio.gather(*(read(r) for r in runs if r.error is None))
            assert all(len(answer.ids) == 1 for answer in answers) and len(answers) == 7
            assert floor.counts.refused == 1 and floor.counts.cancelled == 59
            assert floor.counts.finished == 7 and floor.counts.submitted == 66

    run(work())


def test_the_view_says_what_each_slot_does(model_dir):
    async def work():
        async with floor_of(model_dir) as (_, engine):
            ladder = Watched(engine)
            floor = Floor(engine, ladder, slots=2, stall_s=5)
            floor.start()
            ladder.gate.clear()
            each = floor.submit(order(prompt(600), 200))
            await until(lambda: ladder.begun)
            assert [slot.state for slot in floor.status().slots] == [
                SlotState.BEGIN,
                SlotState.IDLE,
            ]
            ladder.gate.set()
            await until(lambda: floor.status().slots[0].state is SlotState.PREFILL)
            await until(lambda: floor.status().slots[0].state is SlotState.DECODE)
            await until(lambda: floor.status().slots[0].state is SlotState.PAUSED)
            view = floor.status().slots[0]
            assert view.prompt_tokens == 600 and view.generated_tokens >= 60
            assert view.known_tokens == 600 + view.generated_tokens
            assert view.computed_tokens == view.known_tokens - 1 and view.running_s > 0
            each.cancel()
            await until(lambda: floor.status().slots[0].state is SlotState.IDLE)
            view = floor.status().slots[0]
            assert (view.prompt_tokens, view.generated_tokens, view.running_s) == (0, 0, 0)
            assert view.computed_tokens > 600
            await floor.close()
            assert floor.status().slots[0].known_tokens == 0

    run(work())


def test_a_lent_slot_makes_no_answer(model_dir):
    async def work():
        async with floor_of(model_dir, slots=1) as (floor, _):
            first = await ask(floor, prompt(40), 2)
            async with floor.lend(0) as slot:
                assert slot.held.stream.position == 41
                waiting = floor.submit(order(first.finished.token_ids, 1))
                await asyncio.sleep(0.02)
                assert waiting.state is RunState.WAITING
                with pytest.raises(OverloadedError, match="slot 0 is in use"):
                    async with floor.lend(0):
                        pass
                slot.hold(None)
            answer = await read(waiting)
            assert answer.usage.cached_tokens == 0
            assert floor.status().slots[0].known_tokens == 43

    run(work())


def test_the_pace_knows_who_decodes():
    now = [0.0]

    async def work():
        pace = Pace(lambda: now[0])
        assert pace.grid_tokens() == 512
        with pace.decoding() as decoder:
            assert pace.grid_tokens() == 64
            now[0] = STILL_S + 0.1
            # It waits for somebody else: a session that moves, a reader over gRPC.
            assert pace.grid_tokens() == 512
            with decoder.step():
                assert pace.grid_tokens() == 64
                # It waits for the engine, however slow that is: a long call would double its wait.
                now[0] += 10 * STILL_S
                assert pace.grid_tokens() == 64
            assert pace.grid_tokens() == 64
            decoder.still()
            assert pace.grid_tokens() == 512
            with decoder.step():
                pass
        assert pace.grid_tokens() == 512
        async with pace.prefill_turn() as grid:
            assert grid == 512
            second = asyncio.create_task(pace.prefill_turn().__aenter__())
            await asyncio.sleep(0)
            assert not second.done()
        await second

    run(work())


def test_a_prefill_call_lets_those_ask_first_who_are_between_two_steps(monkeypatch):
    async def work():
        monkeypatch.setattr(pace_module, "GRACE_S", 5.0)
        pace = Pace()

        async def turn():
            async with pace.prefill_turn() as grid:
                return grid

        def step(decoder):
            with decoder.step():
                pass

        with pace.decoding() as one, pace.decoding() as other:
            waits = asyncio.create_task(turn())
            step(one)
            await asyncio.sleep(0.01)
            assert not waits.done()
            step(other)
            assert await waits == SHORT_CALL_TOKENS
            # Each of them has to ask again, unless it waits for somebody else.
            waits = asyncio.create_task(turn())
            step(one)
            other.still()
            assert await waits == SHORT_CALL_TOKENS
            waits = asyncio.create_task(turn())
            await asyncio.sleep(0.01)
            assert not waits.done()
        assert await waits == 512
        monkeypatch.setattr(pace_module, "GRACE_S", 0.02)
        with pace.decoding():
            # Not for ever: a session may wait for its directory.
            assert await turn() == SHORT_CALL_TOKENS

    run(work())
