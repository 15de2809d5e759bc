"""What goes wrong in the store costs time and never bits, and is named."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
from ladder_support import rows, text

from kvpack.chunk import ChunkClass, seal_component
from kvpack.identity import NumericsFingerprint
from kvpack.store import Budget, CutWriter, HoldKind, StoreError, open_store
from kvpack.store.names import chunk_name
from node.serving.ladder import keeper as keeper_module
from node.serving.ladder import ladder as ladder_module
from node.serving.ladder.writing import tools
from node.serving.order import MissReason, Rung


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def remove(path):
    path.unlink()


async def two_turns(place):
    """Two turns of one text, durable; and the cuts' ids by position."""
    first = await place.answer(text(300), 4)
    second = await place.answer([*first.stream.token_ids, *text(60, 1)], 4)
    await place.ladder.settled()
    return first, second, {hold.position: hold.cut_id for hold in place.holds()}


def own_chunk(place, cuts, position, before, *, rows_only=True):
    """A chunk of the cut at ``position`` that the cut ``before`` does not need."""
    known = {ref.seal_id for ref in place.reader(cuts[before]).cut.manifest.references}
    for ref in place.reader(cuts[position]).cut.manifest.references:
        if ref.seal_id not in known and ref.has_rows is rows_only:
            return place.folder / chunk_name(ref.seal_id)
    raise AssertionError("no chunk of its own")


@pytest.mark.parametrize(
    ("damage", "rows_only"), [(flip, True), (cut_short, True), (remove, True), (flip, False)]
)
def test_a_damaged_cut_is_a_miss_that_the_next_deepest_serves_and_the_next_save_heals(
    laddered, damage, rows_only
):
    async def work(place):
        _, second, cuts = await two_turns(place)
        shallower, deepest = sorted(cuts)[-2:]
        assert deepest == second.stream.position
        damage(own_chunk(place, cuts, deepest, shallower, rows_only=rows_only))
        await place.again()
        known = second.stream.token_ids
        turn = await place.answer([*known, *text(9, 4)], 3)
        assert turn.base.position == shallower and turn.base.miss is MissReason.DAMAGED
        cold = await place.cold([*known, *text(9, 4)], 0)
        await place.ladder.settled()
        # The cut that replaces it is whole, from disk too.
        await place.again()
        healed = await place.ladder.begin("ours", [*known, *text(9, 4)])
        assert healed.position == len(known) + 8
        assert len(await rows(place.engine, healed.generation)) == len(
            await rows(place.engine, cold.stream.generation)
        )

    laddered(work)


def test_where_every_cut_is_damaged_the_answer_is_computed(laddered):
    async def work(place):
        _, second, _ = await two_turns(place)
        for path in place.chunks():
            flip(path)
        await place.again()
        turn = await place.answer(second.stream.token_ids, 3)
        assert (turn.base.rung, turn.base.miss) == (Rung.NONE, MissReason.DAMAGED)
        cold = await place.cold(second.stream.token_ids, 3)
        assert turn.logits == cold.logits
        await place.ladder.settled()
        await place.again()
        base = await place.ladder.begin("ours", turn.stream.token_ids)
        assert base.position == turn.stream.position
        assert await rows(place.engine, base.generation) == await rows(
            place.engine, turn.stream.generation
        )

    laddered(work)


def test_rows_of_another_build_are_a_counted_miss(laddered):
    async def work(place):
        _, second, _ = await two_turns(place)
        values = dict(place.binding("ours").numerics.values)
        values["mlx"] = "0.0.1"
        place.numerics = NumericsFingerprint(tuple(sorted(values.items())))
        turn = await place.answer(second.stream.token_ids, 2)
        assert (turn.base.position, turn.base.miss) == (0, MissReason.NUMERICS_CHANGED)
        await place.ladder.settled()
        # Cuts of both builds lie side by side, each for its own.
        base = await place.ladder.begin("ours", turn.stream.token_ids)
        assert base.position == turn.stream.position
        place.numerics = None
        base = await place.ladder.begin("ours", second.stream.token_ids)
        assert base.position == second.stream.position
        assert place.ladder.accounts.misses[MissReason.NUMERICS_CHANGED] == 1

    laddered(work)


def test_one_tenant_never_begins_from_anothers_cut(laddered):
    async def work(place):
        _, second, _ = await two_turns(place)
        theirs = await place.answer(second.stream.token_ids, 2, tenant="theirs")
        assert (theirs.base.position, theirs.base.miss) == (0, MissReason.COLD)
        await place.ladder.settled()
        base = await place.ladder.begin("theirs", theirs.stream.token_ids)
        assert base.position == theirs.stream.position

    laddered(work)


def test_a_prompt_that_leaves_a_collected_text_early_says_so(laddered):
    async def work(place):
        ids = text(700)
        for number in range(6):
            turn = await place.answer(ids, 2)
            ids = [*turn.stream.token_ids, *text(120, number)]
        await place.ladder.settled()
        await place.ladder.collect()
        accounts = place.ladder.accounts
        assert accounts.superseded > 0 and accounts.evicted == 0
        # The last four turns are there, and the one at 512; the cut at 700 is not.
        late = await place.ladder.begin("ours", [*turn.stream.token_ids, 1])
        assert late.position == turn.stream.position and late.miss is MissReason.NONE
        early = await place.ladder.begin("ours", [*text(700), *text(50, 99)])
        assert early.position == 512
        whole = await place.ladder.begin("ours", text(700))
        assert (whole.position, whole.miss) == (512, MissReason.WINDOW_COLLECTED)

    laddered(work)


@pytest.mark.parametrize("bytes_max", [0, 60_000])
def test_without_room_cuts_are_dropped_and_answers_go_on(laddered, bytes_max):
    async def work(place):
        turn = await place.answer(text(300), 4)
        await place.ladder.settled()
        accounts = place.ladder.accounts
        assert accounts.dropped > 0 and accounts.published == 0
        again = await place.answer(text(300), 4)
        assert again.logits == turn.logits and again.base.miss is MissReason.COLD
        assert place.chunks() == [] and place.holds() == []

    laddered(work, budget=Budget(bytes_max, 0))


def test_where_room_is_short_what_was_used_longest_ago_goes(laddered):
    async def work(place):
        turns = []
        for number in range(5):
            turns.append(await place.answer(text(300, number), 2))
            await place.ladder.settled()
        accounts = place.ladder.accounts
        assert accounts.evicted > 0 and accounts.dropped == 0
        used = sum(path.stat().st_size for path in place.folder.rglob("*") if path.is_file())
        assert used <= 250_000
        assert len(place.ladder._lineages) == len({hold.cut_id for hold in place.holds()})
        newest = await place.ladder.begin("ours", turns[-1].stream.token_ids)
        assert newest.position == turns[-1].stream.position
        oldest = await place.ladder.begin("ours", turns[0].stream.token_ids)
        assert (oldest.position, oldest.miss) == (0, MissReason.COLD)

    laddered(work, budget=Budget(250_000, 0))


def test_cuts_beyond_what_may_wait_are_counted_and_dropped(laddered, monkeypatch):
    monkeypatch.setattr(keeper_module, "WAITING_MAX", 4)

    async def work(place):
        await place.again()
        keeper = place.ladder._keeper
        gate, write = asyncio.Event(), keeper._write

        async def held(capture):
            await gate.wait()
            return await write(capture)

        monkeypatch.setattr(keeper, "_write", held)
        for number in range(5):
            await place.answer(text(40, number), 1)
        accounts = place.ladder.accounts
        assert place.ladder.pending == 5 and accounts.dropped == 5
        gate.set()
        await place.ladder.settled()
        assert accounts.published == 5
        assert place.ladder.pending == place.ladder.pending_bytes == 0

    laddered(work)


def test_what_waits_holds_no_more_memory_than_it_may(laddered, monkeypatch):
    monkeypatch.setattr(keeper_module, "WAITING_BYTES_MAX", 30_000)

    async def work(place):
        keeper = place.ladder._keeper
        gate, write = asyncio.Event(), keeper._write

        async def held(capture):
            await gate.wait()
            return await write(capture)

        monkeypatch.setattr(keeper, "_write", held)
        for number in range(4):
            await place.answer(text(40, number), 1)
            assert place.ladder.pending_bytes <= 30_000
        assert place.ladder.pending == 2
        gate.set()
        await place.ladder.settled()
        assert place.ladder.accounts.dropped == 6

    laddered(work)


def test_a_cut_of_the_whole_prompt_is_not_taken_even_with_its_logits(laddered):
    """The last token is always computed: what comes of it has the shape of a single call."""

    async def work(place):
        turn = await place.answer(text(40), 1)
        await place.ladder.settled()
        cuts = {hold.position: hold.cut_id for hold in place.holds()}
        cut = place.reader(cuts[40]).cut
        binding, store = place.binding("ours"), open_store(place.folder)
        logits = seal_component(binding.context, ChunkClass.FINAL_LOGITS, 39, 1, b"logits")
        with CutWriter(
            store, place.keyring, cut.header_bytes, tools(Budget(free_bytes_min=0))
        ) as w:
            w.rely(cut.manifest.references)
            w.add([logits])
            references = (*cut.manifest.references, logits.reference)
            manifest = dataclasses.replace(cut.manifest, references=references)
            w.publish(manifest, bytes(16), HoldKind.TURN, text(40))
        base = await place.ladder.begin("ours", text(40))
        assert base.position == 39
        assert turn.stream.position == 40

    laddered(work)


def test_an_error_of_this_program_costs_one_cut_and_not_the_next_ones(
    laddered, monkeypatch, caplog
):
    async def work(place):
        keeper, tried = place.ladder._keeper, []
        write = keeper._write

        async def broken(capture):
            tried.append(capture)
            if len(tried) == 1:
                raise KeyError("what somebody wrote")
            return await write(capture)

        monkeypatch.setattr(keeper, "_write", broken)
        await place.answer(text(40), 2)
        await asyncio.wait_for(place.ladder.settled(), 20)
        assert place.ladder.accounts.dropped == 1
        turn = await place.answer(text(44), 2)
        await asyncio.wait_for(place.ladder.settled(), 20)
        assert place.ladder.accounts.dropped == 1
        later = await place.answer([*turn.stream.token_ids, 3], 2)
        assert later.base.position > 0

    laddered(work)
    assert "an error of this program: KeyError at" in caplog.text
    assert "somebody" not in caplog.text


def test_a_background_that_dies_leaves_nobody_waiting(laddered, monkeypatch, caplog):
    """Of nothing that a job can raise."""

    class Ended(BaseException):
        pass

    async def work(place):
        async def broken(*_):
            raise Ended

        monkeypatch.setattr(place.ladder._keeper, "_write", broken)
        turn = await place.answer(text(40), 2)
        await asyncio.wait_for(place.ladder.settled(), 20)
        assert place.ladder.pending == 0 and place.ladder.accounts.dropped > 0
        later = await place.answer([*turn.stream.token_ids, 3], 2)
        assert later.base.position == 0
        await asyncio.wait_for(place.ladder.settled(), 20)

    laddered(work)
    assert "not kept any more" in caplog.text


def test_a_store_that_answers_too_late_is_a_miss(laddered, monkeypatch):
    monkeypatch.setattr(ladder_module, "FIND_S", 0.05)
    go_on = threading.Event()

    async def work(place):
        monkeypatch.setattr(ladder_module, "find", lambda *_, **__: go_on.wait(5))
        base = await place.ladder.begin("ours", text(50))
        assert (base.position, base.miss) == (0, MissReason.COLD)
        go_on.set()

    laddered(work)


def test_a_store_that_hangs_takes_no_thread_from_anybody_else(laddered, monkeypatch):
    """Text, records and the directory go through the loop's own threads: a lease hangs on them."""
    monkeypatch.setattr(ladder_module, "FIND_S", 0.05)
    go_on = threading.Event()

    async def work(place):
        monkeypatch.setattr(ladder_module, "find", lambda *_, **__: go_on.wait(20))
        try:
            begun = await asyncio.gather(*(place.ladder.begin("ours", text(50)) for _ in range(40)))
            assert all(base.position == 0 for base in begun)
            async with asyncio.timeout(10):
                assert await asyncio.to_thread(int) == 0
        finally:
            go_on.set()

    laddered(work)


def test_a_store_that_cannot_be_read_is_a_miss(laddered, monkeypatch):
    async def work(place):
        turn = await place.answer(text(300), 3)
        await place.ladder.settled()

        def broken(*_, **__):
            raise StoreError("no")

        for look in ("list", "scan", "entries"):
            monkeypatch.setattr(place.ladder._store, look, broken)
        base = await place.ladder.begin("ours", turn.stream.token_ids)
        assert (base.position, base.miss) == (0, MissReason.DAMAGED)

    laddered(work)


def test_a_begin_that_is_cancelled_leaves_nothing_behind(laddered):
    async def work(place):
        turn = await place.answer(text(600), 3)
        await place.ladder.settled()
        await place.again()
        for after in (0.0, 0.001, 0.003, 0.01):
            task = asyncio.create_task(place.ladder.begin("ours", turn.stream.token_ids))
            await asyncio.sleep(after)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        base = await place.ladder.begin("ours", turn.stream.token_ids)
        assert await rows(place.engine, base.generation) == await rows(
            place.engine, turn.stream.generation
        )

    laddered(work)


def test_a_cut_that_is_cancelled_half_way_spoils_no_later_one(laddered, monkeypatch):
    """Its rings were not copied, so nothing may count on them."""

    async def work(place):
        engine, ladder = place.engine, place.ladder
        turn = await place.answer(text(700), 3, cuts=False)
        trail = ladder.trail("ours", turn.stream, turn.base)
        task = asyncio.create_task(trail.cut(HoldKind.TURN))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(3):
            await engine.call(turn.stream.decode_next)
        await trail.cut(HoldKind.TURN)
        trail.end()
        trail.end()
        await trail.cut(HoldKind.TURN)
        await ladder.settled()
        base = await ladder.begin("ours", turn.stream.token_ids)
        assert base.position == turn.stream.position
        assert ladder.accounts.dropped == 0

    laddered(work, window=520)


def test_rows_that_this_node_did_not_compute_are_never_kept(laddered):
    async def work(place):
        turn = await place.answer(text(100), 2, cuts=False)
        foreign = dataclasses.replace(
            await place.ladder.begin("ours", [1], reuse=False), exact=False
        )
        trail = place.ladder.trail("ours", turn.stream, foreign)
        assert not trail.due(512)
        await trail.cut(HoldKind.TURN)
        await place.ladder.settled()
        assert place.holds() == []

    laddered(work)


def test_memory_holds_no_more_than_it_may(laddered):
    async def work(place):
        for number in range(3):
            await place.answer(text(300, number), 2)
        await place.ladder.settled()
        assert 0 < place.ladder.resident_bytes <= 100_000

    laddered(work, resident_bytes=100_000)
