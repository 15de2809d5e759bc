"""How streams beside mTLS end: with their transfer, in time, and never more than a few at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

import grpc
import grpc.aio
import pytest
from node_support import SECONDS, HandSource, move, prompt, run
from plane_support import Plane, Wire, intake_of, moved_equal, offering, redirect, two

from node.config import Address
from node.dataplane import grpc_server, intake, socket_frames
from node.dataplane.frames import Hello, Tags
from node.dataplane.grpc_server import HELLO_KEY, METHOD
from node.dataplane.options import plane_message
from node.migration import target as target_module
from node.migration import versions
from node.migration.journal import TransferKey
from node.pb.v1 import migration_pb2 as pb

PLAIN = [Plane.GRPC_PLAIN, Plane.SOCKET]
by_plane = pytest.mark.parametrize("plane", PLAIN, ids=lambda plane: plane.value)

#: A stream that nobody may hold any longer is closed within.
PROMPT_S = 15.0


class Hand(HandSource):
    """A source that opens streams by hand."""

    def prepare_request(self, **changes):
        request = super().prepare_request(**changes)
        versions.state(request, self.source.moves.source.speaker)
        return request

    @contextlib.asynccontextmanager
    async def stream(self, plane):
        """An open stream that says nothing; gives what waits for its end, and its ticket."""
        ticket = (await self.prepare(data_plane=plane_message(plane))).plane
        hello = Hello(ticket.number, ticket.token).encode()
        inbound = self.target.transfers._inbound[TransferKey(1, "source", self.ref.number)]
        async with contextlib.AsyncExitStack() as stack:
            if plane is Plane.SOCKET:
                address = Address.parse(ticket.address)
                reader, writer = await asyncio.open_connection(address.host, address.port)
                stack.callback(writer.close)
                writer.write(hello)
                ended = asyncio.ensure_future(reader.read())
                ended.writer = writer
            else:
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(ticket.address))
                call = channel.stream_unary(METHOD)(
                    metadata=grpc.aio.Metadata((HELLO_KEY, hello)), timeout=SECONDS
                )
                ended = asyncio.ensure_future(call.code())
            stack.callback(ended.cancel)
            async with asyncio.timeout(SECONDS):
                while not inbound.is_streaming:
                    await asyncio.sleep(0.005)
            yield ended, ticket


async def ends_promptly(target, ended):
    """The stream is closed, and nothing is left of it."""
    found = await asyncio.wait_for(asyncio.shield(ended), PROMPT_S)
    assert found in (b"", grpc.StatusCode.CANCELLED)
    await streams_are(target, 0)


async def streams_are(target, count):
    """So many are open, a moment after one has ended: who sees its end is not who counts them."""
    async with asyncio.timeout(PROMPT_S):
        while intake_of(target).streams != count:
            await asyncio.sleep(0.005)


@by_plane
def test_a_stream_ends_with_its_transfer_and_with_the_next_prepare(world, plane, monkeypatch):
    async def work():
        async with (
            two(world, offering(plane)) as (source, _, target, _),
            Hand(world, source, target) as one,
        ):
            await one.take_cut("s", prompt(90))
            async with one.stream(plane) as (ended, _):
                await asyncio.sleep(0.1)
                assert not ended.done()
                # A Prepare of the same transfer: the stream before it is one that broke.
                async with one.stream(plane) as (second, _):
                    await asyncio.wait_for(asyncio.shield(ended), PROMPT_S)
                    await streams_are(target, 1)
                    assert not second.done()
                    await one.stub.abort(pb.AbortRequest(transfer=one.ref), timeout=SECONDS)
                    await ends_promptly(target, second)
            one.ref.number += 1
            async with one.stream(plane) as (ended, _):
                # The session is offered anew, by another number.
                one.ref.number += 1
                await one.prepare()
                await ends_promptly(target, ended)
            one.ref.number += 1
            async with one.stream(plane) as (ended, _):
                with pytest.raises(grpc.aio.AioRpcError):
                    await one.stub.seal(one.seal_request(bytes(32)), timeout=SECONDS)
                await ends_promptly(target, ended)
            one.ref.number += 1
            async with one.stream(plane) as (ended, _):
                # Nobody says anything at all.
                monkeypatch.setattr(target_module, "STREAM_LEASE_S", 0.3)
                target.transfers._target = dataclasses.replace(
                    target.transfers._target, lease_s=0.2
                )
                await asyncio.sleep(0.2)
                assert (await asyncio.wait_for(ended, SECONDS)) in (b"", grpc.StatusCode.CANCELLED)

    run(work())


def frame(tags, piece):
    return tags.frame_header(piece) + piece


@pytest.mark.parametrize("part", ["header", "piece", "large piece"])
def test_a_frame_that_trickles_is_not_waited_for(world, part, monkeypatch):
    monkeypatch.setattr(socket_frames, "FRAME_S", 0.4)
    monkeypatch.setattr(socket_frames, "FLOOR_BYTES_PER_S", 1 << 30)
    monkeypatch.setattr(socket_frames, "_LOOK_S", 0.05)

    async def work():
        async with (
            two(world, offering(Plane.SOCKET)) as (source, _, target, _),
            Hand(world, source, target) as one,
        ):
            await one.take_cut("s", prompt(90))
            async with one.stream(Plane.SOCKET) as (ended, ticket):
                # As long as nothing of a frame has come, nobody is in a hurry.
                await asyncio.sleep(0.6)
                assert not ended.done()
                size, place = {
                    "header": (4000, 3), "piece": (4000, 30), "large piece": (2 << 20, 300_000)
                }[part]  # fmt: skip
                data = frame(Tags(ticket.frame_key), bytes(size))
                start = time.monotonic()
                ended.writer.write(data[:place])
                with contextlib.suppress(ConnectionError):
                    while not ended.done() and time.monotonic() - start < SECONDS:
                        ended.writer.write(data[place : place + 1])
                        place += 1
                        await asyncio.sleep(0.02)
                assert 0.3 < time.monotonic() - start < SECONDS
                await ends_promptly(target, ended)

    run(work())


def test_a_link_that_is_slow_but_steady_is_waited_for(world, monkeypatch):
    """A frame of a whole block takes longer than the bound for an empty one."""
    monkeypatch.setattr(socket_frames, "FRAME_S", 0.6)
    monkeypatch.setattr(socket_frames, "_LOOK_S", 0.02)
    monkeypatch.setattr(socket_frames, "FLOOR_BYTES_PER_S", 20_000)
    took = []

    async def slow(reader, writer, there):
        other, back = await asyncio.open_connection(there.host, there.port)
        ways = [
            asyncio.create_task(carry(reader, back, 0.05)),
            asyncio.create_task(carry(other, writer, 0)),
        ]
        await asyncio.wait(ways)

    async def carry(reader, writer, pause):
        start = time.monotonic()
        while data := await reader.read(4000):
            writer.write(data)
            await asyncio.sleep(pause)
        took.append(time.monotonic() - start)
        writer.close()

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, taking):
            there = intake_of(target).addresses[Plane.SOCKET]
            server = await asyncio.start_server(lambda r, w: slow(r, w, there), "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                redirect(target, Plane.SOCKET, Address("127.0.0.1", port))
                result = await moved_equal(giving, target, taking, Plane.SOCKET, prompt(300))
            assert (result.data_plane, result.resumed) == ("socket", 0)

    run(work())


def test_so_many_streams_are_open_at_once_and_no_more(world, monkeypatch):
    monkeypatch.setattr(intake, "STREAMS_MAX", 1)

    async def work():
        async with (
            two(world, offering(*PLAIN)) as (source, giving, target, taking),
            Hand(world, source, target) as one,
        ):
            one.ref.number = 1000
            await one.take_cut("held", prompt(90))
            async with one.stream(Plane.GRPC_PLAIN) as (ended, _):
                result = await moved_equal(giving, target, taking, Plane.SOCKET, prompt(90))
                assert result.data_plane == "mtls" and "streams broke" in result.plane_fallback
                assert not ended.done() and intake_of(target).streams == 1
                await one.stub.abort(pb.AbortRequest(transfer=one.ref), timeout=SECONDS)
                await ends_promptly(target, ended)
            wish = {"data_plane": plane_message(Plane.SOCKET), "copy_as": "c"}
            session = await giving.append(await giving.open("after"), prompt(90))
            result = await move(giving, target, session, **wish)
            assert (result.data_plane, result.resumed) == ("socket", 0)

    run(work())


def test_calls_without_a_ticket_keep_no_connection_of_the_grpc_plane(world, monkeypatch):
    """One call after the other: none of them is idle for long, but each connection grows old."""
    monkeypatch.setattr(grpc_server, "_AGE_MS", 300)

    async def work():
        async with (
            two(world, offering(Plane.GRPC_PLAIN)) as (source, _, target, _),
            Hand(world, source, target) as one,
        ):
            await one.take_cut("s", prompt(90))
            wire = Wire(intake_of(target).addresses[Plane.GRPC_PLAIN])
            async with one.stream(Plane.GRPC_PLAIN) as (ended, _), wire.open() as address:
                async with (
                    grpc.aio.insecure_channel(str(address)) as channel,
                    asyncio.timeout(SECONDS),
                ):
                    while wire.connections < 3:
                        with pytest.raises(grpc.aio.AioRpcError):
                            await channel.stream_unary(METHOD)()
                        await asyncio.sleep(0.02)
                # A stream that showed its ticket is older by now, and goes on.
                assert not ended.done()

    run(work())


def test_a_frame_that_cannot_be_read_here_ends_its_stream(world, monkeypatch, caplog):
    """No memory for its buffer, say: a thread that ended untold would hold the stream for ever."""

    def none_left(size=0):
        if size > 1 << 16:
            raise MemoryError("words of the interpreter")
        return bytearray(size)

    async def work():
        async with (
            two(world, offering(Plane.SOCKET)) as (source, _, target, _),
            Hand(world, source, target) as one,
        ):
            await one.take_cut("s", prompt(90))
            async with one.stream(Plane.SOCKET) as (ended, ticket):
                monkeypatch.setattr(socket_frames, "bytearray", none_left, raising=False)
                ended.writer.write(frame(Tags(ticket.frame_key), bytes(1 << 17)))
                await ends_promptly(target, ended)
            assert "MemoryError" in caplog.text and "words of" not in caplog.text

    run(work())
