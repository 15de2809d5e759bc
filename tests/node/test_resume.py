"""Links that break, targets and sources that restart: what arrived is never sent again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

import pytest
from node_support import SECONDS, HandSource, events, move, prompt, refusal, run

from kvpack.layout import LayerKind
from node.client import NodeClient
from node.config import Address
from node.errors import PeerAnswerError
from node.migration.feed import Feed
from node.migration.spool import private_paths
from node.migration.wire import encode_held, transfer_ref
from node.pb.v1 import migration_pb2 as pb
from node.server import running


class Link:
    """A TCP link to ``target`` that breaks after given numbers of bytes, and then heals."""

    def __init__(self, target: Address, cuts) -> None:
        self._target = target
        self._cuts = list(cuts)
        self.carried = 0
        self.broken = 0

    @contextlib.asynccontextmanager
    async def open(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield Address("127.0.0.1", server.sockets[0].getsockname()[1])

    async def _serve(self, reader, writer):
        budget = self._cuts.pop(0) if self._cuts else None
        try:
            there, back = await asyncio.open_connection(self._target.host, self._target.port)
        except OSError:
            writer.transport.abort()
            return
        ways = [
            asyncio.create_task(self._carry(reader, back, budget)),
            asyncio.create_task(self._carry(there, writer, None)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        writer.transport.abort()
        back.transport.abort()

    async def _carry(self, reader, writer, budget):
        while data := await reader.read(1 << 14):
            if budget is not None:
                budget -= len(data)
                if budget < 0:
                    self.broken += 1
                    return
            self.carried += len(data)
            writer.write(data)
            await writer.drain()


class Breaking(Link):
    """A link that breaks when it is told to, and heals at once."""

    def __init__(self, target) -> None:
        super().__init__(target, ())
        self._open = []

    async def _serve(self, reader, writer):
        self._open.append(writer.transport)
        await super()._serve(reader, writer)

    def cut(self) -> None:
        for transport in self._open:
            transport.abort()


def at(target, address):
    """``target`` behind another address."""
    return dataclasses.replace(target, address=address)


@contextlib.contextmanager
def noted(monkeypatch):
    """Streams as their source runs them: chunks held when it began, then each that was written."""
    streams = []
    run_feed, write = Feed.run, Feed._write

    async def run_noted(feed, stub, transfer, peer, holding):
        streams.append((holding.received, []))
        return await run_feed(feed, stub, transfer, peer, holding)

    async def write_noted(feed, call, sealed):
        await write(feed, call, sealed)
        streams[-1][1].append((sealed.index, sealed.reference.plain_bytes))

    with monkeypatch.context() as patched:
        patched.setattr(Feed, "run", run_noted)
        patched.setattr(Feed, "_write", write_noted)
        yield streams


@pytest.mark.parametrize("live", [False, True], ids=["prompt", "live"])
def test_a_move_over_a_link_that_breaks_again_and_again_sends_nothing_twice(
    world, live, monkeypatch
):
    tokens = prompt(3000)

    async def work(streams):
        async with world.pair() as (_, giving, target, taking):
            session = await giving.open("s")
            if live:
                session = await giving.append(session, tokens)
            # Between two breaks a chunk or two of 64 KiB get through.
            link = Link(target.address, [150_000] * 8)
            async with link.open() as address:
                result = await move(giving, at(target, address), session, () if live else tokens)
            assert link.broken >= 3 and result.resumed >= 3
            twin = await giving.append(await giving.open("twin"), tokens)
            expected = await events(giving, twin, 3000, 16)
            moved = await events(taking, await taking.get("s"), 3000, 16)
            layout = target.sessions.engine.model.layout
            kv_bytes = sum(layout.state_bytes(kind, 2999) for kind in LayerKind)
            return result, moved, expected, kv_bytes

    with noted(monkeypatch) as streams:
        result, moved, expected, kv_bytes = run(work(streams), 240.0)
    assert moved == expected
    # Each stream goes on with the first chunk that the target had not got, and so the target, which
    # refuses one that it has, held more each time. What was written and never arrived, which
    # depends on how much gRPC keeps in flight, is all that is sent again.
    held = [received for received, _ in streams]
    assert held == sorted(held) and len(set(held)) >= 3 and len(streams) == result.resumed + 1
    for received, written in streams:
        assert [index for index, _ in written] == list(range(received, received + len(written)))
    last, chunks = streams[-1]
    assert last + len(chunks) == result.objects
    assert result.nope_bytes + result.swa_bytes >= kv_bytes
    assert result.payload_bytes == sum(size for _, written in streams for _, size in written)


def test_a_link_that_stays_broken_ends_the_move_and_the_session_serves_on(world):
    async def work():
        async with world.pair() as (source, giving, target, _):
            source.moves._source = dataclasses.replace(source.moves.source, resume_s=1.0)
            session = await giving.append(await giving.open("s"), prompt(700))
            link = Link(target.address, [60_000] + [0] * 100)
            async with link.open() as address:
                with pytest.raises(Exception, match="stays on this node"):
                    await move(giving, at(target, address), session)
            twin = await giving.append(await giving.open("twin"), prompt(700))
            session = await giving.get("s")
            assert await events(giving, session, 700, 8) == await events(giving, twin, 700, 8)

    run(work())


@pytest.mark.parametrize("waits", ["for its turn", "for its rows"])
def test_what_a_stream_waited_before_it_broke_is_not_taken_off_the_time_for_going_on(world, waits):
    tokens, resume_s = prompt(700), 0.3

    async def work():
        async with world.pair() as (source, giving, target, taking):
            source.moves._source = dataclasses.replace(source.moves.source, resume_s=resume_s)
            session = await giving.open("s")
            async with contextlib.AsyncExitStack() as stack:
                if waits == "for its turn":
                    session = await giving.append(session, tokens)
                    alive = asyncio.get_running_loop().create_future()
                    await stack.enter_async_context(source.moves._turns.turn(alive))
                else:
                    await stack.enter_async_context(source.sessions.engine.pace._turn)
                link = Link(target.address, [40_000])
                async with link.open() as address:
                    given = () if waits == "for its turn" else tokens
                    moving = asyncio.create_task(move(giving, at(target, address), session, given))
                    await asyncio.sleep(3 * resume_s)
                    await stack.aclose()
                    result = await moving
            assert link.broken == result.resumed == 1
            return len(await events(taking, await taking.get("s"), 700, 2))

    assert run(work()) == 2


def test_a_target_that_takes_no_chunk_is_given_up_in_time_though_it_answers(world, monkeypatch):
    stall_s, resume_s = 0.6, 1.1
    monkeypatch.setattr("node.migration.feed.STALL_S", stall_s)
    streams = []

    async def work():
        async with world.pair() as (source, giving, target, _):
            source.moves._source = dataclasses.replace(source.moves.source, resume_s=resume_s)
            session = await giving.append(await giving.open("s"), prompt(40))

            async def hang(key, *_):
                streams.append(key)
                await asyncio.sleep(SECONDS)

            target.transfers.push = hang
            with pytest.raises(PeerAnswerError, match="does not read any more; the session stays"):
                await move(giving, target, session)
            return await events(giving, await giving.get("s"), 40, 2)

    assert len(run(work())) == 2
    # It is frozen meanwhile: two streams that hung are more than the time for going on.
    assert 1 <= len(streams) <= 2


def test_a_seal_whose_answer_is_lost_is_asked_again_while_the_session_is_frozen(world):
    async def work():
        async with world.pair() as (_, giving, target, taking):
            session = await giving.append(await giving.open("s"), prompt(300))
            lost = []
            seal = target.transfers.seal

            async def seal_and_lose(key, inventory):
                held = await seal(key, inventory)
                if not lost:
                    lost.append(held)
                    raise RuntimeError("the answer is lost")
                return held

            target.transfers.seal = seal_and_lose
            result = await move(giving, target, session)
            assert lost and result.resumed == 1
            assert result.continuation_verdict == "exact"
            return await events(taking, await taking.get("s"), 300, 4)

    assert len(run(work())) == 4


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_a_target_that_restarts_goes_on_with_what_its_spool_holds(world, sealed):
    async def work():
        async with world.node("source") as (source, giving):
            async with world.node("target") as (target, _):
                hand = HandSource(world, source, target)
                async with hand:
                    await hand.take_cut("s", prompt(400))
                    digest = await hand.boundary_digest()
                    await hand.prepare()
                    half = len(hand.chunks) if sealed else len(hand.chunks) // 2
                    await hand.push([chunk.object for chunk in hand.chunks[:half]])
                    if sealed:
                        await hand.seal(digest)
                port = target.address
            config = dataclasses.replace(world.config("target"), address=port)
            async with (
                running(config) as target,
                NodeClient(world.credentials("client"), "target", target.address) as taking,
                HandSource(world, source, target) as again,
            ):
                again.session, again.cut, again.chunks = hand.session, hand.cut, hand.chunks
                reply = await again.prepare()
                assert reply.received_objects == half
                rest = [chunk.object for chunk in again.chunks[half:]]
                if rest:
                    assert await again.push(rest) == len(again.chunks)
                await again.seal(digest)
                assert (await again.commit()).first_index == 400
                assert world.spool("target") == ["source.1.1.kvpack"]
                twin = await giving.append(await giving.open("twin"), prompt(400))
                expected = await events(giving, twin, 400, 8)
                assert await events(taking, await taking.get("s"), 400, 8) == expected

    run(work())


def test_a_target_that_was_killed_while_it_reopened_a_transfer_still_goes_on_with_all_of_it(world):
    async def work():
        async with world.node("source") as (source, _):
            async with (
                world.node("target") as (target, _),
                HandSource(world, source, target) as hand,
            ):
                await hand.take_cut("s", prompt(400))
                await hand.prepare()
                await hand.push([chunk.object for chunk in hand.chunks[:3]])
            whole, partial = private_paths(world.root / "target-data/spool/source.1.1.kvpack")
            partial.write_bytes(whole.read_bytes()[:700])
            async with (
                world.node("target") as (target, _),
                HandSource(world, source, target) as again,
            ):
                again.session, again.cut, again.chunks = hand.session, hand.cut, hand.chunks
                assert (await again.prepare()).received_objects == 3
                assert len(world.spool("target")) == 1

    run(work())


def test_a_source_that_restarts_names_what_the_target_has_of_its_older_transfer(world):
    async def work():
        async with (
            world.pair() as (source, giving, target, taking),
            HandSource(world, source, target) as hand,
        ):
            await hand.take_cut("s", prompt(400))
            digest = await hand.boundary_digest()
            await hand.prepare()
            half = len(hand.chunks) // 2
            await hand.push([chunk.object for chunk in hand.chunks[:half]])
            hand.ref = transfer_ref(1, 2)
            reply = await hand.prepare()
            sent = [chunk.reference.seal_id for chunk in hand.chunks[:half]]
            assert list(reply.held_seal_ids) == sent and reply.received_objects == 0
            first = await hand.status()
            assert first.state == pb.TRANSFER_STATE_OPEN
            call = hand.stub.push(timeout=SECONDS)
            from node.migration import wire

            await call.write(wire.encode_open(hand.ref))
            for seal_id in sent:
                await call.write(encode_held(seal_id))
            for chunk in hand.chunks[half:]:
                await call.write(wire.encode_object(chunk.object))
            await call.done_writing()
            assert (await call).received_objects == len(hand.chunks)
            await hand.seal(digest)
            await hand.commit()
            assert world.spool("target") == ["source.1.2.kvpack"]
            twin = await giving.append(await giving.open("twin"), prompt(400))
            expected = await events(giving, twin, 400, 8)
            assert await events(taking, await taking.get("s"), 400, 8) == expected

    run(work())


def test_an_older_stream_cannot_mix_with_the_one_after_a_new_prepare(world):
    async def work():
        async with (
            world.pair() as (source, _, target, _),
            HandSource(world, source, target) as hand,
        ):
            from node.migration import wire

            await hand.take_cut("s", prompt(400))
            await hand.prepare()
            old = hand.stub.push(timeout=SECONDS)
            await old.write(wire.encode_open(hand.ref))
            await old.write(wire.encode_object(hand.chunks[0].object))
            while (await hand.status()).state != pb.TRANSFER_STATE_OPEN:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert (await hand.prepare()).received_objects == 1
            await old.write(wire.encode_object(hand.chunks[1].object))
            reason, _ = await refusal(_ended(old))
            assert reason == "transfer_state"
            assert await hand.push([c.object for c in hand.chunks[1:]]) == len(hand.chunks)

    async def _ended(call):
        await call.done_writing()
        return await call

    run(work())


def test_a_move_that_is_cancelled_frees_the_target_at_once_and_the_session_goes_on(world):
    """The link carries little and then nothing, so that the move is in its stream for long."""

    async def work():
        async with world.pair() as (source, giving, target, _):
            session = await giving.append(await giving.open("s"), prompt(3000))
            link = Slow(target.address, 60_000)
            async with link.open() as address:
                moving = asyncio.create_task(move(giving, at(target, address), session))
                while not link.is_full:
                    await asyncio.sleep(0.01)
                with pytest.raises(PeerAnswerError) as twice:
                    await move(giving, at(target, address), session)
                assert twice.value.peer_reason == "session_state"
                start = time.monotonic()
                link.let_go()
                await giving.cancel_move(session)
                with pytest.raises(PeerAnswerError, match="cancelled; the session stays"):
                    await moving
                assert not target.transfers.open_offers()
                assert world.spool("target") == []
                assert time.monotonic() - start < 10.0
                with pytest.raises(PeerAnswerError) as nothing:
                    await giving.cancel_move(session)
                assert nothing.value.peer_reason == "session_state"
            assert source.moves.under_way == ()
            twin = await giving.append(await giving.open("twin"), prompt(3000))
            session = await giving.get("s")
            assert await events(giving, session, 3000, 8) == await events(giving, twin, 3000, 8)

    run(work())


class Slow(Link):
    """A link that stops carrying after a number of bytes, until it is let go."""

    def __init__(self, target: Address, most: int) -> None:
        super().__init__(target, ())
        self._most = most
        self._gate = asyncio.Event()
        self.is_full = False

    def let_go(self) -> None:
        self._gate.set()

    async def _carry(self, reader, writer, budget):
        while data := await reader.read(1 << 14):
            self.carried += len(data)
            if self.carried > self._most:
                self.is_full = True
                await self._gate.wait()
            writer.write(data)
            await writer.drain()
