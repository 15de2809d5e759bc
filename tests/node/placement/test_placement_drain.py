"""Sessions find their place on real nodes: auto, drain, rebalance, and what stays is named."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from pathlib import Path

import pytest
from node_support import LAYERS, World, events, prompt, run

from node.client import NodeClient
from node.config import Address, child_environment
from node.errors import PeerAnswerError, SessionStateError
from node.placement.auto import auto_target
from node.placement.describing import row_bytes
from node.placement.drain import Drain, DrainOrder, drain_node
from node.placement.moving import fleet_of
from node.placement.notice import notice_name
from node.placement.publishing import read_node
from node.placement.rebalance import RebalanceOrder, rebalance
from node.server import running
from tests.small_model import make_small_model

ROOT = Path(__file__).resolve().parents[3]


@contextlib.asynccontextmanager
async def placed(world, name, kv_bytes=1 << 30, **changes):
    """A node that gives so much memory, and a client of it."""
    config = dataclasses.replace(world.config(name), kv_bytes=kv_bytes, lease_s=1.5, **changes)
    async with (
        running(config) as node,
        NodeClient(world.credentials("client"), name, node.address) as client,
    ):
        directory = node.sessions.directory
        while await read_node(directory, name) is None:
            await asyncio.sleep(0.01)
        yield node, client


async def fill(client, names, tokens=40):
    for seed, name in enumerate(names):
        await client.append(await client.open(name), prompt(tokens, seed))


async def told(client, name, index, count):
    """Indices and tokens of a generation."""
    found = await events(client, await client.get(name), index, count)
    return [one[:2] for one in found]


def order_of(world, node, **more):
    return DrainOrder(node.name, node.address, world.credentials("client"), **more)


def quiet(progress):
    assert progress.moved_bytes <= progress.total_bytes


async def kvnode(world, *arguments):
    """The real command: exit code, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "node", *arguments,
        "--credentials", str(world.credentials("client")),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=child_environment(ROOT),
    )  # fmt: skip
    said, errors = await process.communicate()
    return process.returncode, said.decode(), errors.decode()


def test_three_nodes_auto_drain_and_rebalance(tmp_path, model_dir):
    world = World.make(tmp_path, model_dir)

    async def live():
        async with (
            placed(world, "source") as (source, giving),
            placed(world, "target", 1 << 29) as (target, taking),
            placed(world, "third", 1 << 28) as (third, _),
        ):
            fleet = {one.name: one for one in await fleet_of(giving)}
            assert set(fleet) == {"source", "target", "third"}
            assert fleet["target"].free_bytes == 1 << 29
            assert fleet["target"].address == str(target.address)
            assert len({one.kind for one in fleet.values()}) == 1
            await fill(giving, [f"s{i}" for i in range(6)])
            expected = await told(giving, "s0", 40, 3)

            # auto: the one with the most free memory, by the real command.
            where = f"source@{source.address}"
            code, said, errors = await kvnode(
                world, "migrate", "s0", "--to", "auto", "--node", where, "--json"
            )
            assert code == 0, errors
            assert json.loads(said)["target_node"] == "target"
            assert await told(taking, "s0", 40, 3) == expected

            # drain: everything else goes, exactly, and nothing is opened there any more.
            code, said, errors = await kvnode(world, "drain", where, "--json")
            assert code == 0, errors
            drained = json.loads(said)
            assert drained["empty"] is True
            assert drained["stayed"] == []
            names = sorted(one["session_id"] for one in drained["moved"])
            assert names == [f"s{i}" for i in range(1, 6)]
            assert {one["continuation_verdict"] for one in drained["moved"]} == {"exact"}
            assert not source.sessions.all()
            with pytest.raises(PeerAnswerError) as caught:
                await giving.open("new")
            assert caught.value.peer_reason == "draining"
            state = await read_node(source.sessions.directory, "source")
            assert state.leaving
            # Again: nothing is left to do.
            again = await drain_node(order_of(world, source), quiet)
            assert again.is_empty
            assert not again.moved
            # No session goes to a node that is being drained: all of the target fits on the third.
            done = await drain_node(order_of(world, target), quiet)
            assert {one.target_node for one in done.moved} == {"third"}
            assert len(done.moved) == 6
            assert len(third.sessions.all()) == 6

    run(live(), 60)


def test_what_no_node_can_take_stays_and_is_named(tmp_path, model_dir):
    world = World.make(tmp_path, model_dir)

    async def live():
        async with placed(world, "source") as (source, giving):
            await fill(giving, ["big", "small"], 40)
            await giving.append(await giving.get("big"), prompt(160, 9))
            await giving.open("empty")
            alone = await drain_node(order_of(world, source), quiet)
            assert not alone.is_empty
            assert set(alone.stayed) == {"big", "small", "empty"}
            assert "no other node is known" in alone.stayed["big"]
            assert "too short" in alone.stayed["empty"]
            with pytest.raises(SessionStateError, match=r"session small .*no other node"):
                await auto_target(giving, await giving.get("small"), accept_compatible=False)
            small = (await fleet_of(giving))[0]
            taken = small.capacity_bytes - small.free_bytes
            # There is room for one of the two.
            async with placed(world, "target", taken // 3) as (target, _):
                code, said, _ = await kvnode(world, "drain", f"source@{source.address}")
                assert code == 1
                assert "big stays: session big" in said
                assert "1 x has too little free KV memory, at most" in said
                assert "1 sessions moved" in said
                assert [one.session_id for one in target.sessions.all()] == ["small"]
            # It serves where it is, and after --undo others may be opened again.
            assert len(await events(giving, await giving.get("big"), 200, 2)) == 2
            code, _, errors = await kvnode(world, "drain", f"source@{source.address}", "--undo")
            assert code == 0, errors
            await giving.open("later")

    run(live(), 60)


def test_a_drain_that_was_killed_goes_on_and_waits_for_moves_under_way(tmp_path, model_dir):
    world = World.make(tmp_path, model_dir)

    async def live():
        async with (
            placed(world, "source") as (source, giving),
            placed(world, "target") as (target, taking),
        ):
            await fill(giving, [f"s{i}" for i in range(5)], 60)
            begun = asyncio.Event()

            def show(progress):
                if progress.sent:
                    begun.set()

            first = asyncio.create_task(drain_node(order_of(world, source, parallel=1), show))
            await asyncio.wait_for(begun.wait(), 20)
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first
            done = await drain_node(order_of(world, source), quiet)
            assert done.is_empty, done.stayed
            assert len(target.sessions.all()) == 5
            for i in range(5):
                assert (await taking.get(f"s{i}")).next_index == 61

    run(live(), 60)


def test_a_target_that_dies_is_left_out_and_another_one_is_found(tmp_path, model_dir):
    world = World.make(tmp_path, model_dir)

    async def live():
        async with (
            placed(world, "source") as (source, giving),
            placed(world, "third", 1 << 20) as _,
        ):
            await fill(giving, ["s0", "s1"])
            async with placed(world, "target"):
                dead = await read_node(source.sessions.directory, "target")
            # A node that stopped takes its notice with it.
            assert await read_node(source.sessions.directory, "target") is None

            class Haunted(Drain):
                """One who still believes in it."""

                def _usable(self, nodes):
                    lively = dataclasses.replace(dead, lease_left_s=9.0)
                    self._nodes["target"] = lively
                    return super()._usable((*nodes, lively))

            done = await Haunted(giving, order_of(world, source), quiet).run()
            assert done.is_empty, done.stayed
            assert {one.target_node for one in done.moved} == {"third"}

    run(live(), 60)


def test_nodes_that_compute_otherwise_need_consent(tmp_path, model_dir):
    world = World.make(tmp_path, model_dir)
    other = tmp_path / "other"
    make_small_model(other, "muse_glimmer", seed=4, window=16, layers=LAYERS)

    async def live():
        async with (
            placed(world, "source") as (source, giving),
            placed(world, "target", model_dir=other) as (target, _),
        ):
            await fill(giving, ["s0"])
            kinds = {one.name: one.kind for one in await fleet_of(giving)}
            assert kinds["source"].identity != kinds["target"].identity
            assert kinds["source"].numerics == kinds["target"].numerics
            done = await drain_node(order_of(world, source, accept_compatible=True), quiet)
            assert "another model, tokenizer or tenant" in done.stayed["s0"]
            assert not target.sessions.all()

    run(live(), 60)


def test_a_rebalance_levels_and_then_finds_nothing(tmp_path, model_dir):
    world = World.make(tmp_path, model_dir)

    async def live():
        # Six sessions fill it to 60 parts of 100, so the spread is far above 5.
        gives = row_bytes(await layout_of(world), 100) * 10
        async with placed(world, "source", gives) as (source, giving):
            await fill(giving, [f"t{i}" for i in range(6)], 100)
            async with placed(world, "target", gives) as (target, _):
                where = Address("127.0.0.1", source.address.port)
                order = RebalanceOrder("source", where, world.credentials("client"))
                dry = await rebalance(dataclasses.replace(order, dry_run=True), quiet_step)
                assert [step.target for step in dry.plan.steps] == ["target"] * 3
                assert not dry.moved
                assert not target.sessions.all()
                done = await rebalance(order, quiet_step)
                assert done.plan == dry.plan
                assert len(done.moved) == 3
                assert not done.failed
                assert len(target.sessions.all()) == 3
                # Either notice may still be that of a move before the last.
                for name in ("source", "target"):
                    await noticed(source, name, 3)
                where = f"source@{source.address}"
                code, said, errors = await kvnode(world, "rebalance", "--node", where)
                assert (code, errors) == (0, "")
                assert "nothing to move" in said

    run(live(), 60)


async def noticed(node, name, sessions):
    """Once a node has told that it holds so many sessions."""
    for _ in range(500):
        if (await read_node(node.sessions.directory, name)).sessions == sessions:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"node {name}: does not say that it holds {sessions} sessions")


async def settled(node, name, gives):
    """Once a node has told that it has less free memory than ``gives``."""
    for _ in range(200):
        state = await read_node(node.sessions.directory, name)
        if state.free_bytes < gives:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"node {name}: still says that all is free")


async def layout_of(world):
    async with placed(world, "third") as (node, _):
        return node.sessions.engine.model.layout


def quiet_step(step):
    assert step.source == "source"


def test_a_notice_is_written_when_it_is_news_and_only_by_its_node(tmp_path, model_dir):
    world = World.make(tmp_path, model_dir)

    async def live():
        async with placed(world, "source", 1 << 16) as (source, giving):
            directory = source.sessions.directory
            before = (await directory.state()).revision
            await asyncio.sleep(1.2)
            # Two and a half renewals, and nothing was new.
            assert (await directory.state()).revision == before
            await fill(giving, ["s0"], 100)
            await settled(source, "source", 1 << 16)
            entry = await directory.owner(notice_name("source"))
            assert entry.node == "source"
            listed = [one.session_id for one in await giving.list_sessions()]
            assert listed == ["s0"]
        async with placed(world, "source") as (again, _):
            assert not again.sessions.all()

    run(live(), 60)
