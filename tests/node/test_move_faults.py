"""What a target does with a source that fails, lies, repeats itself or comes too late."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import grpc
import numpy
import pytest
from node_support import HandSource, events, move, prompt, refusal, run

from kvpack.chunk import ChunkClass, SealContext, seal_component, seal_tile
from kvpack.layout import Producer
from kvpack.manifest import open_manifest, seal_manifest
from kvpack.wire import encode_numerics
from node.errors import PeerAnswerError
from node.migration.admission import Target
from node.migration.spool import NoSpool
from node.migration.table import TargetState
from node.migration.wire import encode_object, encode_open, transfer_ref
from node.pb.v1 import migration_pb2 as pb

_C = grpc.StatusCode


@contextlib.asynccontextmanager
async def hand_source(world, tokens=90, name="s"):
    """Two nodes and a source that is driven by hand, with its cut taken."""
    async with (
        world.pair() as (source, giving, target, taking),
        HandSource(world, source, target) as hand,
    ):
        await hand.take_cut(name, prompt(tokens))
        hand.giving, hand.taking = giving, taking
        yield hand


async def nothing_installed(hand):
    """The target holds no session, no file and no memory of rows; the source owns the session."""
    assert len(hand.target.sessions) == 0
    owner = await hand.source.sessions.directory.owner("s")
    assert owner.node == "source"
    inbound = hand.target.transfers._inbound.values()
    live = [one for one in inbound if one.state is not TargetState.ABORTED]
    if not live:
        assert hand.world.spool("target") == []
    return not live


async def source_still_serves(hand):
    """The session on the source gives the same bits as a twin that nothing happened to."""
    tokens = len(hand.cut.snapshot.token_ids) + 1
    twin = await hand.giving.append(await hand.giving.open("twin"), prompt(tokens))
    session = await hand.giving.get("s")
    assert await events(hand.giving, session, tokens, 8) == await events(
        hand.giving, twin, tokens, 8
    )


def test_a_hand_driven_move_succeeds_so_that_the_refusals_below_mean_something(world):
    async def work():
        async with hand_source(world) as hand:
            await hand.prepare()
            assert await hand.push() == len(hand.chunks)
            assert (await hand.seal(await hand.boundary_digest())).objects == len(hand.chunks)
            reply = await hand.commit()
            assert reply.first_index == 90
            assert (await hand.taking.get("s")).next_index == 91

    run(work())


def test_a_stream_that_ends_without_seal_installs_nothing(world):
    async def work():
        async with hand_source(world) as hand:
            await hand.prepare()
            assert await hand.push() == len(hand.chunks)
            assert not await nothing_installed(hand)
            assert (await refusal(hand.commit()))[0] == "transfer_state"
            assert (await hand.abort()).state == pb.TRANSFER_STATE_ABORTED
            assert await nothing_installed(hand)
            await source_still_serves(hand)

    run(work())


def test_a_stream_that_is_cut_in_mid_message_installs_nothing_and_may_be_opened_again(world):
    async def work():
        async with hand_source(world) as hand:
            await hand.prepare()
            call = hand.stub.push(timeout=10)
            await call.write(encode_open(hand.ref))
            await call.write(encode_object(hand.chunks[0].object))
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            await asyncio.sleep(0.2)
            held = (await hand.prepare()).received_objects
            assert held <= 1
            rest = [chunk.object for chunk in hand.chunks[held:]]
            assert await hand.push(rest) == len(hand.chunks)
            await hand.seal(await hand.boundary_digest())
            assert (await hand.commit()).first_index == 90

    run(work())


@pytest.mark.parametrize("spools", [True, False])
def test_every_flipped_bit_of_a_chunk_gives_the_whole_transfer_up(world, monkeypatch, spools):
    if not spools:
        # Chunks are then taken where they are received, without a task or thread of their own.
        monkeypatch.setattr(Target, "new_pack", lambda *_: NoSpool())

    async def work():
        async with hand_source(world, tokens=20) as hand:
            size = len(hand.chunks[0].object)
            for number, place in enumerate((0, 5, 12, 70, 120, 150, 165, size // 2, size - 1), 1):
                hand.ref = transfer_ref(1, number)
                await hand.prepare()
                bad = bytearray(hand.chunks[0].object)
                bad[place] ^= 0x10
                objects = [bytes(bad), *(chunk.object for chunk in hand.chunks[1:])]
                reason, _ = await refusal(hand.push(objects))
                assert reason in (
                    "malformed", "not_authentic", "unsupported_version", "over_limit",
                    "unknown_key", "layout_mismatch",
                ), place  # fmt: skip
                assert (await refusal(hand.commit()))[0] == "transfer_state"
                assert await nothing_installed(hand)
            await source_still_serves(hand)

    run(work())


def test_inventories_that_do_not_match_what_arrived_are_refused_at_the_seal(world):
    async def work():
        async with hand_source(world) as hand:
            digest = await hand.boundary_digest()
            objects = [chunk.object for chunk in hand.chunks]
            whole = hand.seal_request(digest)
            blob = bytearray(whole.manifest)
            blob[len(blob) // 2] ^= 1
            wrong = {
                "missing": (objects[:-2], {}),
                "missing rows": (objects[1:], {}),
                "order": ([objects[1], objects[0], *objects[2:]], {}),
                "count": (objects, {"objects": len(objects) - 1}),
                "bytes": (objects, {"object_bytes": whole.object_bytes + 1}),
                "manifest": (objects, {"manifest": bytes(blob)}),
                "empty manifest": (objects, {"manifest": b""}),
                "digest": (objects, {"boundary_digest": b"short"}),
            }
            for number, (name, (pushed, changes)) in enumerate(wrong.items(), 1):
                hand.ref = transfer_ref(1, number)
                await hand.prepare()
                await hand.push(pushed)
                reason, _ = await refusal(hand.seal(digest, **changes))
                assert reason in ("inventory", "not_authentic", "malformed", "over_limit"), name
                if name == "digest":
                    await hand.abort()
                assert (await refusal(hand.commit()))[0] == "transfer_state", name
                assert await nothing_installed(hand), name

    run(work())


@pytest.mark.parametrize("producer", [Producer.TRANSFORMERS, Producer.MLX_LM])
def test_rows_of_another_producer_are_refused_by_name_though_all_else_is_equal(world, producer):
    async def work():
        async with hand_source(world) as hand:
            digest = await hand.boundary_digest()
            key, header = hand.binding.key, hand.binding.header_bytes
            ours = open_manifest(key, header, hand.seal_request(digest).manifest)
            theirs = seal_manifest(key, header, dataclasses.replace(ours, producer=producer))
            await hand.prepare()
            await hand.push([chunk.object for chunk in hand.chunks])
            assert (await refusal(hand.seal(digest, manifest=theirs)))[0] == "layout_mismatch"
            (inbound,) = hand.target.transfers._inbound.values()
            assert str(inbound.failure) == f"producer: expected engine, found {producer.value}"
            assert (await refusal(hand.commit()))[0] == "transfer_state"
            assert await nothing_installed(hand)

    run(work())


def test_doubled_foreign_and_misplaced_chunks_are_refused(world):
    async def work():
        async with hand_source(world) as hand:
            context = hand.binding.context
            strange = SealContext(context.key, bytes(32), context.layout_digest)
            tile = hand.cut.snapshot.tiles[0]
            objects = [chunk.object for chunk in hand.chunks]
            longer = HandSource(hand.world, hand.source, hand.target)
            async with longer:
                await longer.take_cut("longer", prompt(300))
            beyond = [c.object for c in longer.chunks if c.reference.first_position >= 256]
            wrong = {
                "twice": ([objects[0], objects[0]], "inventory"),
                "other model": ([seal_tile(strange, tile).object], "identity_mismatch"),
                "beyond the cut": ([beyond[0]], "layout_mismatch"),
                "second state": ([objects[-1], longer.chunks[-1].object], "inventory"),
                "not a chunk": ([b"\x80\x04\x95pickle"], "malformed"),
            }
            for number, (name, (pushed, expected)) in enumerate(wrong.items(), 1):
                hand.ref = transfer_ref(1, number)
                await hand.prepare()
                assert (await refusal(hand.push(pushed)))[0] == expected, name
                assert await nothing_installed(hand), name

    run(work())


def test_messages_that_are_no_pieces_are_refused(world):
    async def work():
        async with hand_source(world) as hand:
            raws = (
                b"",
                b"\x12",
                b"\x12\x80\x80\x80\x80\x08",  # a length of 2 GiB
                b"\x12\x05abc",
                b"\x12\x83\x00abc",
                b"\x1a\x03abc",  # a seal id of three bytes
                b"\x1a\x20" + bytes(32),  # a chunk that is not held here
                b"\x20\x05",  # a cut, of a transfer that does not grow, at another place
                b"\x20\x00",
                b"\x20\x80\x80\x80\x80\x08",
                b"\x2a\x00",
                encode_open(hand.ref),
                b"cos\nsystem\n(S'true'\ntR.",
            )
            for number, raw in enumerate(raws, 1):
                hand.ref = transfer_ref(1, number)
                await hand.prepare()
                reason, _ = await refusal(hand.push([], raw=[raw]))
                assert reason in ("malformed", "inventory", "over_limit"), raw
                await hand.abort()

    run(work())


def test_strange_and_finished_numbers_get_a_clean_answer_and_the_node_stays_up(world):
    async def work():
        async with hand_source(world) as hand:
            hand.ref = transfer_ref(1, 999)
            for call in (hand.push, hand.commit, hand.abort, hand.status):
                assert await refusal(call()) == ("transfer_not_found", _C.NOT_FOUND)
            hand.ref = transfer_ref(1, 0)
            assert (await refusal(hand.commit()))[0] == "over_limit"
            hand.ref = transfer_ref(1, 1)
            await hand.prepare()
            await hand.abort()
            for call in (hand.push, hand.commit, lambda: hand.seal(bytes(32))):
                assert (await refusal(call()))[0] == "transfer_state"
            assert (await hand.abort()).state == pb.TRANSFER_STATE_ABORTED
            assert (await hand.status()).state == pb.TRANSFER_STATE_ABORTED
            assert await refusal(hand.prepare()) == ("replayed", _C.ALREADY_EXISTS)

    run(work())


def test_prepare_is_idempotent_for_the_same_bytes_and_for_no_others(world):
    async def work():
        async with hand_source(world) as hand:
            await hand.prepare()
            await hand.push([chunk.object for chunk in hand.chunks[:2]])
            assert (await hand.prepare()).received_objects == 2
            other = hand.prepare(position=hand.cut.snapshot.position - 1)
            assert (await refusal(other))[0] == "replayed"

    run(work())


def test_a_peer_that_lies_in_prepare_is_refused(world):
    async def work():
        async with hand_source(world) as hand:
            numerics = hand.binding.numerics
            (name, _), *rest = numerics.values
            other = encode_numerics(dataclasses.replace(numerics, values=((name, "9"), *rest)))
            stale = pb.PrepareRequest(token={"directory_id": bytes(16), "generation": 1,
                                             "revision": 1}).token  # fmt: skip
            lies = {
                "stale_token": {"token": stale},
                "over_limit": {"position": 0},
                "malformed": {"mode": 7},
                "consent_needed": {"numerics": other},
            }
            for number, (expected, changes) in enumerate(lies.items(), 1):
                hand.ref = transfer_ref(1, number)
                assert (await refusal(hand.prepare(**changes)))[0] == expected
            hand.ref = transfer_ref(1, 20)
            assert (await refusal(hand.prepare(session_id="../s")))[0] == "over_limit"
            assert (await refusal(hand.prepare(session_id="unknown")))[0] == "stale_token"
            assert (await refusal(hand.prepare(pack_header=b"\x80\x04pickle")))[0] == "malformed"
            async with HandSource(world, hand.source, hand.target, caller="third") as third:
                third.session, third.cut = hand.session, hand.cut
                # The same words from another node: the certificate says who speaks.
                assert (await refusal(third.prepare()))[0] == "stale_token"
            assert await nothing_installed(hand)

    run(work())


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
            target = hand.target.transfers
            target._target = dataclasses.replace(target._target, lease_s=0.4)
            await hand.prepare()
            await hand.push()
            for _ in range(50):
                await asyncio.sleep(0.1)
                if await nothing_installed(hand):
                    break
            assert await nothing_installed(hand)
            assert (await hand.status()).state == pb.TRANSFER_STATE_ABORTED

    run(work())


def test_a_source_that_computes_while_its_stream_is_open_keeps_its_lease(world):
    async def work():
        async with hand_source(world) as hand:
            target = hand.target.transfers
            target._target = dataclasses.replace(target._target, lease_s=0.4)
            await hand.prepare()
            call = hand.stub.push(timeout=20)
            await call.write(encode_open(hand.ref))
            await asyncio.sleep(1.2)
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
