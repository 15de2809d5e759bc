"""Commits that are repeated, raced, refused or late, and what bounds the transfers of a node."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
import numpy
import pytest
from hand_support import hand_source, nothing_installed, short_lease, source_still_serves
from node_support import SECONDS, HandSource, move, prompt, refusal, run

from kvpack.chunk import ChunkClass, seal_component
from node.errors import PeerAnswerError
from node.migration.wire import encode_object, encode_open, transfer_ref
from node.pb.v1 import migration_pb2 as pb

_C = grpc.StatusCode


def test_commit_and_seal_are_idempotent_and_abort_after_commit_says_committed(world):
    async def work():
        async with hand_source(world) as hand:
            await hand.prepare()
            await hand.push()
            digest = await hand.boundary_digest()
            await hand.seal(digest)
            await hand.seal(digest)
            assert (await refusal(hand.seal(bytes(32))))[0] == "inventory"
            assert (await refusal(hand.push()))[0] == "transfer_state"
            first = await hand.commit()
            assert await hand.commit() == first
            assert (await hand.abort()).state == pb.TRANSFER_STATE_COMMITTED
            status = await hand.status()
            assert (status.state, status.owner) == (pb.TRANSFER_STATE_COMMITTED, "target")
            assert status.token == first.token
            assert await refusal(hand.prepare()) == ("replayed", _C.ALREADY_EXISTS)

    run(work())


def test_a_probe_that_disagrees_installs_nothing(world):
    async def work():
        async with hand_source(world) as hand:
            await hand.prepare()
            await hand.push()
            await hand.seal(bytes(32))
            assert await refusal(hand.commit()) == ("probe_mismatch", _C.FAILED_PRECONDITION)
            assert await nothing_installed(hand)

    run(work())


def test_a_source_that_resumes_makes_the_commit_fail(world):
    async def work():
        async with hand_source(world) as hand:
            await hand.prepare()
            await hand.push()
            await hand.seal(await hand.boundary_digest())
            directory, session = hand.source.sessions.directory, hand.session
            session.token = await directory.transfer("s", session.token, "source", bytes(16))
            assert await refusal(hand.commit()) == ("stale_token", _C.FAILED_PRECONDITION)
            assert await nothing_installed(hand)
            await source_still_serves(hand)

    run(work())


def test_of_a_commit_and_a_resume_at_the_same_time_exactly_one_happens(world):
    async def one_round(hand, number):
        hand.ref = transfer_ref(1, number)
        await hand.prepare()
        await hand.push()
        await hand.seal(hand.digest)
        directory, session = hand.source.sessions.directory, hand.session

        async def resume():
            await asyncio.sleep(0.004 * (number % 8))
            # A write of its own: an old nonce would stand for the write of the round before.
            nonce = number.to_bytes(16)
            return await directory.transfer("s", session.token, "source", nonce)

        commit, resumed = await asyncio.gather(hand.commit(), resume(), return_exceptions=True)
        assert isinstance(commit, Exception) != isinstance(resumed, Exception)
        if isinstance(commit, Exception):
            session.token = resumed
            assert len(hand.target.sessions) == 0
        return isinstance(resumed, Exception)

    async def work():
        async with hand_source(world, tokens=20) as hand:
            hand.digest = await hand.boundary_digest()
            for number in range(1, 13):
                if await one_round(hand, number):
                    owner = await hand.source.sessions.directory.owner("s")
                    assert owner.node == "target" and "s" in hand.target.sessions
                    return

    run(work())


def test_the_second_of_two_movers_finds_its_token_stale(world):
    async def work():
        async with world.pair() as (_, giving, target, _):
            old = await giving.append(await giving.open("s"), prompt(60))
            await move(giving, target, old)
            with pytest.raises(PeerAnswerError) as refused:
                await move(giving, target, old)
            assert refused.value.peer_reason == "session_moved"
            # Two transfers that were prepared under one token: the later one is the only one.
            async with (
                world.node("third") as (third, _),
                HandSource(world, third, target, caller="third") as one,
                HandSource(world, third, target, number=2, caller="third") as two,
            ):
                await one.take_cut("t", prompt(30))
                two.session, two.cut, two.chunks = one.session, one.cut, one.chunks
                digest = await one.boundary_digest()
                for hand in (one, two):
                    await hand.prepare()
                    await hand.push()
                    await hand.seal(digest)
                assert (await one.status()).state == pb.TRANSFER_STATE_ABORTED
                await two.commit()
                assert (await refusal(one.commit()))[0] == "transfer_state"
                assert "t" in target.sessions

    run(work())


def test_a_transfer_without_progress_is_given_up_after_its_lease(world):
    async def work():
        async with hand_source(world) as hand:
            await hand.prepare()
            await hand.push()
            async with short_lease(hand, 0.4, streaming=False), asyncio.timeout(SECONDS):
                while not await nothing_installed(hand):
                    await asyncio.sleep(0.1)
            assert (await hand.status()).state == pb.TRANSFER_STATE_ABORTED

    run(work())


def test_a_source_that_computes_while_its_stream_is_open_keeps_its_lease(world):
    async def work():
        async with hand_source(world) as hand:
            await hand.prepare()
            call = hand.stub.push(timeout=60)
            await call.write(encode_open(hand.ref))
            async with short_lease(hand, 0.4, streaming=True):
                # Leases are looked at once in a second.
                await asyncio.sleep(1.8)
            for chunk in hand.chunks:
                await call.write(encode_object(chunk.object))
            await call.done_writing()
            assert (await call).received_objects == len(hand.chunks)

    run(work())


def test_too_many_open_transfers_are_refused_not_queued(world):
    async def work():
        async with hand_source(world, tokens=20) as hand:
            for number in range(1, 5):
                hand.ref = transfer_ref(1, number)
                await hand.prepare(mode=pb.MODE_COPY, session_id=f"copy-{number}")
            hand.ref = transfer_ref(1, 5)
            last = {"mode": pb.MODE_COPY, "session_id": "copy-5"}
            assert await refusal(hand.prepare(**last)) == ("busy", _C.RESOURCE_EXHAUSTED)
            hand.ref = transfer_ref(1, 1)
            await hand.abort()
            hand.ref = transfer_ref(1, 5)
            await hand.prepare(**last)

    run(work())


def _with_other_numerics(node):
    """Let the node believe that it computes on something else."""
    (name, _), *rest = node.moves.binding.numerics.values
    numerics = dataclasses.replace(node.moves.binding.numerics, values=((name, "other"), *rest))
    target = node.transfers._target
    binding = dataclasses.replace(target.binding, numerics=numerics)
    node.transfers._target = dataclasses.replace(target, binding=binding)


def test_other_numerics_need_consent_and_make_the_continuation_compatible(world):
    async def work():
        async with world.pair() as (_, giving, target, taking):
            _with_other_numerics(target)
            session = await giving.append(await giving.open("s"), prompt(80))
            with pytest.raises(PeerAnswerError, match="needs consent"):
                await move(giving, target, session)
            session = await giving.get("s")
            result = await move(giving, target, session, accept_compatible=True)
            assert (result.state_verdict, result.continuation_verdict) == ("exact", "compatible")
            assert result.drift == 0.0
            assert (await taking.get("s")).next_index == result.first_index + 1

    run(work())


def test_drift_is_measured_on_the_logits_that_travel(world):
    async def work():
        async with hand_source(world) as hand:
            _with_other_numerics(hand.target)
            decoded = await hand.source.sessions.engine.call(hand.session.decode_next)
            ours = numpy.frombuffer(decoded.logits.data, "<f2").copy()
            ours[7] += 2.0
            expected = abs(ours.astype("f4") - decoded.logits.values()).max()
            position = hand.cut.snapshot.position
            sealed = {
                place: seal_component(
                    hand.binding.context, ChunkClass.FINAL_LOGITS, place, 1, ours.tobytes()
                ).object
                for place in (position, position - 1)
            }
            for number, (logits, reason) in enumerate(
                ((b"", "inventory"), (sealed[position - 1], "inventory"), (sealed[position], "")), 1
            ):
                hand.ref = transfer_ref(1, number)
                await hand.prepare(accept_compatible=True)
                await hand.push()
                if not logits:
                    assert (await refusal(hand.seal(bytes(32))))[0] == reason
                    continue
                await hand.seal(bytes(32), boundary_logits=logits)
                if reason:
                    assert (await refusal(hand.commit()))[0] == reason
                    continue
                reply = await hand.commit()
                assert reply.continuation == pb.CONTINUATION_COMPATIBLE
                assert reply.drift == expected >= 1.9

    run(work())
