"""One session to several targets beside mTLS: each chunk is sealed once, whatever carries it."""

from __future__ import annotations

import contextlib
import dataclasses

from node_support import prompt, run
from plane_support import Plane, Wire, first, intake_of, offering, redirect
from test_fan_out import Sealing, continued, fan_out

from node.client import NodeClient
from node.migration.moves import Targets
from node.migration.orders import Moved, Order
from node.server import Fitting, running


@contextlib.asynccontextmanager
async def three(world):
    """A source and two targets, each with its client; both targets take streams beside mTLS."""
    async with contextlib.AsyncExitStack() as stack:
        source, giving = await stack.enter_async_context(world.node("source"))
        targets, clients = [], []
        for name in ("target", "third"):
            planes = offering(Plane.SOCKET, Plane.GRPC_PLAIN)
            config = dataclasses.replace(world.config(name), planes=planes)
            node = await stack.enter_async_context(running(config, Fitting()))
            client = NodeClient(world.credentials("client"), name, node.address)
            targets.append(node)
            clients.append(await stack.enter_async_context(client))
        yield source, giving, targets, clients


def test_targets_on_different_planes_get_the_same_chunks_each_sealed_once(world, monkeypatch):
    tokens, sealing = prompt(600), Sealing(monkeypatch)

    async def work():
        async with three(world) as (source, giving, targets, clients):
            await giving.open("s")
            planes = (Plane.SOCKET, Plane.GRPC_PLAIN)
            orders = [
                Order(node.name, node.address, copy_as=f"c{number}", data_plane=plane)
                for number, (node, plane) in enumerate(zip(targets, planes, strict=True), 1)
            ]
            results = await fan_out(source, "s", tokens, Targets(tuple(orders)))
            assert all(isinstance(one, Moved) for one in results), results
            names = dict(zip(("c1", "c2"), clients, strict=True))
            assert [intake_of(node).streams for node in targets] == [0, 0]
            return results, *await continued(giving, names, tokens)

    results, copies, expected = run(work())
    assert copies == [expected, expected]
    assert [one.data_plane for one in results] == [Plane.SOCKET, Plane.GRPC_PLAIN]
    assert not any(one.plane_fallback or one.timeline.resumed for one in results)
    first_one, second = results
    assert first_one.objects == second.objects
    assert len(sealing.items) == len(set(sealing.items)) == first_one.objects - 1
    assert sealing.tokens == [(600, -1), (599, 0)]


def test_a_plain_stream_of_several_that_breaks_is_resumed_alone(world, monkeypatch):
    tokens, sealing = prompt(800), Sealing(monkeypatch)
    cut = first(lambda offset, data: data if offset + len(data) <= 40_000 else None)

    async def work():
        async with three(world) as (source, giving, targets, clients):
            await giving.open("s")
            wire = Wire(intake_of(targets[1]).addresses[Plane.SOCKET], cut)
            async with wire.open() as address:
                redirect(targets[1], Plane.SOCKET, address)
                orders = [
                    Order(node.name, node.address, copy_as=f"c{number}", data_plane=Plane.SOCKET)
                    for number, node in enumerate(targets, 1)
                ]
                results = await fan_out(source, "s", tokens, Targets(tuple(orders)))
            assert all(isinstance(one, Moved) for one in results), results
            names = dict(zip(("c1", "c2"), clients, strict=True))
            return results, *await continued(giving, names, tokens)

    (whole, broken), copies, expected = run(work())
    assert copies == [expected, expected]
    assert [one.data_plane for one in (whole, broken)] == [Plane.SOCKET, Plane.SOCKET]
    assert whole.timeline.resumed == 0 and broken.timeline.resumed == 1
    # What the broken one had missed was made once more for it, and no more than that.
    assert whole.objects - 1 == len(set(sealing.items)) <= len(sealing.items) < 2 * whole.objects
