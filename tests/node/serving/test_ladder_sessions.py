"""Sessions are woken as what they were, and texts that fork do not push one another out."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time

import pytest
from ladder_support import rows, seeded, text

from kvpack.identity import NumericsFingerprint
from kvpack.store import HoldKind, NotStoredError, StoreError
from node.directory import OwnershipToken
from node.errors import ConsentError, InventoryError, SessionStateError
from node.serving.ladder.collector import Collector
from node.serving.ladder.lineages import Lineages, is_text, new_lineage
from node.session import Session
from node.stream import Stream
from node.tier import lineage_of

TOKEN = OwnershipToken(bytes(16), 1, 1)


async def grown(place, ids, count, session_id="talk", decoding=None) -> Session:
    """A session that was given ``ids`` and generated ``count`` tokens, with the slots' cuts."""
    engine = place.engine
    generation = await engine.call(engine.model.new_generation)
    session = Session(session_id, TOKEN, generation, (), engine.model.vocab_size, decoding)
    session.trail = place.ladder.trail("ours", session, None)
    await go_on(place, session, ids, count)
    return session


async def go_on(place, session, ids, count) -> list[bytes]:
    session.extend(ids)
    while size := session.backlog_call(512):
        await place.engine.call(session.prefill_next, size)
        if session.trail is not None and session.trail.due(session.position):
            await session.trail.cut(HoldKind.CADENCE)
    logits = []
    for _ in range(count):
        decoded = await place.engine.call(session.decode_next)
        logits.append(bytes(decoded.logits.data))
    return logits


@pytest.mark.parametrize("arch", ["muse_glimmer", "llama"])
def test_a_woken_session_goes_on_as_if_it_had_never_slept(laddered, arch):
    async def work(place):
        session = await grown(place, text(530), 9, decoding=seeded())
        session.messages = (b'{"role":"user"}',)
        session.context_epoch = 3
        session.told_index -= 2
        cut_id = await place.ladder.keep_session("ours", session)
        await place.again()
        assert await place.ladder.newest_cut("ours", "talk") == cut_id
        woken = await place.ladder.restore_session("ours", cut_id)
        assert woken.position == session.position and woken.restored_bytes > 0
        again = woken.session("talk", TOKEN, place.engine.model.vocab_size)
        assert again.token_ids == session.token_ids
        for name in ("revision", "context_epoch", "messages", "told_index", "decoding"):
            assert getattr(again, name) == getattr(session, name)
        assert await rows(place.engine, again.generation) == await rows(
            place.engine, session.generation
        )
        again.trail = place.ladder.trail("ours", again, woken.base)
        ours, theirs = (
            await go_on(place, again, text(30, 8), 12),
            await go_on(place, session, text(30, 8), 12),
        )
        assert ours == theirs and again.token_ids == session.token_ids
        # Its next cut refers to what the first one sealed.
        before = place.ladder.accounts.shared_chunks
        await place.ladder.keep_session("ours", again)
        assert place.ladder.accounts.shared_chunks > before
        assert await place.ladder.newest_cut("ours", "talk") != cut_id

    laddered(work, arch)


def test_a_session_is_kept_at_its_moment_while_it_goes_on_at_once(laddered):
    async def work(place):
        session = await grown(place, text(100), 5)
        held, known = await rows(place.engine, session.generation), list(session.token_ids)
        task = asyncio.create_task(place.ladder.keep_session("ours", session))
        cut_id = await task
        await go_on(place, session, text(40, 2), 3)
        woken = await place.ladder.restore_session("ours", cut_id)
        assert list(woken.token_ids) == known
        assert await rows(place.engine, woken.generation) == held

    laddered(work)


def test_a_session_with_nothing_computed_or_with_a_backlog_before_its_first_call(laddered):
    async def work(place):
        session = await grown(place, [1], 0)
        with pytest.raises(SessionStateError):
            await place.ladder.keep_session("ours", session)

    laddered(work)


def test_what_cannot_be_woken_says_why(laddered):
    async def work(place):
        ladder = place.ladder
        session = await grown(place, text(50), 3)
        cut_id = await ladder.keep_session("ours", session)
        turn = await place.answer(text(60, 5), 2)
        await ladder.settled()
        plain = next(hold.cut_id for hold in place.holds() if hold.cut_id != cut_id)
        with pytest.raises(InventoryError, match="no session"):
            await ladder.restore_session("ours", plain)
        with pytest.raises(NotStoredError):
            await ladder.restore_session("ours", bytes(32))
        assert await ladder.newest_cut("ours", "another") is None
        assert await ladder.newest_cut("theirs", "talk") is None
        values = {**dict(place.binding("ours").numerics.values), "mlx": "0.0.1"}
        place.numerics = NumericsFingerprint(tuple(sorted(values.items())))
        with pytest.raises(ConsentError, match="mlx"):
            await ladder.restore_session("ours", cut_id)
        known = await ladder.read_session("ours", cut_id)
        assert list(known.token_ids) == session.token_ids
        woken = await ladder.restore_session("ours", cut_id, accept_compatible=True)
        assert woken.position == session.position
        assert turn.base.position == 0

    laddered(work)


def test_without_room_a_session_is_told_that_it_is_not_kept(laddered):
    from kvpack.store import Budget, StoreFullError

    async def work(place):
        session = await grown(place, text(50), 3)
        with pytest.raises(StoreFullError):
            await place.ladder.keep_session("ours", session)

    laddered(work, budget=Budget(1000, 0))


def test_a_volume_that_fails_is_told_as_a_store_that_does(laddered, monkeypatch):
    """Whoever lets sessions fall asleep goes on with the next one: it knows our errors alone."""

    async def work(place):
        async def fails(*_):
            raise OSError(5, "Input/output error")

        session = await grown(place, text(50), 3)
        await place.ladder.settled()
        with monkeypatch.context() as patched:
            patched.setattr(place.ladder._keeper, "_write", fails)
            with pytest.raises(StoreError, match="Input/output error"):
                await place.ladder.keep_session("ours", session)
        assert await place.ladder.keep_session("ours", session)

    laddered(work)


def test_texts_of_one_beginning_keep_their_last_turns_each(laddered):
    """Retention counts by lineage. In one of all texts together only four turns would stay."""

    async def work(place):
        system = text(530)
        ends = []
        for number in range(5):
            turn = await place.answer([*system, *text(12, number)], 2)
            ends.append(turn.stream.token_ids)
        await place.ladder.settled()
        await place.ladder.collect()
        for ids in ends:
            base = await place.ladder.begin("ours", ids)
            assert base.position == len(ids) - 1

    laddered(work)


def test_a_text_that_forks_while_its_cuts_are_written_is_a_lineage_of_its_own(laddered):
    """The cut at 512 is the newest in the store, and yet not where the first text ends."""

    async def work(place):
        keeper = place.ladder._keeper
        write, gate = keeper._write, asyncio.Event()

        async def held(capture):
            if capture.position > 512:
                await gate.wait()
            return await write(capture)

        keeper._write = held
        await place.answer([*text(530), 1], 2)
        fork = await place.ladder.begin("ours", [*text(520), 2, 3])
        assert (fork.position, fork.lineage) == (512, b"")
        gate.set()

    laddered(work)


def test_a_text_that_goes_on_stays_in_its_lineage_across_restarts(laddered):
    async def work(place):
        ids = text(300)
        for number in range(5):
            turn = await place.answer(ids, 2)
            ids = [*turn.stream.token_ids, *text(30, number)]
            await place.ladder.settled()
            await place.again()
            await place.ladder.settled()
        assert len({hold.lineage for hold in place.holds()}) == 1
        await place.ladder.collect()
        assert len([hold for hold in place.holds() if hold.kind is HoldKind.TURN]) == 4

    laddered(work)


def test_no_text_grows_among_the_cuts_of_a_session(laddered):
    async def work(place):
        session = await grown(place, text(300), 3)
        kept = await place.ladder.keep_session("ours", session)
        turn = await place.answer([*session.token_ids, *text(20, 4)], 2)
        assert turn.base.position == session.position
        await place.ladder.settled()
        assert await place.ladder.newest_cut("ours", "talk") == kept
        ours = lineage_of(place.binding("ours"), "talk")
        assert {hold.cut_id for hold in place.holds() if hold.lineage == ours} == {kept}

    laddered(work)


def test_a_text_that_goes_on_right_after_a_start_stays_in_its_lineage(laddered, monkeypatch):
    async def work(place):
        turn = await place.answer(text(300), 2)
        await place.ladder.settled()
        holds = Collector.holds

        def slowly(collector):
            time.sleep(0.2)
            return holds(collector)

        monkeypatch.setattr(Collector, "holds", slowly)
        await place.again()
        await place.answer([*turn.stream.token_ids, *text(30)], 2)
        await place.ladder.settled()
        assert len({hold.lineage for hold in place.holds()}) == 1

    laddered(work)


def test_a_rebuilt_session_is_kept_under_its_own_name(laddered):
    async def work(place):
        engine, ladder = place.engine, place.ladder
        session = await grown(place, text(300), 3)
        base = await ladder.begin("ours", text(200, 6))
        staged = Stream(base.generation, text(200, 6), engine.model.vocab_size)
        staged.trail = ladder.trail("ours", staged, base)
        await engine.call(staged.prefill_next, 199)
        await staged.trail.cut(HoldKind.PROMPT)
        await ladder.settled()
        await engine.call(session.rebuild, staged)
        await go_on(place, session, text(20, 7), 3)
        shared = ladder.accounts.shared_chunks
        kept = await ladder.keep_session("ours", session)
        assert await ladder.newest_cut("ours", "talk") == kept
        assert ladder.accounts.shared_chunks > shared
        woken = await ladder.restore_session("ours", kept)
        assert list(woken.token_ids) == session.token_ids and woken.state.context_epoch == 1

    laddered(work)


def test_a_trail_gives_its_lineage_back_once_however_it_ends(laddered):
    async def work(place):
        turn = await place.answer(text(50), 2, cuts=False)
        lineages, ladder = place.ladder._lineages, place.ladder

        def trail(base):
            return ladder.trail("ours", turn.stream, base)

        first = trail(None)
        lineage = first.line.lineage
        empty = await ladder.begin("ours", [1], reuse=False)
        again = dataclasses.replace(empty, lineage=lineage)
        assert trail(again).line.lineage != lineage
        first.end()
        second = trail(again)
        assert second.line.lineage == lineage
        # What is left of the first one says nothing for the second.
        del first
        gc.collect()
        assert trail(again).line.lineage != lineage
        del second
        gc.collect()
        assert lineages.take(place.binding("ours"), lineage) == lineage

    laddered(work)


def test_a_lineage_is_grown_by_one_text_at_a_time(laddered):
    async def work(place):
        binding, lineages = place.binding("ours"), Lineages()
        first = lineages.take(binding, b"")
        assert is_text(binding, first) and not is_text(place.binding("theirs"), first)
        assert not is_text(binding, lineage_of(binding, "talk"))
        assert lineages.take(binding, first) != first
        lineages.give_back(first)
        assert lineages.take(binding, first) == first
        assert new_lineage(binding) != new_lineage(binding)

    laddered(work)
