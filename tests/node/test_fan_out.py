"""One session copied to several targets at once, and one target that several sources push to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time

import pytest
from click.testing import CliRunner
from node_support import SECONDS, HandSource, events, move, prompt, refusal, run
from test_resume import Link

from node.cli import main
from node.errors import InventoryError, PeerAnswerError
from node.migration import fan as fan_module
from node.migration import feed as feed_module
from node.migration import producer as producer_module
from node.migration import wire
from node.migration.book import OPEN_MAX
from node.migration.moves import NotMoved, Targets
from node.migration.orders import Moved, Order
from node.pb.v1 import migration_pb2 as pb
from node.pb.v1 import session_pb2


@contextlib.asynccontextmanager
async def three(world):
    """A source and two targets, each with its client."""
    async with (
        world.pair() as (source, giving, target, taking),
        world.node("third") as (third, its_client),
    ):
        yield source, giving, (target, third), (taking, its_client)


def orders(*places):
    """Copies ``c1``, ``c2``, ... on nodes; of a pair, on a node behind another address."""
    found = []
    for number, place in enumerate(places, 1):
        node, address = place if isinstance(place, tuple) else (place, place.address)
        found.append(Order(node.name, address, copy_as=f"c{number}"))
    return Targets(tuple(found))


async def fan_out(source, session_id, token_ids, targets):
    """What became of each target."""
    session = await source.sessions.find(session_id)
    told = [
        event.event
        async for event in source.moves.fan_out(session_id, session.token, token_ids, targets)
    ]
    return [one for one in told if isinstance(one, Moved | NotMoved)]


async def continued(giving, clients, tokens, count=8):
    """``(copies, expected)``: what each client's copy says next, and what a twin says."""
    index = len(tokens)
    copies = [
        await events(client, await client.get(name), index, count)
        for name, client in clients.items()
    ]
    twin = await giving.append(await giving.open("twin"), tokens)
    return copies, await events(giving, twin, index, count)


class Sealing:
    """Notes every call of a function that seals: rows and states, and token ids apart."""

    def __init__(self, monkeypatch) -> None:
        # On a busy machine, too, no target begins so late that it misses something.
        monkeypatch.setattr(fan_module, "START_S", SECONDS)
        self.items = []
        self.tokens = []
        for name, note in (
            ("seal_tile_framed", lambda tile, *_: self.items.append(tile.spec)),
            ("seal_tile", lambda tile, *_: self.items.append(tile.spec)),
            ("seal_component", lambda *what: self.items.append(what[:2])),
            ("seal_token_ids", lambda ids, first=-1: self.tokens.append((len(ids), first))),
        ):
            self._count(monkeypatch, name, note)

    def _count(self, monkeypatch, name, note):
        seal = getattr(producer_module, name)

        def counted(context, *arguments):
            note(*arguments)
            return seal(context, *arguments)

        monkeypatch.setattr(producer_module, name, counted)


@pytest.mark.parametrize("known", [True, False], ids=["prompt", "live"])
def test_two_targets_get_the_bits_of_one_session_and_each_chunk_is_sealed_once(
    world, monkeypatch, known
):
    tokens = prompt(600)
    sealing = Sealing(monkeypatch)
    put = feed_module.Feed._put

    async def put_late(*arguments):
        await asyncio.sleep(0.02)
        await put(*arguments)

    monkeypatch.setattr(feed_module.Feed, "_put", put_late)

    async def work():
        async with three(world) as (source, giving, nodes, clients):
            session = await giving.open("s")
            if not known:
                await giving.append(session, tokens)
            results = await fan_out(source, "s", tokens if known else (), orders(*nodes))
            assert all(isinstance(one, Moved) for one in results), results
            kept = await events(giving, await giving.get("s"), 600, 8)
            return (
                results,
                kept,
                *await continued(giving, dict(zip(("c1", "c2"), clients, strict=True)), tokens),
            )

    results, kept, copies, expected = run(work())
    assert copies == [expected, expected] and kept == expected
    # The same chunks went to both; all of them were sealed, and none of them twice.
    first, second = results
    assert first.objects == second.objects
    # Prepare offers the known tokens, once for both; those of the cut are on the tape.
    assert sealing.tokens == [(600, -1), (599, 0)]
    assert len(sealing.items) == len(set(sealing.items)) == first.objects - 1
    assert first.timeline.payload_bytes == second.timeline.payload_bytes
    assert first.timeline.zero_s == second.timeline.zero_s > first.timeline.start_s
    if not known:
        # It is held only when its whole blocks have left for both.
        for timeline in (first.timeline, second.timeline):
            hidden = [one.plain_bytes for one in timeline.sent if one.at_s <= timeline.zero_s]
            assert hidden == 2 * [1 << 16]


def test_a_link_that_breaks_is_resumed_alone_and_the_other_target_gets_each_chunk_once(
    world, monkeypatch
):
    tokens = prompt(1500)
    sealing = Sealing(monkeypatch)

    async def work():
        async with three(world) as (source, giving, (target, third), (taking, its_client)):
            await giving.open("s")
            link = Link(third.address, [60_000, 60_000, 90_000])
            async with link.open() as address:
                results = await fan_out(source, "s", tokens, orders(target, (third, address)))
            assert all(isinstance(one, Moved) for one in results), results
            clients = {"c1": taking, "c2": its_client}
            return link, results, *await continued(giving, clients, tokens)

    link, (whole, broken), copies, expected = run(work())
    assert copies == [expected, expected]
    assert link.broken >= 2 and broken.timeline.resumed >= 2 and whole.timeline.resumed == 0
    # What the broken one had missed was made once more for it, and no more than that.
    assert whole.objects - 1 == len(set(sealing.items)) <= len(sealing.items) < 2 * whole.objects
    assert len(whole.timeline.sent) == whole.objects


def test_if_every_link_breaks_what_is_left_is_made_for_those_that_come_back(world):
    tokens = prompt(1500)

    async def work():
        async with three(world) as (source, giving, nodes, clients):
            await giving.open("s")
            links = [Link(node.address, [60_000]) for node in nodes]
            async with links[0].open() as first, links[1].open() as second:
                places = zip(nodes, (first, second), strict=True)
                results = await fan_out(source, "s", tokens, orders(*places))
            assert all(isinstance(one, Moved) and one.timeline.resumed for one in results), results
            return await continued(giving, dict(zip(("c1", "c2"), clients, strict=True)), tokens)

    copies, expected = run(work())
    assert copies == [expected, expected]


class Unread:
    """A call of a peer that stopped reading: no write returns any more."""

    async def write(self, _):
        await asyncio.sleep(SECONDS)


def test_a_target_that_stops_reading_is_waited_for_within_a_bound_and_then_left_behind(
    world, monkeypatch
):
    # Eight whole blocks, more than two and what may be ahead of a target that took two.
    tokens = prompt(2100)
    monkeypatch.setattr(fan_module, "START_S", SECONDS)
    monkeypatch.setattr(feed_module, "STALL_S", 1.0)
    ahead, written, streams, waited = [], [], [], []

    class Watched(fan_module.Fan):
        async def take(self, seat):
            sealed = await super().take(seat)
            ahead.extend(self._made - one.next for one in self.seats if one.holds)
            assert len(self._window) <= fan_module.WINDOW_CHUNKS
            return sealed

    class Stalling(fan_module.SharedFeed):
        async def _stream(self, *arguments):
            streams.append(self._seat)
            await super()._stream(*arguments)

        async def _write(self, call, sealed):
            if self._seat is self._fan.seats[1] and sealed.index >= 2:
                await self._stall(call, sealed)
            await super()._write(call, sealed)
            written.append((sealed.index, time.monotonic()))

        async def _stall(self, call, sealed):
            if streams.count(self._seat) == 1:
                await super()._write(Unread(), sealed)
            # It came back. Now nobody waits for it any more: the others come to their end.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SECONDS):
                    await self._fan.finished()
                    waited.append(self._fan.seats[0].next)
            raise InventoryError("enough of it")

    monkeypatch.setattr("node.migration.moves.Fan", Watched)
    monkeypatch.setattr("node.migration.moves.SharedFeed", Stalling)

    async def work():
        async with three(world) as (source, giving, (target, third), (taking, _)):
            # All rows are there: nothing but the slowest target can hold the producer back.
            await giving.append(await giving.open("s"), tokens)
            good, bad = await fan_out(source, "s", (), orders(target, third))
            assert isinstance(good, Moved) and isinstance(bad, NotMoved)
            assert "enough of it" in str(bad.error)
            assert "c2" not in third.sessions
            return await continued(giving, {"c1": taking}, tokens)

    copies, expected = run(work())
    assert copies == [expected]
    # It held the others back while its write might have returned, and not after that.
    assert max(ahead) == fan_module.WINDOW_CHUNKS
    paused = [later[1] - earlier[1] for earlier, later in itertools.pairwise(sorted(written))]
    assert max(paused) >= 0.9
    assert waited


def test_a_target_that_refuses_or_is_not_there_holds_up_nobody(world, monkeypatch):
    tokens = prompt(300)
    monkeypatch.setattr(fan_module, "START_S", 3600.0)

    async def work():
        async with three(world) as (source, giving, (target, third), (taking, its_client)):
            await giving.open("s")
            await taking.open("c1")
            nowhere = dataclasses.replace(third.address, port=1)
            refused, good, gone = await fan_out(
                source, "s", tokens, orders(target, third, (target, nowhere))
            )
            assert isinstance(good, Moved)
            assert refused.error.reason == gone.error.reason == "transfer_failed"
            return await continued(giving, {"c2": its_client}, tokens)

    copies, expected = run(work())
    assert copies == [expected]


def test_if_no_target_takes_part_nothing_is_computed_and_the_session_serves_on(world):
    async def work():
        async with three(world) as (source, giving, (target, _), (taking, _)):
            await giving.open("s")
            for name in ("c1", "c2"):
                await taking.open(name)
            outcomes = await fan_out(source, "s", prompt(40), orders(target, target))
            assert [type(one) for one in outcomes] == [NotMoved, NotMoved]
            session = await source.sessions.find("s")
            assert session.position == 0 and not session.lock.locked()
            assert len(await events(giving, await giving.get("s"), 40, 2)) == 2

    run(work())


def test_what_one_target_holds_is_named_to_it_alone(world):
    tokens = prompt(600)

    async def work():
        async with three(world) as (source, giving, (target, third), (taking, its_client)):
            await taking.save(await taking.append(await taking.open("own"), tokens))
            await target.tier.settled()
            await giving.open("s")
            results = await fan_out(source, "s", tokens, orders(target, third))
            clients = {"c1": taking, "c2": its_client}
            return results, *await continued(giving, clients, tokens)

    (holds, holds_not), copies, expected = run(work())
    assert copies == [expected, expected]
    assert holds.timeline.held_bytes > 0 and holds_not.timeline.held_bytes == 0
    sent = [one.timeline.payload_bytes + one.timeline.held_bytes for one in (holds, holds_not)]
    assert sent[0] == sent[1]


def test_orders_that_cannot_be_are_refused_by_name(world):
    def target(name):
        return session_pb2.MigrateTarget(node="target", address="127.0.0.1:9", copy_as=name)

    async def work():
        async with world.node("source") as (_, giving):
            session = await giving.append(await giving.open("s"), prompt(20))
            for changes in (
                {"targets": [target("a"), target("a")]},
                {"targets": [target("")]},
                {"targets": [target(f"c{number}") for number in range(9)]},
                {"targets": [target("a")], "copy_as": "b"},
            ):
                request = session_pb2.MigrateRequest(session_id="s", token=session.token, **changes)
                with pytest.raises(PeerAnswerError) as refused:
                    async for _ in giving.migrate(request):
                        pass
                assert refused.value.peer_reason == "over_limit"

    run(work())


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command_says_of_each_target_what_became_of_it_and_fails_if_one_failed(world):
    async def work():
        async with three(world) as (source, giving, nodes, clients):
            await giving.append(await giving.open("s"), prompt(300))
            to = [part for node in nodes for part in ("--to", f"{node.name}@{node.address}")]
            common = ("--node", f"source@{source.address}", "--mode", "copy", "--as", "c")
            folder = ("--credentials", world.credentials("client"))

            async def call(*more):
                return await asyncio.to_thread(invoke, "migrate", "s", *to, *common, *folder, *more)

            first = await call()
            assert first.exit_code == 0, first.output
            assert "c-1 on target" in first.stdout and "c-2 on third" in first.stdout
            await clients[1].close_session(await clients[1].get("c-2"))
            return await call("--json")

    again = run(work())
    assert again.exit_code == 1
    failed, good = map(json.loads, again.stdout.splitlines())
    assert (failed["target_node"], failed["failed"]) == ("target", "transfer_failed")
    assert failed["session_id"] == "c-1" and "c-1" in failed["detail"]
    assert (good["session_id"], good["continuation_verdict"]) == ("c-2", "exact")


@pytest.mark.parametrize(
    ("mode", "count", "word"), [("move", 2, "--mode copy"), ("copy", 9, "at most 8")]
)
def test_several_targets_need_a_copy_and_have_a_bound(world, mode, count, word):
    to = [part for _ in range(count) for part in ("--to", "target@127.0.0.1:9")]
    where = ("--node", "source@127.0.0.1:9", "--credentials", world.credentials("client"))
    result = invoke("migrate", "s", *to, *where, "--mode", mode)
    assert result.exit_code == 2 and word in result.stderr


@contextlib.asynccontextmanager
async def two_sources(world):
    """``(target, its client, sources)``: two nodes with a cut each, ready to push to a third."""
    async with (
        three(world) as (source, _, (target, third), (taking, _)),
        HandSource(world, source, target) as one,
        HandSource(world, third, target, caller="third") as other,
    ):
        await one.take_cut("a", prompt(300))
        await other.take_cut("b", prompt(400, seed=5))
        yield target, taking, (one, other)


async def pushed_in_turn(hands, stop):
    """Both streams, one chunk each in turn; the first one's source aborts after ``stop``."""
    calls = [hand.stub.push(timeout=SECONDS) for hand in hands]
    for hand, call in zip(hands, calls, strict=True):
        await call.write(wire.encode_open(hand.ref))
    for number in range(max(len(hand.chunks) for hand in hands)):
        if number == stop:
            await hands[0].abort()
            calls[0].cancel()
        for place, (hand, call) in enumerate(zip(hands, calls, strict=True)):
            if number < len(hand.chunks) and (place or number < stop):
                await call.write(wire.encode_object(hand.chunks[number].object))
    await calls[1].done_writing()
    return (await calls[1]).received_objects


def test_of_two_interleaved_sources_one_aborts_and_the_other_is_untouched(world):
    async def work():
        async with two_sources(world) as (target, taking, hands):
            for hand in hands:
                await hand.prepare()
            taken = await pushed_in_turn(hands, stop=3)
            one, other = hands
            assert taken == len(other.chunks)
            assert (await one.status()).state == pb.TRANSFER_STATE_ABORTED
            await other.seal(await other.boundary_digest())
            await other.commit()
            assert "a" not in target.sessions and "b" in target.sessions
            # The aborted one serves where it was, and its source may try again at once.
            assert "a" in one.source.sessions
            one.ref = wire.transfer_ref(1, 2)
            await one.prepare()
            await one.push()
            await one.seal(await one.boundary_digest())
            await one.commit()
            moved = [
                await events(taking, await taking.get(name), index, 8)
                for name, index in (("a", 300), ("b", 400))
            ]
            twins = [
                await taking.append(await taking.open("twin-a"), prompt(300)),
                await taking.append(await taking.open("twin-b"), prompt(400, seed=5)),
            ]
            return moved, [
                await events(taking, twin, index, 8)
                for twin, index in zip(twins, (300, 400), strict=True)
            ]

    moved, expected = run(work())
    assert moved == expected


def test_two_sources_move_and_copy_to_one_target_at_the_same_time(world):
    async def work():
        async with three(world) as (_, giving, (target, _), (taking, third_client)):
            first = await giving.open("a")
            second = await third_client.append(await third_client.open("b"), prompt(400, seed=5))
            results = await asyncio.gather(
                move(giving, target, first, prompt(500)),
                move(third_client, target, second, copy_as="b2"),
            )
            assert {one.continuation_verdict for one in results} == {"exact"}
            moved = [
                await events(taking, await taking.get(name), index, 8)
                for name, index in (("a", 500), ("b2", 400))
            ]
            twins = [
                await taking.append(await taking.open("twin-a"), prompt(500)),
                await taking.append(await taking.open("twin-b"), prompt(400, seed=5)),
            ]
            return moved, [
                await events(taking, twin, index, 8)
                for twin, index in zip(twins, (500, 400), strict=True)
            ]

    moved, expected = run(work())
    assert moved == expected


def test_the_bound_of_open_transfers_counts_all_sources_together(world):
    async def work():
        async with two_sources(world) as (_, _, (one, other)):
            for number in range(1, OPEN_MAX + 1):
                hand = (one, other)[number % 2]
                hand.ref = wire.transfer_ref(1, number)
                await hand.prepare(mode=pb.MODE_COPY, session_id=f"copy-{number}")
            last = {"mode": pb.MODE_COPY, "session_id": "copy-last"}
            for hand in (one, other):
                hand.ref = wire.transfer_ref(1, OPEN_MAX + 1)
                assert (await refusal(hand.prepare(**last)))[0] == "busy"
            other.ref = wire.transfer_ref(1, 1)
            await other.abort()
            await one.prepare(**last)

    run(work())
