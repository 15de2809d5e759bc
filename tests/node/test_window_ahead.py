"""Blocks of a live session's windows that are sealed before its freeze."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from node_support import LAYERS, events, move, prompt, run

from kvpack.layout import LayerKind
from kvpack.limits import GRID_TOKENS
from kvpack.snapshot import cut_tile_specs
from node.errors import PeerUnavailableError
from node.migration import producer as producer_module
from node.migration.feed import Feed
from node.migration.producer import Producer
from node.migration.tape import SETTLED_TOKENS, Tape
from node.migration.window import WindowAhead
from tests.small_model import make_small_model

#: Four to five blocks: at 1800 rows, 1,024 to 1,792 are whole in it.
WINDOW = 1024
TOKENS = 1801
#: One whose oldest row begins a block where no block of the full layers ends.
ODD_WINDOW = 1000

SETTLED = {(1024, 256), (1280, 256), (1536, 256)}


@pytest.fixture
def wide(world, tmp_path):
    """Nodes of a model whose window holds several blocks."""
    return with_window(world, tmp_path / "wide", WINDOW)


def with_window(world, folder, window):
    make_small_model(folder, "muse_glimmer", seed=3, window=window, layers=LAYERS)
    return dataclasses.replace(world, model_dir=folder)


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


async def moved_and_twin(giving, target, taking, index=TOKENS):
    """``(result, moved, expected)``: what session ``s`` says next on both sides of a live move."""
    twin = await giving.append(await giving.open("twin"), prompt(index))
    expected = await events(giving, twin, index, 8)
    result = await move(giving, target, await giving.get("s"))
    return result, await events(taking, await taking.get("s"), index, 8), expected


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


def test_only_the_ends_of_a_window_are_sealed_after_the_freeze(wide, monkeypatch):
    async def work():
        async with wide.pair() as (_, giving, target, taking):
            await giving.append(await giving.open("s"), prompt(TOKENS))
            seals = Seals.watch(monkeypatch)
            return await moved_and_twin(giving, target, taking), seals

    (result, moved, expected), seals = run(work())
    assert moved == expected and result.continuation_verdict == "exact"
    assert set(seals.before) == SETTLED and len(seals.before) == len(SETTLED)
    assert seals.after == [(776, 248), (1792, 8)]


def test_a_block_that_the_window_left_meanwhile_is_not_sent(wide, monkeypatch):
    """The session was given more before it froze: what is sealed ahead is of another window."""
    renew, more = WindowAhead.renew, prompt(TOKENS + 700)[TOKENS:]

    async def work():
        async with wide.pair() as (_, giving, target, taking):
            await giving.append(await giving.open("s"), prompt(TOKENS))
            appended = []

            async def renew_and_append(ahead, specs):
                await renew(ahead, specs)
                if not appended:
                    appended.append(await giving.append(await giving.get("s"), more))

            monkeypatch.setattr(WindowAhead, "renew", renew_and_append)
            return await moved_and_twin(giving, target, taking, TOKENS + 700)

    result, moved, expected = run(work())
    assert moved == expected and result.continuation_verdict == "exact"


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
            return await moved_and_twin(giving, target, taking, TOKENS + 700)

    result, moved, expected = run(work())
    assert moved == expected and result.continuation_verdict == "exact"
    assert {spec.first_position for spec in gone} == {1024, 1280}


def test_what_was_sealed_ahead_is_made_again_for_a_link_that_lost_it(wide, monkeypatch):
    write, broken = Feed._write, []

    async def breaks(feed, call, sealed):
        await write(feed, call, sealed)
        if feed.tape.cut is not None and sealed.index == len(feed.tape.items) - 2 and not broken:
            broken.append(sealed.index)
            await asyncio.sleep(0.05)
            raise PeerUnavailableError("cut")

    async def work():
        async with wide.pair() as (_, giving, target, taking):
            await giving.append(await giving.open("s"), prompt(TOKENS))
            monkeypatch.setattr(Feed, "_write", breaks)
            return await moved_and_twin(giving, target, taking)

    result, moved, expected = run(work())
    assert broken and result.resumed == 1
    assert moved == expected and result.continuation_verdict == "exact"


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

    async def renew_and_append(ahead, specs):
        await renew(ahead, specs)
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
            return await moved_and_twin(giving, target, taking, tokens)

    result, moved, expected = run(work())
    assert 1024 in held and broken == [1024] and result.resumed == 1
    assert moved == expected and result.continuation_verdict == "exact"
