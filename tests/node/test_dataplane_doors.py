"""Strangers at the ports beside mTLS: who opens a stream, and who is closed without a word."""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio
import pytest
from node_support import run
from plane_support import (
    Plane,
    Wire,
    copies_equal,
    intake_of,
    moved_equal,
    offering,
    put_in,
    redirect,
    two,
)

from node.dataplane import socket_server
from node.dataplane.frames import HELLO_BYTES, MAGIC
from node.dataplane.grpc_server import METHOD

slow = pytest.mark.slow


async def knock(address, data=b"", *, hang_up=False):
    """Say ``data``; gives what comes back until the other side closes."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(data)
        if hang_up:
            writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


STRANGE = {
    "nothing": b"",
    "half a hello": MAGIC + bytes(20),
    "no token": MAGIC + bytes(40),
    "another version": b"kvplane2" + bytes(40),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100),
    "tls": bytes.fromhex("16030100f4010000f00303") + bytes(300),
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(60),
    "much": bytes(1 << 20),
}


def test_who_shows_no_token_is_closed_without_a_word_and_the_port_goes_on(world, monkeypatch):
    monkeypatch.setattr(socket_server, "HELLO_S", 0.3)

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, taking):
            address = intake_of(target).addresses[Plane.SOCKET]
            for name, data in STRANGE.items():
                for hang_up in (False, True):
                    start = time.monotonic()
                    assert await knock(address, data, hang_up=hang_up) == b"", name
                    assert time.monotonic() - start < 5.0, name
            result = await moved_equal(giving, target, taking, Plane.SOCKET)
            assert result.data_plane == "socket" and result.resumed == 0

    run(work())


def test_a_hello_that_trickles_is_not_waited_for(world, monkeypatch):
    monkeypatch.setattr(socket_server, "HELLO_S", 0.4)

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, _, target, _):
            address = intake_of(target).addresses[Plane.SOCKET]
            reader, writer = await asyncio.open_connection(address.host, address.port)
            start = time.monotonic()
            try:
                while time.monotonic() - start < 10.0:
                    writer.write(MAGIC[:1])
                    await asyncio.sleep(0.05)
                    if reader.at_eof():
                        break
            except ConnectionError:
                pass
            assert time.monotonic() - start < 5.0
            writer.close()

    run(work())


@pytest.mark.parametrize("bound", [pytest.param("WAITING_PER_ADDRESS", marks=slow), "WAITING_MAX"])
def test_of_many_that_wait_only_so_many_are_listened_to(world, monkeypatch, bound):
    monkeypatch.setattr(socket_server, "WAITING_PER_ADDRESS", 1000)
    monkeypatch.setattr(socket_server, bound, 3)
    monkeypatch.setattr(socket_server, "HELLO_S", 60.0)

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, taking):
            address = intake_of(target).addresses[Plane.SOCKET]
            waiting = [await asyncio.open_connection(address.host, address.port) for _ in range(3)]
            await asyncio.sleep(0.1)
            for _ in range(5):
                assert await knock(address, MAGIC[:1]) == b""
            assert not any(reader.at_eof() for reader, _ in waiting)
            for _, writer in waiting:
                writer.close()
            await asyncio.sleep(0.1)
            result = await moved_equal(giving, target, taking, Plane.SOCKET)
            assert result.data_plane == "socket" and result.resumed == 0

    run(work())


def admitted(target, monkeypatch):
    """Whether each hello got a ticket, in order."""
    given, intake = [], intake_of(target)
    admit = intake.admit

    def noted(plane, hello):
        ticket = admit(plane, hello)
        given.append(ticket is not None)
        return ticket

    monkeypatch.setattr(intake, "admit", noted)
    return given


def test_a_whole_stream_that_is_played_again_opens_nothing(world, monkeypatch):
    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, taking):
            there = intake_of(target).addresses[Plane.SOCKET]
            wire, given = Wire(there), admitted(target, monkeypatch)
            async with wire.open() as address:
                redirect(target, Plane.SOCKET, address)
                await moved_equal(giving, target, taking, Plane.SOCKET)
            (recorded,) = wire.seen
            before = target.transfers.under_way()
            assert len(recorded) > 20_000 and recorded.startswith(MAGIC)
            assert await knock(there, bytes(recorded)) == b""
            assert await knock(there, bytes(recorded[:HELLO_BYTES])) == b""
            assert target.transfers.under_way() == before
            # Not because the transfer has ended: the ticket itself is used up.
            assert given == [True, False, False]

    run(work())


@slow
def test_a_second_connection_with_the_token_of_the_first_is_closed(world, monkeypatch):
    """Whoever reads the token off the wire comes too late with it."""
    found = []

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, taking):
            there = intake_of(target).addresses[Plane.SOCKET]

            def change(number, offset, data):
                if offset > 2 * HELLO_BYTES and not found:
                    found.append(asyncio.ensure_future(knock(there, bytes(wire.seen[0][:48]))))
                return data

            wire, given = Wire(there, change), admitted(target, monkeypatch)
            async with wire.open() as address:
                redirect(target, Plane.SOCKET, address)
                result = await moved_equal(giving, target, taking, Plane.SOCKET)
            assert await found[0] == b""
            assert given == [True, False]
            assert result.resumed == 0 and result.data_plane == "socket"

    run(work())


@slow
def test_a_token_without_its_frame_key_takes_a_stream_and_gives_nothing(world):
    """Somebody on the wire is first with a token that he read: it costs the move that stream."""

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, taking):
            frame = len(b"rows").to_bytes(4, "big") + bytes(16) + b"rows"
            result, *_ = await copies_equal(
                giving, target, taking, Plane.SOCKET, [(put_in(HELLO_BYTES, frame), None)]
            )
            assert result.resumed == 1 and result.data_plane == "socket"

    run(work())


def test_a_call_without_a_ticket_is_not_read_on_the_grpc_plane(world):
    async def work():
        async with two(world, offering(Plane.GRPC_PLAIN)) as (_, _, target, _):
            address = intake_of(target).addresses[Plane.GRPC_PLAIN]
            async with grpc.aio.insecure_channel(str(address)) as channel:
                shown = (
                    (),
                    (("kvpack-plane-bin", bytes(48)),),
                    (("kvpack-plane-bin", MAGIC + bytes(40)),) * 2,
                    (("kvpack-plane-bin", MAGIC + bytes(39)),),
                    (("other", "x" * 4000),),
                )
                for metadata in shown:
                    call = channel.stream_unary(METHOD)(metadata=grpc.aio.Metadata(*metadata))
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call
                    assert not dict(refused.value.trailing_metadata() or ())
                # Nothing but that one call is there: neither moves nor sessions, nor reflection.
                for path in ("/node.v1.Migration/Prepare", "/node.v1.Session/List"):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await channel.unary_unary(path)(b"")
                    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(work())


@slow
def test_a_grpc_plane_bounds_who_waits_there(world):
    async def work():
        async with two(world, offering(Plane.GRPC_PLAIN)) as (_, _, target, _):
            address = intake_of(target).addresses[Plane.GRPC_PLAIN]
            # No TLS there: what answers is HTTP/2, or nobody.
            assert not (await knock(address, b"\x16\x03\x01" + bytes(64))).startswith(b"\x16")
            silent = [await asyncio.open_connection(address.host, address.port) for _ in range(30)]
            await asyncio.sleep(0.3)
            closed = sum(reader.at_eof() for reader, _ in silent)
            assert closed >= 10
            async with asyncio.timeout(15.0):
                # Those that were let in and say nothing are not waited for.
                await asyncio.gather(*(reader.read() for reader, _ in silent))
            for _, writer in silent:
                writer.close()

    run(work())
