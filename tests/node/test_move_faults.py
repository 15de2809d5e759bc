"""What a target does with a source that fails, lies, repeats itself or comes too late."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import grpc
import pytest
from hand_support import hand_source, nothing_installed, source_still_serves
from node_support import HandSource, prompt, refusal, run

from kvpack.chunk import SealContext, seal_tile
from kvpack.layout import Producer
from kvpack.manifest import open_manifest, seal_manifest
from kvpack.wire import encode_numerics
from node.migration.admission import Target
from node.migration.spool import NoSpool
from node.migration.wire import encode_object, encode_open, transfer_ref
from node.pb.v1 import migration_pb2 as pb

_C = grpc.StatusCode


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
