"""Answers in sessions that this node owns: held for one call at a time, moved, rebuilt, refused."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from floor_support import Calls, Watched, alone, consistent, order, read, same, until
from node_support import events, move, prompt, run

from engine import DecodingState
from kvpack.store import HoldKind
from node.errors import (
    FencedError,
    PeerAnswerError,
    RunCancelledError,
    SessionFrozenError,
    SessionMovedError,
    SessionStateError,
    StagingBusyError,
    StaleTokenError,
    StalledReaderError,
)
from node.migration import moves
from node.serving.floor import Floor
from node.serving.order import MissReason, Piece, Rung, SessionRef
from node.serving.slots import SlotState


@contextlib.asynccontextmanager
async def floor_over(node, slots=2, cadence=1 << 20, **options):
    """A floor over the sessions of ``node``, and what keeps rows for it."""
    ladder = Watched(node.sessions.engine, cadence)
    floor = Floor(node.sessions.engine, ladder, node.sessions, slots=slots, **options)
    floor.start()
    try:
        yield floor, ladder
    finally:
        await floor.close()


def ref(session, rebuild=False):
    return SessionRef(session.session_id, session.token, rebuild)


async def ask_in(floor, session, token_ids, count=4, rebuild=False, **fields):
    return await read(
        floor.submit(order(token_ids, count, session=ref(session, rebuild), **fields))
    )


def test_turns_of_a_session_have_the_bits_of_one_alone(world):
    async def work():
        async with world.node("source") as (node, _), floor_over(node) as (floor, ladder):
            engine, session = node.sessions.engine, await node.sessions.open("s")
            first = await ask_in(floor, session, prompt(600), 5, top_logprobs=3)
            ids = (*first.finished.token_ids, *prompt(30, 2))
            second = await ask_in(floor, session, ids, 5, top_logprobs=3)
            expected = await alone(engine, [prompt(600), prompt(30, 2)], 5)
            assert same(first, expected[0]) and same(second, expected[1])
            assert (first.usage.rung, first.usage.cached_tokens) == (Rung.NONE, 0)
            assert (second.usage.rung, second.usage.cached_tokens) == (Rung.CURRENT, 604)
            assert second.usage.miss is MissReason.NONE
            assert tuple(session.token_ids) == second.finished.token_ids
            assert session.told_index == session.next_index and session.revision == 2
            assert [cut[:2] for cut in ladder.cuts] == [
                (HoldKind.PROMPT, 599), (HoldKind.TURN, 604),
                (HoldKind.PROMPT, 634), (HoldKind.TURN, 639),
            ]  # fmt: skip
            assert len(ladder.trails) == 1 and session.pinned == 0
            # The slot kept nothing of it: the rows are the session's.
            assert all(slot.known_tokens == 0 for slot in floor.status().slots)

    run(work())


def test_grpc_and_slots_serve_the_same_session_one_after_the_other(world):
    async def work():
        async with world.node("source") as (node, client), floor_over(node) as (floor, _):
            opened = await client.append(await client.open("s"), prompt(40))
            said = await events(client, opened, 40, 4)
            session = await node.sessions.find("s")
            ids = (*session.token_ids, *prompt(10, 2))
            answer = await ask_in(floor, session, ids, 4, top_logprobs=3)
            expected = await alone(node.sessions.engine, [prompt(40), prompt(10, 2)], 4)
            assert [token for _, token, _ in said] == [d.token_id for d in expected[0]]
            assert same(answer, expected[1])
            again = await events(client, opened, 54, 4)
            assert [token for _, token, _ in again] == answer.ids

    run(work())


def test_prefill_over_grpc_and_in_slots_makes_short_calls_for_each_others_answers(world):
    async def work():
        async with world.node("source") as (node, client), floor_over(node) as (floor, _):
            calls = Calls(node.sessions.engine)

            def sizes(count):
                return [args[0] for name, _, args in calls.of("prefill_next")[-count:]]

            talking = floor.submit(order(prompt(20), 5000))
            await until(lambda: calls.of("decode_next"))
            opened = await client.open("s")
            reading = asyncio.create_task(read(talking))
            opened = await client.append(opened, prompt(300))
            assert sizes(5) == [64, 64, 64, 64, 43]
            talking.cancel()
            with pytest.raises(RunCancelledError):
                await reading
            # The other way round: a client over gRPC decodes.
            saying = asyncio.create_task(events(client, opened, 300, 80))
            session = await node.sessions.find("s")
            await until(lambda: session.next_index > 302)
            answer = await read(floor.submit(order(prompt(300, 5), 2)))
            assert len(answer.ids) == 2 and sizes(5) == [64, 64, 64, 64, 43]
            assert len(await saying) == 80
            # Nobody decodes any more.
            await read(floor.submit(order(prompt(300, 6), 2)))
            assert sizes(1) == [299]

    run(work())


def test_what_does_not_go_on_from_a_session_is_refused_and_changes_nothing(world):
    async def work():
        async with world.node("source") as (node, _), floor_over(node) as (floor, _):
            session = await node.sessions.open("s")
            first = await ask_in(floor, session, prompt(40), 3)
            known = first.finished.token_ids
            other = await node.sessions.open("other")
            wrong = [
                (known[:20], SessionStateError),
                ((*known[:20], 250, *known[21:], 1), SessionStateError),
            ]
            for ids, kind in wrong:
                with pytest.raises(kind):
                    await ask_in(floor, session, ids)
            stale = order(known, session=SessionRef("s", other.token))
            with pytest.raises(StaleTokenError):
                await read(floor.submit(stale))
            assert tuple(session.token_ids) == known and session.pinned == 0
            # A last token that was never computed may be another.
            replaced = (*known[:-1], (known[-1] + 1) % 251, *prompt(8))
            answer = await ask_in(floor, session, replaced, 3)
            assert answer.usage.cached_tokens == 42 and session.rewrites == 1
            assert tuple(session.token_ids) == answer.finished.token_ids
            bare = Floor(node.sessions.engine, Watched(node.sessions.engine))
            bare.start()
            with pytest.raises(SessionStateError, match="no sessions"):
                bare.submit(order(known, session=ref(session)))
            assert consistent(floor)

    run(work())


def test_one_answer_at_a_time_in_a_session_and_others_beside_it(world):
    async def work():
        async with world.node("source") as (node, client), floor_over(node) as (floor, _):
            session = await node.sessions.open("s")
            running = floor.submit(order(prompt(20), 30, session=ref(session)))
            with pytest.raises(SessionFrozenError, match="an answer is made in it"):
                floor.submit(order(prompt(20), session=ref(session)))
            beside = floor.submit(order(prompt(30), 5))
            assert len((await read(beside)).ids) == 5
            await anext(running)
            await until(lambda: session.next_index > 22)
            # Somebody else goes on in it: the answer's own place is taken.
            found = await client.get("s")
            await client.append(found, [1, 2, 3])
            with pytest.raises(SessionStateError, match="somebody else"):
                async for _ in running:
                    pass
            assert session.pinned == 0 and consistent(floor)

    run(work())


def test_a_session_that_moves_away_ends_its_answer_with_where_it_went(world):
    async def work():
        async with (
            world.pair() as (source, giving, target, _),
            floor_over(source, stall_s=30.0) as (floor, _),
        ):
            session = await source.sessions.open("s")
            running = floor.submit(order(prompt(60), 5000, session=ref(session)))
            beside = floor.submit(order(prompt(20), 40))
            await until(lambda: session.next_index > 64)
            result = await move(giving, target, await giving.get("s"))
            assert result is not None
            told = [piece async for piece in _until_error(running, SessionMovedError)]
            assert len((await read(beside)).ids) == 40
            # What was told is what arrived: nothing is lost and nothing is told twice.
            arrived = await target.sessions.find("s")
            said = [p.token_id for p in told]
            assert list(arrived.token_ids[60 : 60 + len(said)]) == said
            assert arrived.told_index == 60 + len(said)
            assert session.pinned == 0 and floor.counts.failed == 1 and consistent(floor)

    run(work())


async def _until_error(running, kind):
    from node.serving.order import Piece

    with pytest.raises(kind):
        async for event in running:
            if isinstance(event, Piece):
                yield event


def test_a_token_that_was_computed_while_the_lease_ended_is_not_told(world):
    """Somebody else may own the session by now, and choose another one."""

    async def work():
        async with world.node("source") as (node, _), floor_over(node) as (floor, _):
            session, lease = await node.sessions.open("s"), node.sessions.lease
            step, steps = session.decode_next, iter(range(10**9))

            def decode_next():
                if next(steps) == 3:
                    lease._end_s = float("-inf")
                return step()

            session.decode_next = decode_next
            said = []
            with pytest.raises(FencedError):
                async for event in floor.submit(order(prompt(40), 50, session=ref(session))):
                    said.append(event)
            assert len([event for event in said if isinstance(event, Piece)]) == 3
            assert (session.next_index, session.told_index) == (44, 43)

    run(work())


def test_a_session_whose_reader_stalls_can_be_served_by_others(world):
    async def work():
        async with (
            world.node("source") as (node, client),
            floor_over(node, stall_s=0.3) as (floor, _),
        ):
            session = await node.sessions.open("s")
            stalled = floor.submit(order(prompt(20), 500, session=ref(session)))
            await until(lambda: floor.status().slots[0].state is SlotState.PAUSED)
            known = session.next_index
            assert not session.lock.locked()
            assert (await client.get("s")).next_index == known
            with pytest.raises(StalledReaderError):
                async for _ in stalled:
                    await asyncio.sleep(0.02)
            again = await ask_in(floor, session, (*session.token_ids, 7), 2)
            assert again.usage.cached_tokens == known - 1

    run(work())


def test_a_rebuilt_context_is_swapped_in_whole(world):
    async def work():
        async with world.node("source") as (node, _), floor_over(node) as (floor, ladder):
            engine, session = node.sessions.engine, await node.sessions.open("s")
            first = await ask_in(floor, session, prompt(300), 3)
            shifted = (*prompt(40, 8), *first.finished.token_ids[-60:])
            answer = await ask_in(floor, session, shifted, 5, rebuild=True, top_logprobs=3)
            (expected,) = await alone(engine, [shifted], 5)
            assert same(answer, expected)
            assert answer.usage.evaluated_tokens == 100
            assert session.context_epoch == 1 and session.rewrites == 1 and session.pinned == 0
            assert tuple(session.token_ids) == answer.finished.token_ids
            assert session.position == 104 and floor.counts.rebuilds == 1
            assert not floor.status().staging
            # The cuts go on in the trail of the new context, and the old one is ended.
            assert [trail.ended for trail in ladder.trails] == [1, 0]
            assert ladder.cuts[-1] == (HoldKind.TURN, 104, answer.finished.token_ids[:-1])
            after = await ask_in(
                floor, session, (*answer.finished.token_ids, 3, 4), 5, top_logprobs=3
            )
            twin = await alone(engine, [shifted, (3, 4)], 5)
            assert same(after, twin[1]) and len(ladder.trails) == 2

    run(work())


def test_a_client_that_left_before_its_rebuild_began_costs_nothing(world):
    async def work():
        async with world.node("source") as (node, _), floor_over(node, slots=1) as (floor, ladder):
            session = await node.sessions.open("s")
            first = await ask_in(floor, session, prompt(300), 3)
            calls, begun = Calls(node.sessions.engine), len(ladder.begun)
            blocker = floor.submit(order(prompt(20), 500))
            left = floor.submit(order(prompt(90, 8), session=ref(session, rebuild=True)))
            assert floor.status().staging
            async with left:
                pass
            async with blocker:
                pass
            assert not floor.status().staging and len(ladder.begun) <= begun + 1
            assert all(args[0] < 20 for _, _, args in calls.of("prefill_next"))
            assert tuple(session.token_ids) == first.finished.token_ids
            assert session.context_epoch == 0
            # In the midst of it, too, the session is as it was, and staging is free again.
            ladder.gate.clear()
            left = floor.submit(order(prompt(90, 8), session=ref(session, rebuild=True)))
            await until(lambda: ladder.begun[-1] == (90, 0))
            async with left:
                pass
            ladder.gate.set()
            assert session.context_epoch == 0 and session.pinned == 0
            assert not floor.status().staging

    run(work())


def test_a_client_that_leaves_during_the_swap_leaves_the_new_context(world):
    async def work():
        async with world.node("source") as (node, _), floor_over(node) as (floor, ladder):
            session = await node.sessions.open("s")
            await ask_in(floor, session, prompt(50), 2)
            swap = session.rebuild

            def rebuild(staged):
                time.sleep(0.1)
                swap(staged)

            session.rebuild = rebuild
            calls = Calls(node.sessions.engine)
            left = floor.submit(order(prompt(60, 3), session=ref(session, rebuild=True)))
            await until(lambda: calls.of("rebuild"))
            async with left:
                pass
            assert session.context_epoch == 1 and tuple(session.token_ids) == tuple(prompt(60, 3))
            assert [trail.ended for trail in ladder.trails] == [1, 0]
            assert session.trail is ladder.trails[1]
            assert floor.counts.rebuilds == 1 and not floor.status().staging
            answer = await ask_in(floor, session, prompt(60, 3), 3)
            assert answer.usage.cached_tokens == 59

    run(work())


def test_a_second_rebuild_is_sent_away_while_one_is_under_way(world):
    async def work():
        async with world.node("source") as (node, _), floor_over(node) as (floor, ladder):
            sessions = [await node.sessions.open(name) for name in ("a", "b")]
            for session in sessions:
                await ask_in(floor, session, prompt(50), 2)
            ladder.gate.clear()
            first = floor.submit(order(prompt(60, 3), 2, session=ref(sessions[0], rebuild=True)))
            with pytest.raises(StagingBusyError) as refused:
                floor.submit(order(prompt(60, 4), session=ref(sessions[1], rebuild=True)))
            assert refused.value.retry_after_s >= 1
            ladder.gate.set()
            await read(first)
            answer = await ask_in(floor, sessions[1], prompt(60, 4), 2, rebuild=True)
            assert len(answer.ids) == 2 and floor.counts.refused == 1

    run(work())


def test_a_session_that_changed_while_it_was_rebuilt_keeps_what_it_has(world):
    async def work():
        async with world.node("source") as (node, client), floor_over(node) as (floor, ladder):
            session = await node.sessions.open("s")
            await ask_in(floor, session, prompt(50), 2)
            ladder.gate.clear()
            rebuilding = floor.submit(order(prompt(60, 3), session=ref(session, rebuild=True)))
            await until(lambda: ladder.begun[-1] == (60, 0))
            await client.append(await client.get("s"), [1, 2])
            ladder.gate.set()
            with pytest.raises(SessionStateError, match="somebody else"):
                async for _ in rebuilding:
                    pass
            assert session.token_ids[-2:] == [1, 2] and session.context_epoch == 0
            assert ladder.trails[-1].ended == 1 and not floor.status().staging

    run(work())


def test_a_live_move_of_a_session_that_is_rebuilt_fails_and_loses_nothing(world, monkeypatch):
    """Its first rows left as the old context's; a cut of both would be a state that nobody had."""
    monkeypatch.setattr(moves, "FREEZE_WAIT_S", 0.1)

    async def work():
        async with (
            world.pair() as (source, giving, target, _),
            floor_over(source) as (floor, ladder),
        ):
            session = await source.sessions.open("s")
            await ask_in(floor, session, prompt(700), 2)
            ladder.gate.clear()
            staged = floor.submit(order(prompt(80, 5), 3, session=ref(session, rebuild=True)))
            await until(lambda: ladder.begun[-1] == (80, 0))
            calls = Calls(source.sessions.engine)
            async with session.lock:
                moving = asyncio.create_task(move(giving, target, await giving.get("s")))
                # Its whole blocks are sent; for the rest it waits until the session is free.
                await until(lambda: calls.of("_read_tiles"))
                ladder.gate.set()
                await until(lambda: calls.of("prefill_next"))
                await asyncio.sleep(0.3)
                assert not moving.done()
            with pytest.raises(PeerAnswerError, match="was replaced while it was sent"):
                await moving
            answer = await read(staged)
            assert tuple(session.token_ids) == answer.finished.token_ids
            assert answer.finished.token_ids[:80] == tuple(prompt(80, 5))
            # And then it moves, as it is now.
            await move(giving, target, await giving.get("s"))
            arrived = await target.sessions.find("s")
            assert tuple(arrived.token_ids[:83]) == answer.finished.token_ids

    run(work())


def test_half_a_character_stays_with_the_session_of_an_answer_that_was_cancelled(world):
    """Fault 40: what was told and what waits are all that was generated, nothing twice."""

    async def work():
        async with world.node("source") as (node, _), floor_over(node) as (floor, _):
            session = await node.sessions.open("s")
            running, told = floor.submit(order(prompt(20), 60, session=ref(session))), ""
            async with running:
                async for event in running:
                    told += getattr(event, "text", "")
                    if session.decoding.text.pending:
                        break
            # A token that came when nobody was there any more is known, and told to nobody.
            assert session.next_index - 1 <= session.told_index <= session.next_index
            bytes_of = node.sessions.engine.model.token_bytes()
            known = session.token_ids[20 : session.told_index]
            text, after = DecodingState().text.push(b"".join(map(bytes_of, known)))
            assert text.startswith(told) and told
            assert session.decoding.text == after

    run(work())
