"""What is brought back is what was cut, bit for bit, and nothing kept is computed again."""

from __future__ import annotations

import pytest
from ladder_support import WINDOW, rows, seeded, text

from kvpack.chunk import ChunkClass
from kvpack.store import HoldKind
from node.serving.order import MissReason, Rung
from node.stream import Stream

ARCHES = ("muse_glimmer", "cohere2", "gemma3", "llama")

#: Around the window, its wraps, the grid of chunks and the grid of calls.
LENGTHS = (2, WINDOW, WINDOW + 1, 2 * WINDOW + 1, 257, 514)


#: A window that holds whole blocks of the grid, which are sealed while they are live.
WIDE = 520


def whole_blocks(place) -> int:
    """How many chunks hold 256 rows of the one full layer."""
    row_bytes = place.engine.model.layout.row_bytes(3)
    return sum(path.stat().st_size > 256 * row_bytes for path in place.chunks())


async def assert_same_state(place, base, live: Stream) -> None:
    """``base`` is the live stream's state: every row, and the logits of the next call."""
    assert base.position == live.position
    assert await rows(place.engine, base.generation) == await rows(place.engine, live.generation)
    pending = live.token_ids[-1]
    ours = await place.engine.call(base.generation.step, pending)
    theirs = await place.engine.call(live.generation.step, pending)
    assert bytes(ours.data) == bytes(theirs.data)
    assert base.generation.schedule == live.generation.schedule


@pytest.mark.parametrize("arch", ARCHES)
def test_a_restored_generation_is_the_one_that_was_cut(laddered, arch):
    async def work(place):
        lengths = LENGTHS if arch == "muse_glimmer" else LENGTHS[2::2]
        turns = [await place.answer(text(n, salt), 3) for salt, n in enumerate(lengths)]
        await place.ladder.settled()
        for rung in (Rung.RESIDENT, Rung.DURABLE):
            for turn in turns if rung is Rung.RESIDENT else turns[-3:]:
                base = await place.ladder.begin("ours", turn.stream.token_ids)
                assert base.rung is rung and base.miss is MissReason.NONE
                if rung is Rung.DURABLE:
                    await assert_same_state(place, base, turn.stream)
                    continue
                held = await rows(place.engine, base.generation)
                assert held == await rows(place.engine, turn.stream.generation)
            await place.again()

    laddered(work, arch)


@pytest.mark.parametrize(
    ("arch", "window"),
    [*((arch, WINDOW) for arch in ARCHES), ("muse_glimmer", WIDE)],
)
def test_a_cut_is_of_its_moment_however_far_the_stream_went_on(laddered, arch, window):
    """The ring wraps, and blocks end, before the cut is even read."""

    async def work(place):
        engine, ladder = place.engine, place.ladder
        ids = text(250)
        base = await ladder.begin("ours", ids)
        stream = Stream(base.generation, ids, engine.model.vocab_size)
        trail = ladder.trail("ours", stream, base)
        cuts = []
        for _ in range(3):
            while size := stream.backlog_call(512):
                await engine.call(stream.prefill_next, size)
            await trail.cut(HoldKind.TURN)
            cuts.append((list(stream.token_ids), await rows(engine, stream.generation)))
            await engine.call(stream.decode_next)
            stream.extend(text(window + 1, stream.position))
        trail.end()
        await ladder.settled()
        await place.again()
        for ids, held in cuts:
            base = await place.ladder.begin("ours", ids)
            assert base.position == len(ids) - 1
            assert await rows(engine, base.generation) == held
        assert place.ladder.accounts.dropped == 0

    laddered(work, arch, window)


def test_whole_blocks_of_a_window_are_sealed_once_while_they_are_live(laddered):
    """Cuts a few tokens apart share all of a window but its first and last rows."""

    async def work(place):
        engine, ladder = place.engine, place.ladder
        turn = await place.answer(text(700), 1)
        for number in range(2):
            turn = await place.answer([*turn.stream.token_ids, *text(60, number)], 1)
            await ladder.settled()
        rings = [
            ref
            for hold in place.holds()
            for ref in place.reader(hold.cut_id).references(ChunkClass.SWA)
            if ref.token_count == 256 and hold.position > 690
        ]
        assert any(ref.is_trimmed for ref in rings) and ladder.accounts.dropped == 0
        assert len({ref.first_position for ref in rings}) == len({r.seal_id for r in rings}) == 2
        await place.again()
        base = await place.ladder.begin("ours", turn.stream.token_ids)
        assert base.position == turn.stream.position
        assert await rows(engine, base.generation) == await rows(engine, turn.stream.generation)

    laddered(work, window=WIDE)


@pytest.mark.parametrize(
    ("arch", "choice"),
    [("muse_glimmer", "greedy"), ("muse_glimmer", "seeded"), ("llama", "seeded")],
)
def test_warm_equals_cold_where_the_schedules_agree(laddered, arch, choice):
    """Two prompts part after the cut at 512: the second begins there, on the grid of calls.

    ``llama`` has no windows, so its cuts lie 2,048 tokens apart: the first prompt ends at 513.
    """

    async def work(place):
        decoding = seeded() if choice == "seeded" else None
        first = 700 if arch == "muse_glimmer" else 513
        await place.answer(text(first), 2)
        await place.ladder.settled()
        other = [*text(600 if arch == "muse_glimmer" else 512), *text(200, 9)]
        warm = await place.answer(other, 12, decoding=decoding)
        assert warm.base.position == 512 and warm.base.miss is (
            MissReason.INPUT_CHANGED if arch == "muse_glimmer" else MissReason.NONE
        )
        cold = await place.cold(other, 12, decoding=decoding)
        assert warm.tokens == cold.tokens and warm.logits == cold.logits
        assert warm.stream.generation.schedule == cold.stream.generation.schedule
        assert await rows(place.engine, warm.stream.generation) == await rows(
            place.engine, cold.stream.generation
        )

    laddered(work, arch)


@pytest.mark.parametrize("arch", ["muse_glimmer", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_conversation_of_twenty_windows_computes_only_what_is_new(laddered, arch):
    """The store is closed and opened between turns: nothing is left in memory."""

    async def work(place):
        ids, new = text(40), 0
        for number in range(10):
            turn = await place.answer(ids, 16)
            assert turn.evaluated <= new + 16 or number == 0
            assert turn.base.rung is (Rung.DURABLE if number else Rung.NONE)
            told = text(16, number + 20)
            ids, new = [*turn.stream.token_ids, *told], len(told)
            await place.ladder.settled()
            await place.again()
        assert len(ids) > 20 * WINDOW
        assert place.ladder.accounts.dropped == 0

    laddered(work, arch)


@pytest.mark.parametrize("arch", ["muse_glimmer", "gemma3"])
def test_an_edit_of_the_last_turn_begins_at_the_cut_before_it(laddered, arch):
    async def work(place):
        first = await place.answer(text(300), 20)
        second = await place.answer([*first.stream.token_ids, *text(40, 1)], 20)
        await place.ladder.settled()
        assert second.evaluated == 41
        edited = text(40, 1)[:10] + text(25, 2)
        turn = await place.answer([*first.stream.token_ids, *edited], 5)
        assert turn.base.position == first.stream.position
        assert turn.evaluated <= len(edited) + 16
        assert turn.base.miss is MissReason.INPUT_CHANGED
        unrelated = await place.answer(text(300, 50), 1)
        assert (unrelated.base.rung, unrelated.base.miss) == (Rung.NONE, MissReason.COLD)

    laddered(work, arch)


def test_nothing_deeper_than_the_caller_holds_is_brought_back(laddered):
    async def work(place):
        turn = await place.answer(text(300), 10)
        await place.ladder.settled()
        ids = [*turn.stream.token_ids, *text(10, 3)]
        held = await place.ladder.begin("ours", ids, above=turn.stream.position)
        assert (held.position, held.rung) == (0, Rung.NONE)
        deeper = await place.ladder.begin("ours", ids, above=turn.stream.position - 1)
        assert deeper.position == turn.stream.position
        accounts = place.ladder.accounts
        assert accounts.begun[Rung.CURRENT] == 1 and accounts.begun[Rung.RESIDENT] == 1
        assert accounts.restored_bytes == deeper.restored_bytes > 0

    laddered(work)


def test_a_prompt_of_one_token_and_one_that_is_held_whole_leave_the_boundary_token(laddered):
    async def work(place):
        lone = await place.answer([65], 2)
        assert (lone.base.position, lone.evaluated) == (0, 1)
        turn = await place.answer(text(3 * WINDOW), 1)
        await place.ladder.settled()
        for ids in (text(3 * WINDOW), turn.stream.token_ids):
            base = await place.ladder.begin("ours", ids)
            assert base.position == len(ids) - 1 and base.miss is MissReason.NONE

    laddered(work)


def test_rows_of_forty_texts_with_one_beginning_are_stored_once(laddered):
    async def work(place):
        system = text(1024)
        await place.answer([*system, 1], 1)
        await place.ladder.settled()
        before = whole_blocks(place)
        for number in range(4):
            turn = await place.answer([*system, *text(20, number)], 3)
            assert turn.evaluated <= 20 + 16
        await place.ladder.settled()
        assert whole_blocks(place) == before == 4

    laddered(work)
