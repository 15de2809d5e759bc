"""Deltas: what the target's store holds is named and not sent; a wrong guess costs bytes alone."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time

import pytest
from node_support import WINDOW, HandSource, events, move, prompt, run

from kvpack.chunk import ChunkClass
from kvpack.layout import LayerKind
from kvpack.store import list_cuts, open_store
from node.migration import wire
from node.pb.v1 import migration_pb2 as pb
from tests.small_model import make_small_model


async def there_and_back(giving, source, taking, target, tokens, more):
    """Move a session to the target, back, let it grow, and move it again; gives both results."""
    first = await move(giving, target, await giving.open("s"), tokens)
    await target.tier.settled()
    await move(taking, source, await taking.get("s"))
    again = await giving.append(await giving.get("s"), more)
    return first, await move(giving, target, again)


@pytest.mark.parametrize("held", [512, 600, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_session_that_comes_back_sends_only_what_is_new(world, held):
    more = prompt(300, seed=5)

    async def work():
        async with world.pair() as (source, giving, target, taking):
            first, second = await there_and_back(
                giving, source, taking, target, prompt(held + 1), more
            )
            layout = target.sessions.engine.model.layout
            twin = await giving.append(await giving.open("twin"), prompt(held + 1))
            # The twin makes the same calls: two boundary tokens, one on each node, then the rest.
            await events(giving, twin, held + 1, 2)
            twin = await giving.append(await giving.get("twin"), more)
            index = twin.next_index
            expected = await events(giving, twin, index, 12)
            moved = await events(taking, await taking.get("s"), index, 12)
            return first, second, layout, expected, moved

    first, second, layout, expected, moved = run(work())
    assert moved == expected
    cut = held - held % 256
    rows = layout.state_bytes(LayerKind.FULL, 1)
    # NoPE rows [cut, position); of the windows everything, since the suffix outruns them.
    assert second.held_bytes == rows * cut
    assert second.nope_bytes == rows * (second.position - cut)
    assert second.swa_bytes == layout.state_bytes(LayerKind.SWA, second.position)
    assert first.held_bytes == 0 and second.continuation_verdict == "exact"


def test_a_suffix_inside_the_window_sends_only_its_own_window_rows(tmp_path):
    """A window of 2,048 tokens, so that held blocks of it are still in the cut's window."""
    from node_support import World

    folder = tmp_path / "tiny"
    make_small_model(folder, "muse_glimmer", seed=3, window=2048, layers=4)
    (tmp_path / "world").mkdir()
    world = World.make(tmp_path / "world", folder)

    async def work():
        async with world.pair() as (source, giving, target, taking):
            _, second = await there_and_back(
                giving, source, taking, target, prompt(1025), prompt(500, seed=5)
            )
            return second, target.sessions.engine.model.layout

    second, layout = run(work())
    suffix = second.position - 1024
    assert second.nope_bytes == layout.state_bytes(LayerKind.FULL, 1) * suffix
    assert second.swa_bytes == layout.state_bytes(LayerKind.SWA, 1) * suffix


def _believe_other_numerics(node):
    """Let the node believe that it computes on something else: it needs consent then."""
    target = node.transfers._target
    (name, _), *rest = target.binding.numerics.values
    numerics = dataclasses.replace(target.binding.numerics, values=((name, "other"), *rest))
    binding = dataclasses.replace(target.binding, numerics=numerics)
    node.transfers._target = dataclasses.replace(target, binding=binding)


@pytest.mark.parametrize("consents", [False, True])
def test_equal_tokens_with_other_rows_are_a_wrong_guess_that_costs_bytes_and_nothing_else(
    world, consents
):
    """The held cut was computed one token at a time: other call shapes, other bits.

    Who consents to `compatible` consents to go on elsewhere from the rows that the source has, and
    not to other rows: those travel all the same.
    """

    async def work():
        async with world.pair() as (source, giving, target, taking):
            tokens = prompt(600)
            session = await giving.append(await giving.open("s"), tokens[:2])
            live = await source.sessions.find("s")
            for token_id in tokens[2:]:
                await source.sessions.engine.call(live.generation.step, live.token_ids[-1])
                live.token_ids.append(token_id)
            await move(giving, target, session)
            await target.tier.settled()
            await taking.close_session(await taking.get("s"))
            if consents:
                _believe_other_numerics(target)
            result = await move(
                giving, target, await giving.open("s"), tokens, accept_compatible=consents
            )
            twin = await giving.append(await giving.open("twin"), tokens)
            expected = await events(giving, twin, 600, 8)
            moved = await events(taking, await taking.get("s"), 600, 8)
            return result, expected, moved, target.sessions.engine.model.layout

    result, expected, moved, layout = run(work())
    assert moved == expected and result.state_verdict == "exact"
    assert result.continuation_verdict == ("compatible" if consents else "exact")
    whole = sum(layout.state_bytes(kind, 599) for kind in LayerKind)
    assert result.nope_bytes + result.swa_bytes + result.held_bytes == whole
    # Here and there equal bits come out of either shape; most do not.
    assert result.held_bytes < 0.2 * whole


def test_what_a_peer_sent_serves_only_the_session_that_it_came_with(world):
    async def work():
        async with world.pair() as (_, giving, target, taking):
            tokens = prompt(600)
            await move(giving, target, await giving.open("s"), tokens)
            await target.tier.settled()
            other = await move(giving, target, await giving.open("other"), tokens)
            assert other.held_bytes == 0
            # What this node computed itself may serve whoever has the same tokens.
            own = await taking.append(await taking.open("own"), tokens)
            await taking.save(own)
            await target.tier.settled()
            third = await move(giving, target, await giving.open("third"), tokens)
            return third, target.sessions.engine.model.layout

    third, layout = run(work())
    assert third.held_bytes == sum(layout.state_bytes(kind, 599) for kind in LayerKind)


def test_a_store_that_answers_too_late_holds_nothing(world, monkeypatch):
    monkeypatch.setattr("node.tier.FIND_S", 0.1)
    closed = []

    class Late:
        def close(self):
            closed.append(True)

    def find(*_):
        time.sleep(0.5)
        return Late()

    async def work():
        async with world.pair() as (_, giving, target, _):
            monkeypatch.setattr(target.tier, "_find", find)
            result = await move(giving, target, await giving.open("s"), prompt(600))
            assert result.held_bytes == 0 and result.continuation_verdict == "exact"
            await asyncio.sleep(0.6)

    run(work())
    assert closed == [True]


def test_an_offer_whose_token_chunks_are_wrong_is_refused(world):
    async def work():
        async with (
            world.pair() as (source, _, target, _),
            HandSource(world, source, target) as hand,
        ):
            await hand.take_cut("s", prompt(600))
            classes = [chunk.reference.chunk_class for chunk in hand.chunks]
            tokens = [hand.chunks[classes.index(ChunkClass.TOKEN_IDS)].object]
            rows = hand.chunks[0].object
            for wrong in ([rows], tokens * 2, [b"junk"], tokens * 17):
                request = hand.prepare_request()
                request.token_chunks.extend(wrong)
                with pytest.raises(Exception) as refused:
                    await hand.stub.prepare(request, timeout=10)
                trailer = dict(refused.value.trailing_metadata())
                assert trailer[wire.REASON_KEY] in ("inventory", "malformed", "over_limit")
            assert (await hand.prepare()).received_objects == 0
            assert (await hand.status()).state == pb.TRANSFER_STATE_OPEN

    run(work())


def test_a_damaged_store_is_a_miss_and_not_an_error(world):
    async def work():
        async with world.pair() as (source, giving, target, taking):
            await move(giving, target, await giving.open("s"), prompt(600))
            await target.tier.settled()
            folder = world.root / "target-data" / "store"
            for path in (folder / "chunks").rglob("*"):
                if path.is_file():
                    content = bytearray(path.read_bytes())
                    content[len(content) // 2] ^= 1
                    path.write_bytes(content)
            await move(taking, source, await taking.get("s"))
            result = await move(giving, target, await giving.get("s"))
            assert result.continuation_verdict == "exact"
            assert len(list(list_cuts(open_store(folder)))) >= 1
            return result

    assert run(work()).held_bytes == 0
    assert WINDOW == 16


def test_a_start_removes_what_a_dead_process_left_in_the_store(world):
    async def work():
        async with world.node("target"):
            pass
        left = world.root / "target-data" / "store" / "intents" / f".kvpack-{'0' * 32}.tmp"
        left.write_bytes(b"half an intent")
        long_ago = time.time() - 30 * 86_400
        os.utime(left, (long_ago, long_ago))
        async with world.node("target"):
            for _ in range(100):
                if not left.exists():
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("still there")

    run(work())
