"""A producer that is away, slow, breaks off, differs or refuses: computed here, nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from types import SimpleNamespace

import pytest
from node_support import HandSource, prompt, refusal, run
from remote_support import (
    CONSUMER,
    PRODUCER,
    enroll_consumer,
    left_over,
    nothing_left,
    producing,
    remote_of,
)

from node.client import NodeClient
from node.config import Address
from node.errors import PeerAnswerError
from node.migration.moves import Moves
from node.migration.orders import Progress
from node.migration.producer import Producer
from node.pb.v1 import session_pb2
from node.serving import remote as remote_module
from node.serving.order import Fallback
from node.serving.producer import Arrival, Failure
from node.serving.remote import RemotePrefill
from node.sessions import Sessions
from node.transient import PREFIX, transient_name
from tests.small_model import make_small_model


class Cable:
    """A TCP link that can be cut for good."""

    def __init__(self, there: Address) -> None:
        self._there = there
        self._ends = []
        self._is_cut = False

    @contextlib.asynccontextmanager
    async def open(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
            self.cut()

    def cut(self) -> None:
        self._is_cut = True
        for end in self._ends:
            end.transport.abort()

    async def _serve(self, reader, writer):
        self._ends.append(writer)
        if self._is_cut:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(self._there.host, self._there.port)
        self._ends.append(back)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._carry(reader, back), self._carry(there, writer))

    async def _carry(self, reader, writer):
        while data := await reader.read(1 << 14):
            writer.write(data)
            await writer.drain()
        writer.close()


async def failure(remote, tokens=300, within_s=8.0):
    """What a prompt failed with, and that it did so in time."""
    start = time.monotonic()
    outcome = await remote.prefill(prompt(tokens))
    assert isinstance(outcome, Failure), outcome
    assert time.monotonic() - start < within_s
    assert remote.last_failure == outcome
    return outcome.kind


def slow_down(patch, seconds):
    """Let every computation of a producer take that long; gives an event set when one began."""
    began, compute = asyncio.Event(), Producer._compute

    async def slowly(self, rows):
        began.set()
        await asyncio.sleep(seconds)
        await compute(self, rows)

    patch.setattr(Producer, "_compute", slowly)
    return began


def test_a_producer_that_is_away_is_told_at_once_and_not_asked_again_for_a_while(
    world, monkeypatch
):
    now_s = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])

    async def work():
        async with producing(world) as (_, consumer, good):
            monkeypatch.setattr(remote_module, "time", clock)
            dead = Address("127.0.0.1", 1)
            remote = remote_of(world, consumer, dead, rest_s=2.0)
            assert await failure(remote) is Fallback.AWAY
            now_s[0] += 1.9
            assert await failure(remote) is Fallback.RESTING
            assert remote.counts.asked == 1
            now_s[0] += 0.2
            assert await failure(remote) is Fallback.AWAY
            # The second rest is twice as long as the first.
            assert remote.resting_s() == 4.0
            assert remote.counts.fallbacks == {Fallback.AWAY: 2, Fallback.RESTING: 1}
            assert isinstance(await good.prefill(prompt(100)), Arrival)

    run(work())


def test_a_port_that_accepts_and_says_nothing_is_away(world):
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    async def work():
        async with producing(world) as (_, consumer, _):
            server = await asyncio.start_server(silent, "127.0.0.1", 0)
            async with server:
                address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
                remote = remote_of(world, consumer, address, answer_s=0.4)
                assert await failure(remote) is Fallback.AWAY
                await remote.close()

    run(work())


def test_a_producer_without_progress_is_slow_and_forgets_the_prompt(world, monkeypatch):
    async def work():
        async with producing(world, stall_s=0.4) as (producer, consumer, remote):
            with monkeypatch.context() as patch:
                slow_down(patch, 30)
                assert await failure(remote) is Fallback.SLOW
                await nothing_left(world, producer, consumer)

    run(work())


def test_a_producer_that_is_never_done_is_slow_though_it_makes_progress(world, monkeypatch):
    async def work():
        async with producing(world, stall_s=5, total_s=0.6) as (producer, consumer, remote):
            with monkeypatch.context() as patch:
                slow_down(patch, 0.15)
                assert await failure(remote, 4000) is Fallback.SLOW
                await nothing_left(world, producer, consumer)

    run(work())


def test_a_producer_that_breaks_off_in_the_middle_leaves_nothing_on_either_end(world, monkeypatch):
    async def work():
        async with producing(world) as (producer, consumer, _):
            calls, push = Cable(producer.address), Cable(consumer.address)
            async with calls.open() as there, push.open() as here:
                remote = remote_of(world, consumer, there, own_address=here)
                with monkeypatch.context() as patch:
                    began = slow_down(patch, 0.2)
                    asked = asyncio.create_task(failure(remote, 3000))
                    await began.wait()
                    while not consumer.transfers.open_offers():
                        await asyncio.sleep(0.01)
                    assert await left_over(consumer) and await left_over(producer)
                    calls.cut()
                    push.cut()
                    assert await asked is Fallback.BROKEN
                    await nothing_left(world, producer, consumer)
                await remote.close()

    run(work())


def test_a_caller_who_goes_away_ends_it_on_both_ends(world, monkeypatch):
    async def work():
        async with producing(world) as (producer, consumer, remote):
            with monkeypatch.context() as patch:
                began = slow_down(patch, 0.2)
                asked = asyncio.create_task(remote.prefill(prompt(3000)))
                await began.wait()
                while not consumer.transfers.open_offers():
                    await asyncio.sleep(0.01)
                # It can be had anew: nothing of it is written to a disk.
                assert world.spool(CONSUMER) == []
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
                await nothing_left(world, producer, consumer)
            assert remote.under_way == 0
            assert isinstance(await remote.prefill(prompt(100)), Arrival)

    run(work())


def test_a_hang_up_alone_ends_it_where_it_is_computed(world, monkeypatch):
    """As after a crash of who asked: nobody is left to refuse what still comes."""

    async def work():
        async with producing(world) as (producer, consumer, _):
            name, began = transient_name(), slow_down(monkeypatch, 0.2)
            request = session_pb2.MigrateRequest(
                session_id=transient_name(), copy_as=name, token_ids=prompt(3000), transient=True,
                target_node=CONSUMER, target_address=str(consumer.address),
            )  # fmt: skip
            with consumer.transfers.guests.awaiting(name):
                where = world.credentials(CONSUMER), PRODUCER, producer.address
                async with (
                    NodeClient(*where) as client,
                    contextlib.aclosing(client.migrate(request)) as events,
                ):
                    await anext(events)
                    await began.wait()
                await nothing_left(world, producer)
                assert consumer.transfers.open_offers()
            await consumer.transfers.dismiss(name)

    run(work())


def test_a_producer_that_says_the_same_again_and_again_is_slow(world, monkeypatch):
    async def stuck(self, session_id, token_ids, order):
        while True:
            yield Progress("streaming", 0, 300, 0, 1000)
            await asyncio.sleep(0.02)

    async def work():
        async with producing(world, stall_s=0.3, total_s=20) as (_, _, remote):
            monkeypatch.setattr(Moves, "lend", stuck)
            assert await failure(remote) is Fallback.SLOW

    run(work())


def test_another_model_is_said_before_anything_is_computed(world, tmp_path, monkeypatch):
    make_small_model(tmp_path / "other", "muse_glimmer", seed=4, window=16, layers=4)

    async def work():
        async with producing(world, tmp_path / "other") as (_, _, remote):
            with monkeypatch.context() as patch:
                began = slow_down(patch, 30)
                assert await failure(remote) is Fallback.MODEL
                assert not began.is_set()
                assert "weights" in remote.last_failure.detail

    run(work())


@pytest.mark.parametrize("pinned", [False, True], ids=["as-nothing", "as-a-stranger-to-us"])
def test_a_producer_that_does_not_work_for_this_node_is_named_as_refusing(world, pinned):
    async def work():
        if pinned:
            enroll_consumer(world)
        async with (
            world.node(PRODUCER) as (producer, _),
            world.node(CONSUMER) as (consumer, _),
        ):
            remote = remote_of(world, consumer, producer.address)
            if pinned:
                # It may ask, but the producer knows no node of that name to send to.
                consumer.sessions.node = "nobody"
            assert await failure(remote) is Fallback.REFUSED
            await remote.close()
            await nothing_left(world, producer, consumer)

    run(work())


def test_rows_of_another_prompt_are_not_taken(world, monkeypatch):
    lend = Moves.lend

    def other(self, session_id, token_ids, order):
        return lend(self, session_id, [*token_ids[:5], 9, *token_ids[6:]], order)

    async def work():
        async with producing(world) as (_, _, remote):
            monkeypatch.setattr(Moves, "lend", other)
            assert await failure(remote) is Fallback.BROKEN

    run(work())


def test_rows_of_other_numerics_are_told_from_this_nodes(world):
    async def work():
        async with producing(world) as (producer, _, remote):
            source = producer.moves._source
            (name, _), *rest = source.binding.numerics.values
            numerics = dataclasses.replace(
                source.binding.numerics, values=((name, "another"), *rest)
            )
            producer.moves._source = dataclasses.replace(
                source, binding=dataclasses.replace(source.binding, numerics=numerics)
            )
            arrival = await remote.prefill(prompt(200))
            assert isinstance(arrival, Arrival) and not arrival.exact

    run(work())


def test_a_transfer_that_nobody_waits_for_is_refused(world):
    async def work():
        async with (
            world.pair() as (source, _, target, _),
            HandSource(world, source, target) as hand,
        ):
            await hand.take_cut("s", prompt(40))
            late = hand.prepare(mode=2, session_id=transient_name())
            assert (await refusal(late))[0] == "transfer_state"
            with target.transfers.guests.awaiting(PREFIX + "x"):
                await hand.prepare(mode=2, session_id=PREFIX + "x")
            await target.transfers.dismiss(PREFIX + "x")
            assert await left_over(target) == []

    run(work())


@pytest.mark.parametrize("name", [CONSUMER, PRODUCER])
def test_a_node_that_ended_in_between_releases_the_session_at_its_next_start(
    world, monkeypatch, name
):
    async def forget(*_):
        """As a process that ends before it comes to it."""

    async def work():
        enroll_consumer(world)
        async with (
            world.node(PRODUCER) as (producer, _),
            world.node(CONSUMER) as (consumer, _),
        ):
            monkeypatch.setattr(RemotePrefill, "_clear", forget)
            if name == PRODUCER:
                monkeypatch.setattr(Sessions, "end", forget)
            remote = remote_of(world, consumer, producer.address)
            assert isinstance(await remote.prefill(prompt(100)), Arrival)
            node = {PRODUCER: producer, CONSUMER: consumer}[name]
            assert await left_over(node)
        monkeypatch.undo()
        async with world.node(name) as (again, _):
            assert await left_over(again) == []
            assert world.spool(name) == []

    run(work())


def test_only_names_of_transient_sessions_are_lent(world):
    async def work():
        async with producing(world) as (producer, consumer, _):
            for names in (("s", transient_name()), (transient_name(), "c")):
                request = session_pb2.MigrateRequest(
                    session_id=names[0], copy_as=names[1], token_ids=prompt(40), transient=True,
                    target_node=CONSUMER, target_address=str(consumer.address),
                )  # fmt: skip
                where = world.credentials(CONSUMER), PRODUCER, producer.address
                async with NodeClient(*where) as client:
                    with pytest.raises(PeerAnswerError, match="begins with transient"):
                        async for _ in client.migrate(request):
                            pass
            assert "s" not in producer.sessions

    run(work())


def test_no_client_opens_a_session_under_a_name_of_the_nodes_own(world):
    async def work():
        async with producing(world) as (producer, _, __):
            where = world.credentials(CONSUMER), PRODUCER, producer.address
            async with NodeClient(*where) as client:
                with pytest.raises(PeerAnswerError, match="does not begin with transient"):
                    await client.open(transient_name())
            assert not len(producer.sessions)

    run(work())
