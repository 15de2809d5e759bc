"""A stream over which nothing goes for long: a source that computes, or waits for its turn."""

from __future__ import annotations

import asyncio

import pytest
from hand_support import hand_source, nothing_installed, short_lease, source_still_serves
from node_support import SECONDS, run

from node.migration import target as target_module
from node.migration import wire
from node.migration.feed import STREAM_S
from node.migration.turns import TURN_S
from node.trust import channel_options, server_options


async def begin(hand, objects):
    """A stream with so many chunks written, which stays open."""
    call = hand.stub.push(timeout=STREAM_S)
    await call.write(wire.encode_open(hand.ref))
    for chunk in hand.chunks[:objects]:
        await call.write(wire.encode_object(chunk.object))
    return call


async def end(hand, call, objects):
    """The rest over the same stream, to the session on the target."""
    for chunk in hand.chunks[objects:]:
        await call.write(wire.encode_object(chunk.object))
    await call.done_writing()
    async with asyncio.timeout(SECONDS):
        assert (await call).received_objects == len(hand.chunks)
    await hand.seal(await hand.boundary_digest())
    await hand.commit()
    assert (await hand.taking.get("s")).session_id == "s"


def test_an_idle_stream_is_kept_for_longer_than_a_transfer_without_one(world, monkeypatch):
    monkeypatch.setattr(target_module, "STREAM_LEASE_S", 10.0)

    async def work():
        async with hand_source(world) as hand:
            await hand.prepare()
            call = await begin(hand, 2)
            async with short_lease(hand, 0.2, streaming=True):
                # Leases are looked at once in a second.
                await asyncio.sleep(1.5)
            await end(hand, call, 2)

    run(work())


def test_an_idle_stream_that_outlasts_its_lease_leaves_nothing(world, monkeypatch):
    monkeypatch.setattr(target_module, "STREAM_LEASE_S", 0.4)

    async def work():
        async with hand_source(world) as hand:
            transfers = hand.target.transfers
            await hand.prepare()
            call = await begin(hand, 2)
            async with short_lease(hand, 0.2, streaming=True), asyncio.timeout(SECONDS):
                while transfers.under_way():
                    await asyncio.sleep(0.05)
            assert await nothing_installed(hand)
            call.cancel()
            await source_still_serves(hand)

    run(work())


def test_whoever_waits_for_a_turn_waits_less_than_a_stream_is_kept():
    assert TURN_S < target_module.STREAM_LEASE_S < STREAM_S


@pytest.mark.slow
def test_a_stream_that_idles_through_many_keepalives_goes_on(world):
    """Neither end takes silence for death, and the server does not take pings for an attack."""
    client, server = dict(channel_options("target")), dict(server_options())
    assert (
        client["grpc.keepalive_time_ms"]
        >= server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    )
    every_s = client["grpc.keepalive_time_ms"] / 1000
    # A third ping that comes too early ends the connection; and one answer that is missing.
    idle_s = 4 * every_s + client["grpc.keepalive_timeout_ms"] / 1000 + 2.0

    async def work():
        async with hand_source(world) as hand:
            await hand.prepare()
            call = await begin(hand, 2)
            await asyncio.sleep(idle_s)
            assert not call.done()
            await end(hand, call, 2)

    run(work(), seconds=idle_s + 60.0)
