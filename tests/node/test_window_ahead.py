"""Blocks of a live session's windows that are sealed before its freeze."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools

import pytest
from node_support import LAYERS, events, move, prompt, run
from plane_support import intake_of, offering, redirect, two
from test_resume import Breaking, at

from kvpack.layout import LayerKind
from kvpack.limits import GRID_TOKENS
from kvpack.snapshot import Tile, TileSpec, cut_tile_specs
from node.dataplane.options import Plane, plane_message
from node.errors import NodeBusyError, PeerAnswerError, PeerUnavailableError
from node.migration import producer as producer_module
from node.migration.feed import Feed
from node.migration.producer import Producer
from node.migration.tape import SETTLED_TOKENS, Tape
from node.migration.window import WindowAhead
from node.stream import Stream
from tests.small_model import make_small_model

#: Four to five blocks: at 1800 rows, 1,024 to 1,792 are whole in it.
WINDOW = 1024
TOKENS = 1801
#: One whose oldest row begins a block where no block of the full layers ends.
ODD_WINDOW = 1000

#: Item of the tape that is the last whole block of the full layers: the seventh.
LAST_WHOLE = 6

SETTLED = {(1024, 256), (1280, 256), (1536, 256)}


@pytest.fixture
def wide(world, tmp_path):
    """Nodes of a model whose window holds several blocks."""
    return with_window(world, tmp_path / "wide", WINDOW)


def with_window(world, folder, window):
    make_small_model(folder, "muse_glimmer", seed=3, window=window, layers=LAYERS)
    return dataclasses.replace(world, model_dir=folder)


@pytest.fixture
def producers(monkeypatch):
    """Whatever makes what a move sends, as it is made."""
    made, init = [], Producer.__init__

    def noted(producer, *args, **kwargs):
        init(producer, *args, **kwargs)
        made.append(producer)

    monkeypatch.setattr(Producer, "__init__", noted)
    return made


@dataclasses.dataclass
class Seals:
    """Which windows' rows were sealed before the freeze and which after, each as (first, count)."""

    before: list
    after: list

    @classmethod
    def watch(cls, monkeypatch) -> Seals:
        found = cls([], [])
        seal, note = producer_module.seal_tile_framed, Producer._note_state
        frozen = []

        def sealed(context, tile, *others):
            if tile.spec.kind is LayerKind.SWA:
                into = found.after if frozen else found.before
                into.append((tile.spec.first_position, tile.spec.token_count))
            return seal(context, tile, *others)

        def noted(producer, cut):
            frozen.append(cut)
            note(producer, cut)

        monkeypatch.setattr(producer_module, "seal_tile_framed", sealed)
        monkeypatch.setattr(Producer, "_note_state", noted)
        return found


async def moved_and_twin(giving, target, taking, *given, **wish):
    """``(result, moved, expected)``: what session ``s`` says next on both sides of a live move.

    ``given`` are its lengths after each time that it was given tokens: a twin that got them at
    another place was computed in other calls, and may have other bits on a GPU.
    """
    given = given or (TOKENS,)
    twin = await giving.open("twin")
    for start, end in itertools.pairwise((0, *given)):
        twin = await giving.append(twin, prompt(end)[start:])
    expected = await events(giving, twin, given[-1], 8)
    result = await move(giving, target, await giving.get("s"), **wish)
    return result, await events(taking, await taking.get("s"), given[-1], 8), expected


def test_settled_blocks_are_chunks_of_every_cut_soon_after(wide):
    async def work():
        async with wide.node("source") as (node, _):
            return node.sessions.engine.model.layout

    layout = run(work())
    most = 0
    for position in [*range(1, 3 * GRID_TOKENS, 37), *range(WINDOW - 70, WINDOW + 600, 7)]:
        settled = Tape(layout).settled(position)
        most = max(most, len(settled))
        assert all(spec.end_position <= position for spec in settled)
        for later in (0, 1, SETTLED_TOKENS - 1, SETTLED_TOKENS):
            assert set(settled) <= set(cut_tile_specs(layout, position + later))
    assert most == (WINDOW - SETTLED_TOKENS) // GRID_TOKENS


def test_what_is_held_is_what_was_asked_for_last_and_is_given_once(wide):
    """One window set: neither older blocks nor given ones stay."""

    async def work():
        async with wide.node("source") as (node, _):
            layout = node.sessions.engine.model.layout
        specs = Tape(layout).settled(TOKENS)

        async def read(asked):
            return [Tile(spec, bytes(spec.data_bytes(layout))) for spec in asked]

        ahead = WindowAhead(read, lambda tile: (None, bytes(tile.spec.first_position)))
        await ahead.renew(specs[:2], lambda: None)
        await ahead.renew(specs[1:], lambda: None)
        held = ahead.specs
        taken = [ahead.take(spec) for spec in (specs[1], specs[1], specs[0])]
        return specs, held, taken, ahead.specs

    specs, held, taken, left = run(work())
    assert held == set(specs[1:]) and left == set(specs[2:])
    assert taken == [(None, bytes(specs[1].first_position)), None, None]


def test_only_the_ends_of_a_window_are_sealed_after_the_freeze(wide, monkeypatch, producers):
    async def work():
        async with wide.pair() as (_, giving, target, taking):
            await giving.append(await giving.open("s"), prompt(TOKENS))
            seals = Seals.watch(monkeypatch)
            return await moved_and_twin(giving, target, taking), seals

    (result, moved, expected), seals = run(work())
    assert moved == expected and result.continuation_verdict == "exact"
    assert set(seals.before) == SETTLED and len(seals.before) == len(SETTLED)
    assert seals.after == [(776, 248), (1792, 8)]
    # They leave first, and nothing of them stays.
    tape = producers[-1].tape
    first = tape.items[tape.cut_index : tape.cut_index + len(SETTLED)]
    assert {(spec.first_position, spec.token_count) for spec in first} == SETTLED
    assert not producers[-1]._window.specs


@pytest.mark.parametrize(
    ("window", "compress"), [(WINDOW, False), (1000, True), (600, False), (5000, False)]
)
def test_a_block_that_the_window_left_before_the_freeze_is_not_sent(
    world, tmp_path, monkeypatch, producers, window, compress
):
    """What is known and not computed yet is computed within the freeze: the window goes on."""
    some = with_window(world, tmp_path / "some", window)
    renew, more = WindowAhead.renew, prompt(TOKENS + 700)[TOKENS:]

    async def work():
        async with some.pair() as (source, giving, target, taking):
            await giving.append(await giving.open("s"), prompt(TOKENS))
            session, held = await source.sessions.find("s"), []

            async def renew_and_extend(ahead, *others):
                await renew(ahead, *others)
                if not held:
                    held.extend(spec.first_position for spec in ahead.specs)
                    await source.sessions.engine.call(session.extend, more)

            monkeypatch.setattr(WindowAhead, "renew", renew_and_extend)
            told = await moved_and_twin(
                giving, target, taking, TOKENS, TOKENS + 700, compress=compress
            )
            return *told, held

    result, moved, expected, held = run(work())
    assert moved == expected and result.continuation_verdict == "exact"
    tape, cut = producers[-1].tape, TOKENS + 700 - 1
    oldest = max(0, cut - window)
    sent = [item for item in tape.items if isinstance(item, TileSpec)]
    assert sorted(map(repr, sent)) == sorted(map(repr, cut_tile_specs(tape.layout, cut)))
    # Some were of no use, unless the window holds everything.
    assert any(first < oldest for first in held) == (window < TOKENS)
    assert not producers[-1]._window.specs


def test_rows_that_left_their_window_before_they_were_read_are_left_out(wide, monkeypatch):
    """Between the look at a session and the copy of its rows it may be given any number."""
    read, more = Producer._read_live, prompt(TOKENS + 700)[TOKENS:]
    gone = []

    async def work():
        async with wide.pair() as (_, giving, target, taking):
            await giving.append(await giving.open("s"), prompt(TOKENS))

            async def append_and_read(producer, specs):
                if not gone:
                    await giving.append(await giving.get("s"), more)
                tiles = await read(producer, specs)
                gone.extend(spec for spec, t in zip(specs, tiles, strict=True) if t is None)
                return tiles

            monkeypatch.setattr(Producer, "_read_live", append_and_read)
            return await moved_and_twin(giving, target, taking, TOKENS, TOKENS + 700)

    result, moved, expected = run(work())
    assert moved == expected and result.continuation_verdict == "exact"
    assert {spec.first_position for spec in gone} == {1024, 1280}


def test_what_was_sealed_ahead_is_made_again_for_a_link_that_lost_it(wide, monkeypatch, producers):
    write, lost = Feed._write, []

    async def breaks(feed, call, sealed):
        if sealed.index == feed.tape.cut_index + 1 and feed.tape.cut is not None and not lost:
            lost.append(feed.tape.items[sealed.index].first_position)
            raise PeerUnavailableError("cut")
        await write(feed, call, sealed)

    async def work():
        async with wide.pair() as (_, giving, target, taking):
            await giving.append(await giving.open("s"), prompt(TOKENS))
            seals = Seals.watch(monkeypatch)
            monkeypatch.setattr(Feed, "_write", breaks)
            return await moved_and_twin(giving, target, taking), seals

    (result, moved, expected), seals = run(work())
    assert lost == [1280] and result.resumed == 1
    assert moved == expected and result.continuation_verdict == "exact"
    # Once before the freeze, and again after the break: what was held for its turn was let go.
    assert (1280, 256) in seals.before and (1280, 256) in seals.after


def test_a_stream_that_breaks_lets_go_of_what_was_sealed_ahead(wide, monkeypatch, producers):
    """Its turn at the wire is another's then, who seals a window set of his own."""
    renew, seen = WindowAhead.renew, []

    async def work():
        async with wide.pair() as (_, giving, target, _taking):
            for name in "ab":
                await giving.append(await giving.open(name), prompt(TOKENS))

            async def renew_and_break(ahead, *others):
                await renew(ahead, *others)
                seen.append([len(producer._window.specs) for producer in producers])
                if len(seen) == 1:
                    raise PeerUnavailableError("cut")

            monkeypatch.setattr(WindowAhead, "renew", renew_and_break)
            first = asyncio.create_task(move(giving, target, await giving.get("a")))
            while not producers:
                await asyncio.sleep(0.001)
            second = asyncio.create_task(move(giving, target, await giving.get("b")))
            return await first, await second

    first, second = run(work())
    # Whichever of the two had the turn first.
    assert sorted((first.resumed, second.resumed)) == [0, 1]
    assert len(seen) >= 3 and all(sum(map(bool, held)) == 1 for held in seen)


def test_a_link_that_breaks_while_blocks_are_sealed_is_not_noticed_late(wide, monkeypatch):
    """Every batch waits for an engine that others use: the time for going on would be over."""
    read, write, tell, broken = Producer._read_live, Feed._write, Producer.tell, []
    reads, told = [], []

    async def waits(producer, specs):
        reads.append(bool(broken))
        told.append(0)
        await asyncio.sleep(1.2)
        return await read(producer, specs)

    def noted(producer):
        if told:
            told[-1] += 1
        tell(producer)

    async def breaks(feed, call, sealed):
        await write(feed, call, sealed)
        if sealed.index == LAST_WHOLE and not broken:
            while not reads:
                await asyncio.sleep(0.001)
            broken.append(len(reads))
            raise PeerUnavailableError("cut")

    async def work():
        async with wide.pair() as (source, giving, target, taking):
            source.moves._source = dataclasses.replace(source.moves.source, resume_s=3.0)
            await giving.append(await giving.open("s"), prompt(TOKENS))
            monkeypatch.setattr("node.migration.window.BATCH_TILES", 1)
            monkeypatch.setattr(Producer, "_read_live", waits)
            monkeypatch.setattr(Producer, "tell", noted)
            monkeypatch.setattr(Feed, "_write", breaks)
            return await moved_and_twin(giving, target, taking)

    result, moved, expected = run(work())
    assert moved == expected and result.continuation_verdict == "exact" and result.resumed == 1
    # The batch that was being read, then all of them in the stream after it; each one tells.
    assert broken == [1] and len(reads) == 1 + len(SETTLED)
    assert all(told)


@pytest.mark.parametrize("error", [MemoryError, NodeBusyError])
def test_what_cannot_be_sealed_ahead_is_sealed_when_it_is_sent(wide, monkeypatch, error):
    read, failed = Producer._read_live, []

    async def fails(producer, specs):
        if specs[0].first_position > 1024 and not failed:
            failed.append(specs[0].first_position)
            raise error("nothing left")
        return await read(producer, specs)

    async def work():
        async with wide.pair() as (_, giving, target, taking):
            await giving.append(await giving.open("s"), prompt(TOKENS))
            seals = Seals.watch(monkeypatch)
            monkeypatch.setattr("node.migration.window.BATCH_TILES", 1)
            monkeypatch.setattr(Producer, "_read_live", fails)
            return await moved_and_twin(giving, target, taking), seals

    (result, moved, expected), seals = run(work())
    assert moved == expected and (result.continuation_verdict, result.resumed) == ("exact", 0)
    assert failed == [1280] and seals.before == [(1024, 256)]
    assert (1280, 256) in seals.after


@pytest.mark.parametrize("plane", [Plane.MTLS, Plane.SOCKET])
def test_a_link_that_breaks_while_nothing_is_sent_is_known_before_the_freeze(
    wide, monkeypatch, plane
):
    """No write fails then; frozen, the session would wait for a new connection."""
    read, note, push, seen = Producer._read_live, Producer._note_state, Feed._push, []

    async def pushes(feed, *others):
        seen.append("stream")
        await push(feed, *others)

    monkeypatch.setattr(Feed, "_push", pushes)

    async def work():
        async with two(wide, offering(Plane.SOCKET)) as (_, giving, target, taking):
            beside = intake_of(target).addresses[Plane.SOCKET]
            link = Breaking(target.address if plane is Plane.MTLS else beside)

            async def breaks(producer, specs):
                if "broken" not in seen:
                    # What was written has left by then.
                    await asyncio.sleep(0.3)
                    link.cut()
                    seen.append("broken")
                await asyncio.sleep(0.4)
                return await read(producer, specs)

            def noted(producer, cut):
                seen.append(cut)
                note(producer, cut)

            monkeypatch.setattr("node.migration.window.BATCH_TILES", 1)
            monkeypatch.setattr(Producer, "_read_live", breaks)
            monkeypatch.setattr(Producer, "_note_state", noted)
            await giving.append(await giving.open("s"), prompt(TOKENS))
            async with link.open() as address:
                place = at(target, address) if plane is Plane.MTLS else target
                redirect(target, Plane.SOCKET, beside if plane is Plane.MTLS else address)
                wish = {"data_plane": plane_message(plane)}
                return await moved_and_twin(giving, place, taking, **wish)

    result, moved, expected = run(work())
    assert moved == expected and result.continuation_verdict == "exact"
    assert (result.resumed, result.data_plane) == (1, plane.value)
    # The stream that broke never came to the freeze: it was noticed within three batches.
    assert seen == ["stream", "broken", "stream", TOKENS - 1]


@pytest.mark.parametrize("tokens", [500, TOKENS], ids=["shorter", "as long"])
def test_a_context_that_is_replaced_meanwhile_ends_the_move_in_these_words(
    wide, monkeypatch, tokens
):
    read, done = Producer._read_live, []

    async def work():
        async with wide.pair() as (source, giving, target, _taking):
            await giving.append(await giving.open("s"), prompt(TOKENS))
            session, engine = await source.sessions.find("s"), source.sessions.engine

            def rebuild():
                model = engine.model
                staged = Stream(model.new_generation(), prompt(tokens, 9), model.vocab_size)
                staged.prefill_next(tokens - 1)
                session.rebuild(staged)

            async def rebuild_and_read(producer, specs):
                if not done:
                    done.append(True)
                    async with session.lock:
                        await engine.call(rebuild)
                return await read(producer, specs)

            monkeypatch.setattr(Producer, "_read_live", rebuild_and_read)
            with pytest.raises(PeerAnswerError, match="context was replaced"):
                await move(giving, target, await giving.get("s"))
            return await events(giving, await giving.get("s"), tokens, 3)

    assert len(run(work())) == 3


def test_a_session_that_decodes_on_goes_on_as_its_twin(wide, monkeypatch, producers):
    count, renewed, renew = 120, [], WindowAhead.renew

    async def noted(ahead, specs, still):
        renewed.append(len(specs))
        await renew(ahead, specs, still)

    monkeypatch.setattr(WindowAhead, "renew", noted)

    async def work():
        async with wide.pair() as (_, giving, target, taking):
            twin = await giving.append(await giving.open("twin"), prompt(TOKENS))
            expected = await events(giving, twin, TOKENS, count)
            session = await giving.append(await giving.open("s"), prompt(TOKENS))
            found, moving = [], None
            with contextlib.suppress(PeerAnswerError):
                async for event in giving.generate(session, TOKENS, count):
                    found.append((event.index, event.token_id, event.logits))
                    if moving is None and len(found) == 5:
                        moving = asyncio.create_task(move(giving, target, session))
            result, index = await moving, TOKENS + len(found)
            found += await events(taking, await taking.get("s"), index, count - len(found))
            return found, expected, result

    found, expected, result = run(work())
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert renewed and result.first_index > TOKENS + 5
    assert result.continuation_verdict == "exact" and not producers[-1]._window.specs


def test_a_session_shorter_than_its_window_is_sealed_ahead_from_its_first_row(wide, monkeypatch):
    async def work():
        async with wide.pair() as (_, giving, target, taking):
            await giving.append(await giving.open("s"), prompt(700))
            seals = Seals.watch(monkeypatch)
            return await moved_and_twin(giving, target, taking, 700), seals

    (result, moved, expected), seals = run(work())
    assert moved == expected and result.continuation_verdict == "exact"
    assert set(seals.before) == {(0, 256), (256, 256)} and seals.after == [(512, 187)]


def test_the_oldest_row_is_kept_though_its_block_was_sealed_ahead(world, tmp_path, monkeypatch):
    """The boundary call overwrites it; a link that lost the block gets it all the same."""
    odd = with_window(world, tmp_path / "odd", ODD_WINDOW)
    write, renew, tokens = Feed._write, WindowAhead.renew, 1024 + ODD_WINDOW + 1
    broken, appended, held = [], [], []

    async def renew_and_append(ahead, specs, still):
        await renew(ahead, specs, still)
        if not appended:
            held.extend(spec.first_position for spec in specs)
            appended.append(await ahead_of[0].append(await ahead_of[0].get("s"), last))

    async def breaks(feed, call, sealed):
        item = feed.tape.items[sealed.index]
        if feed.tape.overwritten_next(item) and not broken:
            async with asyncio.timeout(20.0):
                while feed._producer.finished is None:
                    await asyncio.sleep(0.005)
            broken.append(item.first_position)
            raise PeerUnavailableError("cut")
        await write(feed, call, sealed)

    ahead_of, last = [], prompt(tokens)[-SETTLED_TOKENS:]

    async def work():
        async with odd.pair() as (_, giving, target, taking):
            ahead_of.append(giving)
            await giving.append(await giving.open("s"), prompt(tokens)[:-SETTLED_TOKENS])
            monkeypatch.setattr(WindowAhead, "renew", renew_and_append)
            monkeypatch.setattr(Feed, "_write", breaks)
            return await moved_and_twin(giving, target, taking, tokens - SETTLED_TOKENS, tokens)

    result, moved, expected = run(work())
    assert 1024 in held and broken == [1024] and result.resumed == 1
    assert moved == expected and result.continuation_verdict == "exact"
