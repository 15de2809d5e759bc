"""Sealed chunks beside mTLS: moves over plain planes, and every way to disturb one.

A wire that strangers write on may cost a move streams and time. It never costs it its bytes, and
it never ends it: that is asked of every disturbance here.
"""

from __future__ import annotations

import dataclasses
import logging
import socket

import grpc
import grpc.aio
import pytest
from node_support import events, move, prompt, run
from plane_support import (
    TOKENS,
    Plane,
    Wire,
    copies_equal,
    first,
    intake_of,
    moved_equal,
    offering,
    put_in,
    redirect,
    two,
)

from node.config import Address
from node.dataplane import intake, tickets
from node.dataplane.frames import FRAME_BYTES, HELLO_BYTES
from node.dataplane.grpc_server import METHOD
from node.dataplane.lane import BREAKS_MAX
from node.dataplane.listeners import PlaneListeners
from node.dataplane.options import plane_message
from node.errors import PeerAnswerError
from node.migration import versions
from node.migration.target import Transfers
from node.migration.versions import Minors
from node.migration.wire import REASON_KEY
from node.server import Fitting
from node.trust import Role, unpin

PLAIN = [Plane.GRPC_PLAIN, Plane.SOCKET]
_SLOW_GRPC = [pytest.param(Plane.GRPC_PLAIN, marks=pytest.mark.slow), Plane.SOCKET]
by_plane_slowly = pytest.mark.parametrize("plane", _SLOW_GRPC, ids=lambda plane: plane.value)
by_plane = pytest.mark.parametrize("plane", PLAIN, ids=lambda plane: plane.value)
slow = pytest.mark.slow


def at_offset(place, xor=0x40):
    """Flip a bit of the byte at ``place`` of the first connection."""

    def change(offset, data):
        if offset <= place < offset + len(data):
            data[place - offset] ^= xor
        return data

    return first(change)


def cut_at(place):
    """Break the first connection off after ``place`` bytes."""
    return first(lambda offset, data: data if offset + len(data) <= place else None)


def swap_first_frames():
    """Let the second frame of the first connection overtake the first one."""
    held, done = bytearray(), []

    def change(offset, data):
        if done:
            return data
        held.extend(data)
        ends, place = [], HELLO_BYTES
        while len(ends) < 2:
            if len(held) < place + FRAME_BYTES:
                return bytearray()
            place += FRAME_BYTES + int.from_bytes(held[place : place + 4], "big")
            if len(held) < place:
                return bytearray()
            ends.append(place)
        done.append(True)
        one, other = held[HELLO_BYTES : ends[0]], held[ends[0] : ends[1]]
        return held[:HELLO_BYTES] + other + one + held[ends[1] :]

    return first(change)


# Without anybody in between.


@by_plane
@pytest.mark.parametrize("live", [False, pytest.param(True, marks=slow)], ids=["prompt", "live"])
def test_a_session_moves_over_a_plain_plane_and_goes_on_bit_for_bit(world, plane, live):
    async def work():
        async with two(world, offering(*PLAIN)) as (_, giving, target, taking):
            result = await moved_equal(giving, target, taking, plane, live=live)
            assert (result.data_plane, result.plane_fallback) == (plane.value, "")
            assert result.resumed == 0
            assert result.payload_bytes < result.wire_bytes < 1.2 * result.payload_bytes
            assert len(intake_of(target).tickets) == 0

    run(work())


def test_a_node_that_was_told_nothing_listens_nowhere_else_and_uses_mtls(world):
    async def work():
        async with two(world, None) as (_, giving, target, taking):
            assert target.planes._listening == [] and target.planes.intake is None
            result = await moved_equal(giving, target, taking, Plane.SOCKET)
            assert result.data_plane == "mtls"
            assert "does not offer socket to this node" in result.plane_fallback

    run(work())


def test_a_source_asks_by_its_own_setting_and_only_for_that_node(world):
    async def work():
        async with two(world, offering(Plane.SOCKET)) as (source, giving, target, _):
            session = await giving.append(await giving.open("s"), prompt(40))
            plain = await move(giving, target, session, copy_as="c1")
            towards = {"target": Plane.SOCKET}
            source.moves._source = dataclasses.replace(source.moves.source, towards=towards)
            asked = await move(giving, target, session, copy_as="c2")
            wish = plane_message(Plane.MTLS)
            back = await move(giving, target, session, copy_as="c3", data_plane=wish)
            found = [one.data_plane for one in (plain, asked, back)]
            assert found == ["mtls", "socket", "mtls"]
            assert not any(one.plane_fallback for one in (plain, asked, back))

    run(work())


@slow
@pytest.mark.parametrize("whose", ["sender", "plane"])
def test_what_was_not_opened_for_a_node_is_not_given_to_it(world, whose):
    options = offering(Plane.GRPC_PLAIN)
    if whose == "sender":
        options = offering(Plane.SOCKET, senders=("third",))

    async def work():
        async with two(world, options) as (_, giving, target, taking):
            result = await moved_equal(giving, target, taking, Plane.SOCKET)
            assert result.data_plane == "mtls" and "does not offer" in result.plane_fallback
            assert len(intake_of(target).tickets) == 0

    run(work())


@pytest.mark.parametrize("older", ["target", pytest.param("source", marks=slow)])
def test_a_node_from_before_data_planes_gets_and_gives_chunks_over_mtls(world, older):
    before = Minors(0, 1)

    async def work():
        fitting = Fitting(speaks=before) if older == "target" else None
        async with two(world, offering(Plane.SOCKET), fitting) as (source, giving, target, taking):
            if older == "source":
                source.moves._source = dataclasses.replace(source.moves.source, speaks=before)
            result = await moved_equal(giving, target, taking, Plane.SOCKET)
            assert result.data_plane == "mtls"
            assert "speaks 1.1, which has no data planes" in result.plane_fallback

    run(work())


def test_neither_token_nor_frame_key_is_ever_logged(world, caplog, monkeypatch):
    given = []
    issue = tickets.Tickets.issue

    def noted(self, *arguments):
        given.append(issue(self, *arguments))
        return given[-1]

    monkeypatch.setattr(tickets.Tickets, "issue", noted)
    caplog.set_level(logging.DEBUG)

    async def work():
        async with two(world, offering(*PLAIN)) as (_, giving, target, taking):
            await copies_equal(giving, target, taking, Plane.SOCKET, [(at_offset(60), None)])

    run(work())
    assert len(given) == 2 and "ended" in caplog.text
    for ticket in given:
        for secret in (ticket.token, ticket.frame_key):
            assert secret.hex() not in caplog.text and repr(secret) not in caplog.text


# Somebody in between.


def test_a_socket_stream_that_is_disturbed_anywhere_goes_on_where_it_was(world):
    """A bit at each part of it, a cut, a forged length, a frame that overtakes another."""
    piece = HELLO_BYTES + FRAME_BYTES
    places = [10, 20, HELLO_BYTES + 5, piece + 40, piece + 2500]
    disturbances = [(at_offset(place), None) for place in places]
    disturbances += [(cut_at(30), None)]
    disturbances += [(put_in(HELLO_BYTES, b"\x80\0\0\0" + bytes(16)), None)]  # 2 GiB
    disturbances += [(put_in(HELLO_BYTES, bytes(FRAME_BYTES)), None)]  # an end that is none
    disturbances += [(swap_first_frames(), None)]
    disturbances += [(None, at_offset(3))]  # the acknowledgement

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, taking):
            results = await copies_equal(giving, target, taking, Plane.SOCKET, disturbances)
            for result in results:
                assert (result.data_plane, result.plane_fallback) == ("socket", "")
                assert result.resumed == 1
                assert result.continuation_verdict == "exact"
            assert intake_of(target).streams == 0

    run(work(), 120.0)


def test_a_grpc_stream_that_is_disturbed_goes_on_where_it_was(world):
    disturbances = [(at_offset(30_000), None), (cut_at(20_000), None)]

    async def work():
        async with two(world, offering(Plane.GRPC_PLAIN)) as (_, giving, target, taking):
            results = await copies_equal(giving, target, taking, Plane.GRPC_PLAIN, disturbances)
            for result in results:
                assert (result.data_plane, result.plane_fallback) == ("grpc-plain", "")
                assert result.resumed == 1

    run(work(), 120.0)


@pytest.mark.slow
def test_what_arrived_before_a_stream_broke_is_kept(world, monkeypatch):
    sizes, answers = [], []
    require_answer = versions.require_answer

    def noted(source, node, reply, before):
        answers.append(reply.received_objects)
        return require_answer(source, node, reply, before)

    monkeypatch.setattr(versions, "require_answer", noted)

    def measured(number, offset, data):
        sizes.append(offset + len(data))
        return data

    def late(change):
        return lambda number, offset, data: change(max(sizes) * 2 // 3)(number, offset, data)

    disturbances = [(measured, None), (late(at_offset), None), (late(cut_at), None)]

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, taking):
            results = await copies_equal(giving, target, taking, Plane.SOCKET, disturbances)
            assert [one.resumed for one in results] == [0, 1, 1]
            assert answers[0] == answers[1] == answers[3] == 0
            # A chunk with a wrong tag, and what of it a cut left, was not taken; all before was.
            assert 0 < answers[2] < results[1].objects and 0 < answers[4] < results[2].objects

    run(work())


@by_plane_slowly
def test_a_wire_that_disturbs_every_stream_costs_three_and_then_it_is_mtls(world, plane):
    place = 0 if plane is Plane.GRPC_PLAIN else 60

    def change(number, offset, data):
        if offset == 0:
            data[place] ^= 1
        return data

    async def work():
        async with two(world, offering(plane)) as (_, giving, target, taking):
            wire = Wire(intake_of(target).addresses[plane], change)
            async with wire.open() as address:
                redirect(target, plane, address)
                result = await moved_equal(giving, target, taking, plane)
            assert result.data_plane == "mtls" and result.resumed == BREAKS_MAX
            assert f"{BREAKS_MAX} streams broke" in result.plane_fallback
            assert wire.connections >= BREAKS_MAX

    run(work())


def test_an_address_where_nobody_answers_costs_one_stream(world):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, taking):
            there = intake_of(target).addresses[Plane.SOCKET]
            redirect(target, Plane.SOCKET, dataclasses.replace(there, port=port))
            result = await moved_equal(giving, target, taking, Plane.SOCKET)
            assert result.data_plane == "mtls" and result.resumed == 1
            assert "nobody answers at its address" in result.plane_fallback

    run(work())


@by_plane_slowly
def test_a_plane_that_leads_to_the_mtls_port_ends_in_mtls(world, plane):
    async def work():
        async with two(world, offering(plane)) as (_, giving, target, taking):
            redirect(target, plane, target.address)
            result = await moved_equal(giving, target, taking, plane)
            assert result.data_plane == "mtls" and "streams broke" in result.plane_fallback

    run(work())


@pytest.mark.slow
def test_what_a_stranger_says_in_the_targets_place_ends_no_move(world):
    """A server without TLS that answers with a word by which a real target ends a transfer."""

    async def push(messages, context):
        context.set_trailing_metadata(((REASON_KEY, "stale_token"),))
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not yours any more")

    async def work():
        server = grpc.aio.server()
        service, _, method = METHOD.lstrip("/").partition("/")
        handler = grpc.stream_unary_rpc_method_handler(push)
        handlers = grpc.method_handlers_generic_handler(service, {method: handler})
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with two(world, offering(Plane.GRPC_PLAIN)) as (_, giving, target, taking):
            there = intake_of(target).addresses[Plane.GRPC_PLAIN]
            redirect(target, Plane.GRPC_PLAIN, dataclasses.replace(there, port=port))
            result = await moved_equal(giving, target, taking, Plane.GRPC_PLAIN)
            assert result.data_plane == "mtls" and result.resumed == BREAKS_MAX
        await server.stop(None)

    run(work())


def test_a_ticket_that_comes_too_late_opens_nothing(world, monkeypatch):
    monkeypatch.setattr(tickets, "TICKET_S", 0.0)

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, taking):
            result = await moved_equal(giving, target, taking, Plane.SOCKET)
            assert result.data_plane == "mtls" and result.resumed == BREAKS_MAX

    run(work())


@slow
def test_a_peer_that_is_unpinned_meanwhile_sends_no_further(world, monkeypatch):
    monkeypatch.setattr(intake, "STREAM_AGE_S", 0.0)
    gone = []

    def change(number, offset, data):
        if offset > 20_000 and not gone:
            gone.append(unpin(world.credentials("target"), "source", Role.NODE))
        return data

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (source, giving, target, _):
            source.moves._source = dataclasses.replace(source.moves.source, resume_s=1.0)
            session = await giving.append(await giving.open("s"), TOKENS)
            wire = Wire(intake_of(target).addresses[Plane.SOCKET], change)
            async with wire.open() as address:
                redirect(target, Plane.SOCKET, address)
                with pytest.raises(PeerAnswerError, match="stays on this node"):
                    await move(giving, target, session, data_plane=plane_message(Plane.SOCKET))
            assert gone and len(target.sessions) == 0
            assert len(await events(giving, session, len(TOKENS), 4)) == 4

    run(work(), 90.0)


def test_plain_streams_end_before_the_transfers_that_they_are_of(world, monkeypatch):
    """Else a piece would meet a spool whose file is closed already."""
    ended = []
    for kind, name in ((PlaneListeners, "streams"), (Transfers, "transfers")):
        close = kind.close

        async def noted(one, close=close, name=name):
            ended.append(name)
            await close(one)

        monkeypatch.setattr(kind, "close", noted)

    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, taking):
            await moved_equal(giving, target, taking, Plane.SOCKET)
            ended.clear()

    run(work())
    assert ended.index("streams") < ended.index("transfers")


def test_a_target_that_names_no_possible_host_costs_one_stream_after_another_and_then_mtls(world):
    async def work():
        async with two(world, offering(Plane.SOCKET)) as (_, giving, target, taking):
            redirect(target, Plane.SOCKET, Address("a..b", 80))
            result = await moved_equal(giving, target, taking, Plane.SOCKET)
            assert result.data_plane == "mtls" and result.plane_fallback

    run(work())
