"""Rows that another build computed never become this build's, wherever their session goes on to."""

from __future__ import annotations

import dataclasses
import functools
import io

import pytest
from builds_support import Builds, crossed, numerics_as, only_compatible, talked
from node_support import events, move, prompt, run
from parked_support import order
from remote_support import enroll_consumer, remote_of

from kvpack.bundle import BundleReader
from kvpack.errors import LayoutMismatchError
from kvpack.identity import CallSchedule
from kvpack.keys import Keyring
from kvpack.layout import Producer
from kvpack.manifest import Manifest
from kvpack.store import CutReader, find_deepest, list_cuts
from node import packs
from node.errors import ConsentError, PeerAnswerError
from node.migration.moves import NotMoved, Targets
from node.migration.orders import Moved, Order
from node.save import cut_now, write_cut
from node.serving.ladder.lookup import find
from node.unpack import unpack


@pytest.fixture
def builds(tmp_path, model_dir):
    """Three nodes, each started as a build of the test's choice."""
    world = Builds.make(tmp_path, model_dir)
    (tmp_path / "stores").mkdir()
    return world


def bundle_numerics(path, binding):
    with BundleReader.open(path, Keyring([binding.key])) as reader:
        return reader.manifest.numerics


def test_a_session_that_came_from_another_build_is_no_builds_own_where_it_goes_next(builds):
    async def work():
        async with crossed(builds) as (source, _, target, taking):
            # Home again: what was computed there is not all of it any more.
            await only_compatible(taking, source, copy_as="home")
            async with builds.built("third", "b") as (third, its_client):
                # A third build's node counts as well as one of the last build.
                await only_compatible(taking, third, copy_as="c")
                await only_compatible(taking, third)
                # And so from there on, whoever of them asks.
                await only_compatible(its_client, target, copy_as="again")
                await only_compatible(its_client, source)

    run(work())


def test_a_session_of_one_build_stays_exact_from_node_to_node(builds):
    async def work():
        async with (
            builds.built("source", "a") as (_, giving),
            builds.built("target", "a") as (target, taking),
            builds.built("third", "a") as (third, _),
        ):
            result = await move(giving, target, await talked(giving))
            assert result.continuation_verdict == "exact"
            result = await move(taking, third, await taking.get("s"))
            assert result.continuation_verdict == "exact"

    run(work())


@pytest.mark.parametrize("restarts_as", ["b", "a"])
def test_a_restart_does_not_forget_what_other_builds_computed(builds, restarts_as):
    async def work():
        async with crossed(builds) as (_, _, target, taking):
            async with builds.built("third", "b") as (third, _):
                # Mixed in its very pack, not only of the other build.
                await only_compatible(taking, third, copy_as="t")
            assert (await target.sessions.find("s")).generation.is_mixed
        async with (
            builds.built("third", restarts_as) as (third, its_client),
            builds.built("target", "b") as (target, taking),
        ):
            session = await its_client.get("t")
            assert (await third.sessions.find("t")).generation.is_mixed
            await events(its_client, session, session.next_index, 2)
            await only_compatible(its_client, target, "t")
            await only_compatible(taking, third)

    run(work())


def test_an_upgraded_node_does_not_call_rows_of_its_older_build_its_own(builds):
    async def work():
        async with (
            builds.built("source", "a") as (_, giving),
            builds.built("target", "a") as (target, _),
        ):
            result = await move(giving, target, await talked(giving))
            assert result.continuation_verdict == "exact"
        async with (
            builds.built("target", "b") as (_, taking),
            builds.built("third", "b") as (third, _),
        ):
            await only_compatible(taking, third)
        async with builds.built("third", "a") as (third, _):
            assert (await third.sessions.find("s")).generation.is_mixed

    run(work())


def test_a_restart_without_another_build_changes_nothing(builds):
    async def work():
        async with (
            builds.built("source", "a") as (_, giving),
            builds.built("target", "a") as (target, _),
        ):
            await move(giving, target, await talked(giving))
        async with (
            builds.built("target", "a") as (_, taking),
            builds.built("third", "a") as (third, _),
        ):
            result = await move(taking, third, await taking.get("s"))
            assert result.continuation_verdict == "exact"

    run(work())


def test_a_saved_pack_says_that_its_rows_are_mixed_and_no_build_takes_it_for_its_own(builds):
    async def work():
        async with crossed(builds) as (source, _, target, taking):
            reply = await taking.save(await taking.get("s"))
            await target.tier.settled()
            for node in (source, target):
                binding, engine = node.moves.binding, node.sessions.engine
                assert bundle_numerics(reply.path, binding) != binding.numerics
                with pytest.raises(ConsentError, match="mixed_rows"):
                    await unpack(
                        engine, target.moves.binding, io.FileIO(reply.path), accept_compatible=False
                    )
                found = await unpack(engine, binding, io.FileIO(reply.path), accept_compatible=True)
                assert not found.exact and found.generation.is_mixed
            # Kept as a cut of this session, and of no text that others begin from.
            session = await target.sessions.find("s")
            store, binding = target.tier.store, target.moves.binding
            keyring = Keyring([binding.key])
            kept = [CutReader(store, keyring, cut.cut_id).cut for cut in list_cuts(store)]
            assert len(kept) == 2
            assert not any(binding.owns(cut.manifest.numerics) for cut in kept)
            ids = (*session.token_ids, 7)
            assert find(store, binding, ids).reader is None
            header = binding.header
            assert find_deepest(store, keyring, binding.key, header, ids).cut is None

    run(work())


def test_a_session_that_is_parked_comes_out_as_mixed_as_it_went_in(builds):
    async def work():
        async with crossed(builds) as (source, giving, _, taking):
            await taking.park(await taking.get("s"), builds.store, copy=False)
            with pytest.raises(PeerAnswerError, match="needs consent"):
                await giving.restore(order(builds))
            restored = await giving.restore(order(builds, accept_compatible=True))
            assert restored.continuation_verdict == "compatible"
            session = await giving.get("s")
            await events(giving, session, session.next_index, 2)
            # There and back once more, by a copy and on the node of the other build.
            await giving.park(await giving.get("s"), builds.store, copy=True)
            for client in (giving, taking):
                with pytest.raises(PeerAnswerError, match="needs consent"):
                    await client.restore(order(builds, restore_as="c"))
            assert (await source.sessions.find("s")).generation.is_mixed

    run(work())


def test_every_target_of_a_fan_out_is_told(builds):
    async def work():
        async with (
            crossed(builds) as (source, _, target, _),
            builds.built("third", "b") as (third, _),
        ):
            session = await target.sessions.find("s")
            for consent, kind in ((False, NotMoved), (True, Moved)):
                targets = Targets(
                    tuple(
                        Order(
                            node.name, node.address, copy_as=f"{node.name}-{consent}".lower(),
                            accept_compatible=consent,
                        )
                        for node in (source, third)
                    )
                )  # fmt: skip
                outcomes = [
                    told.event
                    async for told in target.moves.fan_out("s", session.token, (), targets)
                    if isinstance(told.event, Moved | NotMoved)
                ]
                assert [type(one) for one in outcomes] == [kind, kind]
                for outcome in outcomes:
                    if isinstance(outcome, NotMoved):
                        assert "needs consent" in str(outcome.error)

    run(work())


def test_rows_of_a_remote_prefill_stay_the_producers(builds):
    async def work():
        enroll_consumer(builds)
        async with (
            builds.built("source", "a") as (producer, _),
            builds.built("target", "b") as (consumer, client),
            builds.built("third", "b") as (third, _),
        ):
            remote = remote_of(builds, consumer, producer.address)
            arrival = await remote.prefill(prompt(200))
            assert not arrival.exact and arrival.generation.is_mixed
            session = await consumer.sessions.open("s")
            session.begin_from(arrival.generation, prompt(200))
            await only_compatible(client, third)
            await remote.close()

    run(work())


def test_rows_of_other_programs_are_taken_by_no_door(builds, tmp_path):
    """mlx-lm and transformers: the packs of an import, which are for an engine alone."""

    async def work():
        async with builds.built("source", "a") as (node, client):
            await talked(client)
            session = await node.sessions.find("s")
            engine, binding = node.sessions.engine, node.moves.binding
            for producer in (Producer.MLX_LM, Producer.TRANSFORMERS):
                path = tmp_path / f"{producer.value}.kvpack"
                with pytest.MonkeyPatch.context() as patch:
                    made_by = functools.partial(_manifest_of, producer)
                    patch.setattr(packs, "Manifest", made_by)
                    await write_cut(engine, binding, await cut_now(engine, binding, session), path)
                with pytest.raises(LayoutMismatchError, match="producer"):
                    await unpack(engine, binding, io.FileIO(path), accept_compatible=True)
                installer = await engine.call(engine.model.installer, 0, producer=producer)
                generation = await engine.call(installer.finish, CallSchedule())
                assert generation.is_mixed

    run(work())


def _manifest_of(made_by, **fields):
    return Manifest(**{**fields, "producer": made_by})


def test_a_binding_of_no_build_is_refused(builds):
    async def work():
        async with builds.built("source", "a") as (node, _):
            binding = node.moves.binding
            assert binding.stated(mixed=False) == binding.numerics
            mixed = binding.stated(mixed=True)
            assert mixed.is_mixed and not binding.owns(mixed)
            other = dataclasses.replace(binding, numerics=numerics_as(binding.numerics, "b"))
            assert other.stated(mixed=True) != mixed and not other.owns(mixed)
            with pytest.raises(ValueError, match="mixed"):
                dataclasses.replace(binding, numerics=mixed)

    run(work())
