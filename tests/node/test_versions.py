"""Two versions of the protocol: what is chosen, what an older peer sees, what a restart keeps.

``recorded/`` holds what a node sent before versions were said: two Prepares as they left it, and
every field of version 1.0 with its number and type.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import sqlite3
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from node_support import LAYERS, SECONDS, WINDOW, HandSource, events, move, prompt, refusal, run
from test_fan_out import continued, fan_out, orders, three
from test_resume import Link, at

import kvpack
from kvpack.errors import LimitError
from node import migration_service
from node.cli import main
from node.client import NodeClient
from node.errors import PeerAnswerError, ProtocolVersionError
from node.migration import versions, wire
from node.migration.journal import Journal, TransferKey
from node.migration.messages import read_offer
from node.migration.moves import NotMoved
from node.migration.orders import Moved
from node.migration.versions import OURS, UNSAID, Minors, Speaker, choose
from node.pb.v1 import migration_pb2 as pb
from node.pb.v1 import ownership_pb2
from node.server import Fitting, running
from node.tiny import make_tiny_model

RECORDED = Path(__file__).parent / "recorded"
RANGES = [Minors(low, high) for low, high in itertools.combinations_with_replacement(range(4), 2)]


def recorded(name: str) -> bytes:
    return bytes.fromhex((RECORDED / f"prepare-1.0-{name}.hex").read_text())


@contextlib.asynccontextmanager
async def speaking(world, name, minors, **changes):
    """A node that speaks ``minors``, as one of another release would, and a client of it."""
    config = dataclasses.replace(world.config(name), **changes)
    async with (
        running(config, Fitting(speaks=minors)) as node,
        NodeClient(world.credentials("client"), name, node.address) as client,
    ):
        yield node, client


def respeak(node, minors) -> None:
    """Let a running node speak ``minors`` from now on."""
    node.moves._source = dataclasses.replace(node.moves.source, speaks=minors)
    object.__setattr__(node.transfers._target, "speaks", minors)


@pytest.fixture
def answers(monkeypatch):
    """Every answer to a Prepare that a source of this process was given."""
    found = []
    require_answer = versions.require_answer

    def noted(source, node, reply, before):
        found.append(reply)
        return require_answer(source, node, reply, before)

    monkeypatch.setattr(versions, "require_answer", noted)
    return found


# What is chosen.


@pytest.mark.parametrize("ours", RANGES, ids=str)
@pytest.mark.parametrize("theirs", RANGES, ids=str)
def test_of_every_two_ranges_the_highest_common_minor_is_chosen_or_both_are_named(ours, theirs):
    common = [minor for minor in range(5) if minor in ours and minor in theirs]
    target, source = Speaker("a", ours, "7.1"), Speaker("b", theirs)
    if common:
        assert choose(target, source) == max(common)
        return
    with pytest.raises(ProtocolVersionError) as refused:
        choose(target, source)
    assert f"{ours} (node a, kvpack 7.1)" in str(refused.value)
    assert f"{theirs} (node b)" in str(refused.value)


def test_this_build_speaks_its_own_version_and_that_of_the_release_before():
    assert OURS.highest == 0 or OURS.lowest < OURS.highest
    assert str(OURS) == "1.0 to 1.2" and 0 in OURS and 3 not in OURS


@pytest.mark.parametrize(("low", "high"), [(1, 0), (-1, 0), (0, 1000), (5000, 6000)])
def test_what_is_no_range_is_refused(low, high):
    with pytest.raises(LimitError, match="protocol"):
        Minors(low, high)


def test_a_prepare_with_a_range_that_is_none_or_an_unprintable_version_is_refused():
    request = pb.PrepareRequest.FromString(recorded("move"))
    request.protocol.lowest_minor = 2
    with pytest.raises(LimitError, match=r"protocol\.lowest_minor"):
        read_offer(request, "source")
    request.ClearField("protocol")
    request.node_version = "1\n2"
    with pytest.raises(LimitError, match="node_version"):
        read_offer(request, "source")


# What may not change.


def fields_of(*files) -> dict[str, str]:
    """``Message.field`` and enum value -> number and type, as in the recorded list."""
    kinds = {1: "double", 4: "uint64", 8: "bool", 9: "string", 12: "bytes", 13: "uint32"}
    found = {}
    for file in files:
        for message in file.message_types_by_name.values():
            for field in message.fields:
                nested = field.message_type or field.enum_type
                kind = nested.full_name if nested else kinds[field.type]
                many = "repeated " if field.is_repeated else ""
                found[f"{message.name}.{field.name}"] = f"{field.number} {many}{kind}"
        for enum in file.enum_types_by_name.values():
            found |= {value.name: str(value.number) for value in enum.values}
    return found


def first_fields() -> dict[str, str]:
    lines = (RECORDED / "messages-1.0.txt").read_text().splitlines()
    return dict(line.split(" = ") for line in lines)


def test_every_field_of_the_first_version_is_there_as_it_was_and_new_ones_come_after():
    now, first = fields_of(pb.DESCRIPTOR, ownership_pb2.DESCRIPTOR), first_fields()
    assert len(first) > 60
    assert {name: now.get(name) for name in first} == first
    highest: dict[str, int] = {}
    for name, what in first.items():
        message = name.partition(".")[0]
        highest[message] = max(highest.get(message, 0), int(what.split()[0]))
    for name in now.keys() - first.keys():
        # Who does not know a field writes it behind all others: so the digest of a Prepare, and
        # the nonce made of it, are the same before and after an upgrade.
        message = name.partition(".")[0]
        assert int(now[name].split()[0]) > highest.get(message, 0), name


def first_prepare():
    """The Prepare of a program that knows version 1.0 alone."""
    pool, first = descriptor_pool.DescriptorPool(), first_fields()
    for file in (ownership_pb2.DESCRIPTOR, pb.DESCRIPTOR):
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        kept = [name for name in proto.dependency if "protocol" not in name]
        del proto.dependency[:], proto.service[:]
        proto.dependency.extend(kept)
        for message in proto.message_type:
            fields = [one for one in message.field if f"{message.name}.{one.name}" in first]
            del message.field[:]
            message.field.extend(fields)
        pool.Add(proto)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("node.v1.PrepareRequest"))


def test_an_older_target_reads_and_keeps_a_newer_prepare_byte_for_byte():
    request = pb.PrepareRequest.FromString(recorded("copy"))
    versions.state(request, Speaker("source", OURS, kvpack.__version__))
    encoded = request.SerializeToString(deterministic=True)
    older = first_prepare().FromString(encoded)
    assert older.session_id == "old" and not hasattr(older, "protocol")
    assert older.SerializeToString(deterministic=True) == encoded


@pytest.mark.parametrize("name", ["move", "copy"])
def test_a_recorded_prepare_of_an_older_source_counts_as_the_first_version(name):
    raw = recorded(name)
    request = pb.PrepareRequest.FromString(raw)
    assert not request.HasField("protocol")
    offer = read_offer(request, "source")
    assert offer.speaker.minors == UNSAID == Minors(0, 0)
    assert offer.request == raw


def test_a_source_that_speaks_the_first_version_alone_sends_what_it_always_sent():
    request = pb.PrepareRequest.FromString(recorded("move"))
    versions.state(request, Speaker("source", UNSAID, kvpack.__version__))
    assert request.SerializeToString(deterministic=True) == recorded("move")


# Between nodes.


def test_an_older_sources_own_bytes_are_answered_as_they_always_were(world, tmp_path):
    # The model that it was recorded with, not the narrower one of the other tests.
    model = tmp_path / "tiny"
    make_tiny_model(model, "muse_glimmer", seed=3, window=WINDOW, layers=LAYERS)

    async def work():
        async with world.node("target", model) as (target, _):
            stub, channel = world.migration_stub("source", "target", target.address)
            async with channel:
                call = channel.unary_unary(f"/{wire.SERVICE}/Prepare")
                answer = await call(recorded("copy"), timeout=SECONDS)
                # Exact where the numerics are those of the machine that recorded it.
                assert answer in (bytes.fromhex("1001"), bytes.fromhex("1002"))
                await stub.abort(pb.AbortRequest(transfer=wire.transfer_ref(1, 1)), timeout=SECONDS)
                respeak(target, Minors(1, 1))
                # The same from a source that is too old, by a number that was not used.
                later = pb.PrepareRequest.FromString(recorded("copy"))
                later.transfer.number = 2
                word, code = await refusal(call(later.SerializeToString(), timeout=SECONDS))
                assert word == "protocol_version"
                assert code is grpc.StatusCode.FAILED_PRECONDITION
                key = TransferKey(1, "source", 2)
                assert await target.transfers._target.journal.find(key) is None

    run(work())


def test_nodes_of_every_two_ranges_move_a_session_or_refuse_before_anything_is_reserved(
    world, answers
):
    ranges = [Minors(0, 0), Minors(0, 1), Minors(1, 1), Minors(1, 2)]
    tokens = prompt(40)

    async def work():
        async with world.pair() as (source, giving, target, _):
            sealed = []
            seal = target.transfers.seal

            async def noted(key, inventory):
                sealed.append(inventory.minor)
                return await seal(key, inventory)

            target.transfers.seal = noted
            session = await giving.append(await giving.open("s"), tokens)
            for ours, theirs in itertools.product(ranges, ranges):
                answers.clear(), sealed.clear()
                respeak(source, ours)
                respeak(target, theirs)
                before = len(target.transfers._inbound)
                if max(ours.lowest, theirs.lowest) > min(ours.highest, theirs.highest):
                    with pytest.raises(PeerAnswerError) as refused:
                        await move(giving, target, session, copy_as="x")
                    assert str(ours) in str(refused.value) and str(theirs) in str(refused.value)
                    assert len(target.transfers._inbound) == before and answers == []
                    continue
                chosen = min(ours.highest, theirs.highest)
                name = f"c-{ours.lowest}{ours.highest}{theirs.lowest}{theirs.highest}"
                result = await move(giving, target, session, copy_as=name)
                assert result.continuation_verdict == "exact"
                assert [one.protocol_minor for one in answers] == [chosen] == sealed
                # What exists from 1.1 on is sent from 1.1 on.
                assert bool(answers[0].node_version) is (chosen >= 1)

    run(work())


def _versions(world, node) -> dict[str, str]:
    """What the command says of a node."""
    arguments = ["session", "versions", "--node", f"{node.name}@{node.address}", "--json"]
    credentials = str(world.credentials("client"))
    ran = CliRunner().invoke(main, [*arguments, "--credentials", credentials])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.output)


def test_a_node_that_is_one_minor_behind_takes_a_session_and_gives_it_back(world, answers):
    async def work():
        async with (
            speaking(world, "source", OURS) as (source, giving),
            speaking(world, "target", Minors(0, OURS.highest - 1)) as (target, taking),
        ):
            told = await taking.describe()
            assert (told.protocol.lowest_minor, told.protocol.highest_minor) == (0, 1)
            assert (await giving.describe()).protocol.highest_minor == OURS.highest
            assert told.version == kvpack.__version__
            said = await asyncio.to_thread(_versions, world, target)
            assert (said["protocol_lowest"], said["protocol_highest"]) == ("1.0", "1.1")
            await move(giving, target, await giving.open("s"), prompt(300))
            await move(taking, source, await taking.get("s"))
            assert [one.protocol_minor for one in answers] == [1, 1]
            twin = await giving.append(await giving.open("twin"), prompt(300))
            expected = await events(giving, twin, 300, 8)
            found = await events(giving, await giving.get("s"), 300, 8)
            # The two hand-overs chose the first two tokens: those come again without logits.
            assert [one[:2] for one in found] == [one[:2] for one in expected]
            assert found[2:] == expected[2:]

    run(work())


def test_copies_go_to_targets_of_different_minors_and_one_that_is_too_new_ends_alone(
    world, answers
):
    tokens = prompt(300)

    async def work():
        async with three(world) as (source, giving, targets, clients):
            respeak(targets[1], UNSAID)
            await giving.open("s")
            outcomes = await fan_out(source, "s", tokens, orders(*targets))
            assert all(isinstance(one, Moved) for one in outcomes)
            assert sorted(one.protocol_minor for one in answers) == [0, OURS.highest]
            copies, expected = await continued(giving, {"c1": clients[0], "c2": clients[1]}, tokens)
            assert all(copy == expected for copy in copies)
            await giving.open("again")
            respeak(targets[1], Minors(3, 4))
            order = orders(*targets)
            named = [dataclasses.replace(one, copy_as=f"{one.copy_as}-b") for one in order.orders]
            again = await fan_out(source, "again", tokens, type(order)(tuple(named)))
            assert isinstance(again[0], Moved) and isinstance(again[1], NotMoved)
            assert again[1].error.__cause__.peer_reason == "protocol_version"

    run(work())


# Over a restart.


class NewerSource(HandSource):
    """A source driven by hand that says what it speaks."""

    def prepare_request(self, **changes):
        request = super().prepare_request(**changes)
        versions.state(request, Speaker("source", OURS, kvpack.__version__))
        return request


@pytest.mark.parametrize(
    ("before", "after"), [(UNSAID, OURS), (OURS, UNSAID)], ids=["upgrade", "back"]
)
def test_a_transfer_goes_on_by_its_version_over_a_restart_or_is_refused_by_name(
    world, before, after
):
    async def work():
        async with world.node("source") as (source, giving):
            async with (
                speaking(world, "target", before) as (target, _),
                NewerSource(world, source, target) as hand,
            ):
                await hand.take_cut("s", prompt(400))
                digest = await hand.boundary_digest()
                chosen = (await hand.prepare()).protocol_minor
                assert chosen == before.highest
                half = len(hand.chunks) // 2
                await hand.push([chunk.object for chunk in hand.chunks[:half]])
            async with (
                speaking(world, "target", after, address=target.address) as (target, taking),
                NewerSource(world, source, target) as again,
            ):
                again.session, again.cut, again.chunks = hand.session, hand.cut, hand.chunks
                if chosen not in after:
                    assert (await refusal(again.prepare()))[0] == "protocol_version"
                    assert (await again.status()).state == pb.TRANSFER_STATE_ABORTED
                    assert world.spool("target") == []
                    # By a new number it begins anew, by what both speak now.
                    again.ref = wire.transfer_ref(1, 2)
                    assert (await again.prepare()).protocol_minor == after.highest
                    return
                reply = await again.prepare()
                assert (reply.received_objects, reply.protocol_minor) == (half, chosen)
                await again.push([chunk.object for chunk in again.chunks[half:]])
                await again.seal(digest)
                await again.commit()
                twin = await giving.append(await giving.open("twin"), prompt(400))
                expected = await events(giving, twin, 400, 8)
                assert await events(taking, await taking.get("s"), 400, 8) == expected

    run(work())


def test_a_seal_by_another_version_than_the_transfers_is_refused(world):
    async def work():
        async with (
            world.pair() as (source, _, target, _),
            NewerSource(world, source, target) as hand,
        ):
            await hand.take_cut("s", prompt(40))
            digest = await hand.boundary_digest()
            assert (await hand.prepare()).protocol_minor == OURS.highest
            await hand.push()
            assert (await refusal(hand.seal(digest)))[0] == "protocol_version"
            assert (await hand.status()).state == pb.TRANSFER_STATE_ABORTED

    run(work())


def test_a_target_that_answers_by_another_version_than_before_ends_the_move(world, monkeypatch):
    minors = iter([OURS.highest] + [0] * 20)
    monkeypatch.setattr(
        migration_service, "answer", lambda reply, _: versions.answer(reply, next(minors))
    )

    async def work():
        async with world.pair() as (_, giving, target, _):
            session = await giving.append(await giving.open("s"), prompt(700))
            async with Link(target.address, [60_000]).open() as address:
                with pytest.raises(PeerAnswerError, match=r"expected 1\.2, by which") as ended:
                    await move(giving, at(target, address), session)
            assert "the session stays on this node" in str(ended.value)
            assert (await giving.get("s")).token == session.token
            assert len(await events(giving, session, 700, 4)) == 4

    run(work())


def test_a_target_from_before_versions_is_left_alone_by_a_source_that_dropped_the_first(
    world, monkeypatch
):
    # It knows no range, so it takes the offer, and its answer names no version.
    monkeypatch.setattr(migration_service, "answer", lambda reply, minor: None)

    async def work():
        async with world.pair() as (source, giving, target, _):
            respeak(source, Minors(1, 2))
            session = await giving.append(await giving.open("s"), prompt(40))
            with pytest.raises(PeerAnswerError, match=r"1\.1 to 1\.2.*found 1\.0 \(node target\)"):
                await move(giving, target, session)
            assert target.transfers.under_way() == [] and world.spool("target") == []
            assert (await giving.get("s")).token == session.token

    run(work())


FIRST_SEEN = """CREATE TABLE seen (
    epoch INTEGER NOT NULL, source TEXT NOT NULL, number INTEGER NOT NULL,
    digest BLOB NOT NULL, session_id TEXT NOT NULL, state TEXT NOT NULL, request BLOB NOT NULL,
    PRIMARY KEY (epoch, source, number)) STRICT, WITHOUT ROWID"""
FIRST_INSERT = """INSERT INTO seen (epoch, source, number, digest, session_id, state, request)
    VALUES (1, 'source', ?, ?, 's', 'open', x'01')"""


def test_a_journal_of_the_first_version_is_read_and_the_first_version_reads_it_again(tmp_path):
    path = tmp_path / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as older, older:
        older.execute("PRAGMA application_id=0x6B766A32")
        older.execute(FIRST_SEEN)
        older.execute(FIRST_INSERT, (1, b"a" * 32))

    async def work():
        for _ in range(2):
            journal = Journal(path)
            found = await journal.find(TransferKey(1, "source", 1))
            assert found is not None and (found.minor, found.request) == (0, b"\x01")
            await journal.close()
        journal = Journal(path)
        await journal.reserve(TransferKey(1, "source", 2), b"b" * 32, "s", b"", 1)
        await journal.close()
        with contextlib.closing(sqlite3.connect(path)) as older, older:
            older.execute(FIRST_INSERT, (3, b"c" * 32))
        journal = Journal(path)
        assert sorted(one.minor for one in await journal.open_entries()) == [0, 0, 1]
        await journal.close()

    run(work())
