"""Copies: the target gets a session of its own, the source keeps its, and both give equal bits."""

from __future__ import annotations

import asyncio

import pytest
from node_support import HandSource, events, move, prompt, refusal, run

from node.directory import Ownership
from node.errors import PeerAnswerError


async def owner(node, session_id):
    record = await node.sessions.directory.owner(session_id)
    return record.node if isinstance(record, Ownership) else None


@pytest.mark.parametrize("known", [True, False], ids=["prompt", "live"])
def test_a_copy_and_its_source_continue_with_the_bits_of_one_session(world, known):
    async def work():
        async with world.pair() as (source, giving, target, taking):
            opened = await giving.open("s")
            tokens = prompt(300)
            if not known:
                opened = await giving.append(opened, tokens)
            given = tokens if known else ()
            result = await move(giving, target, opened, given, copy_as="c")
            assert result.session_id == "c" and result.continuation_verdict == "exact"
            assert await owner(source, "s") == "source" and await owner(source, "c") == "target"
            twin = await giving.append(await giving.open("twin"), tokens)
            expected = await events(giving, twin, 300, 24)
            copied = await events(taking, await taking.get("c"), 300, 24)
            # The source's own boundary call made the first token; its logits are not kept on.
            kept = await events(giving, await giving.get("s"), 300, 24)
            return expected, copied, kept, opened.token, (await giving.get("s")).token

    expected, copied, kept, before, after = run(work())
    assert copied == expected
    assert kept == expected
    assert before == after


def test_a_copy_onto_a_name_that_is_taken_is_refused_and_changes_nothing(world):
    async def work():
        async with world.pair() as (source, giving, target, taking):
            session = await giving.append(await giving.open("s"), prompt(40))
            await taking.open("c")
            for name in ("c", "s"):
                with pytest.raises(PeerAnswerError) as refused:
                    await move(giving, target, session, copy_as=name)
                assert refused.value.peer_reason == "transfer_failed"
            assert await owner(source, "s") == "source" and await owner(source, "c") == "target"
            assert len(await events(giving, session, 40, 2)) == 2
            assert world.spool("target") == []

    run(work())


def test_a_copy_whose_target_restarted_before_it_answered_is_not_called_failed(world):
    async def work():
        async with world.pair() as (_, giving, target, taking):
            session = await giving.append(await giving.open("s"), prompt(60))
            commit = target.transfers.commit

            async def commit_and_forget(key):
                await commit(key)
                # As after a restart: only the journal and the directory know of it.
                target.transfers._inbound.clear()
                target.transfers.commit = commit
                raise RuntimeError("the answer is lost")

            target.transfers.commit = commit_and_forget
            with pytest.raises(PeerAnswerError, match="is on node target, but its answer was lost"):
                await move(giving, target, session, copy_as="c")
            twin = await giving.append(await giving.open("twin"), prompt(60))
            copied = await events(taking, await taking.get("c"), 61, 4)
            return copied, await events(giving, twin, 60, 5)

    copied, expected = run(work())
    assert copied == expected[1:]


def test_an_aborted_copy_gives_its_claim_up_so_that_the_name_is_free(world):
    async def work():
        async with (
            world.pair() as (source, _, target, taking),
            HandSource(world, source, target) as hand,
        ):
            await hand.take_cut("s", prompt(40))
            await hand.prepare(mode=2, session_id="c")
            assert await owner(source, "c") == "target"
            assert (await refusal(hand.commit()))[0] == "transfer_state"
            await hand.push()
            await hand.abort()
            assert await owner(source, "c") is None
            assert (await taking.open("c")).session_id == "c"

    run(work())


def test_a_session_may_be_copied_twice_at_once_but_moved_once(world):
    async def work():
        async with world.pair() as (_, giving, target, taking):
            session = await giving.append(await giving.open("s"), prompt(600))
            results = await asyncio.gather(
                move(giving, target, session, copy_as="c1"),
                move(giving, target, session, copy_as="c2"),
            )
            assert {result.session_id for result in results} == {"c1", "c2"}
            first, second = [
                await events(taking, await taking.get(name), 600, 8) for name in ("c1", "c2")
            ]
            moves = await asyncio.gather(
                move(giving, target, await giving.get("s")),
                move(giving, target, await giving.get("s")),
                return_exceptions=True,
            )
            failed = [one for one in moves if isinstance(one, PeerAnswerError)]
            assert len(failed) == 1 and "s" in target.sessions
            return first, second

    first, second = run(work())
    assert [token for _, token, _ in first] == [token for _, token, _ in second]
