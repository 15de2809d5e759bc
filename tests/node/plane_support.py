"""Nodes with plain data planes, and what stands between them on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from node_support import events, move, prompt

from node.client import NodeClient
from node.config import Address
from node.dataplane.options import Plane, PlaneAddress, PlaneOptions, plane_message
from node.server import Fitting, running

#: A whole block of 256 and more, in one call.
TOKENS = prompt(400)


def offering(*planes, senders=("source",)) -> PlaneOptions:
    """A target that takes streams over ``planes``, on loopback."""
    here = Address("127.0.0.1", 0)
    return PlaneOptions(tuple(PlaneAddress(plane, here) for plane in planes), frozenset(senders))


@contextlib.asynccontextmanager
async def two(world, options, fitting=None):
    """Source and target, each with its client; the target is told ``options``."""
    config = dataclasses.replace(world.config("target"), planes=options)
    async with (
        world.node("source") as (source, giving),
        running(config, fitting or Fitting()) as target,
        NodeClient(world.credentials("client"), "target", target.address) as taking,
    ):
        yield source, giving, target, taking


def intake_of(target):
    """The target's half of its plain planes."""
    return target.planes.intake


def redirect(target, plane, address) -> None:
    """Let the target name another address for a plane: that of what stands in between."""
    intake_of(target).addresses[plane] = address


class Wire:
    """A TCP link to a plane that does to each connection what a test says.

    Args:
        there: The plane.
        change: Given the number of the connection and the bytes from the source, at their offset,
            gives what goes on; None breaks the link.
        answer: The same for the bytes from the target.
    """

    def __init__(self, there: Address, change=None, answer=None) -> None:
        self._there = there
        self._change = change or (lambda number, offset, data: data)
        self._answer = answer or (lambda number, offset, data: data)
        self.connections = 0
        self.seen: list[bytearray] = []

    @contextlib.asynccontextmanager
    async def open(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield Address("127.0.0.1", server.sockets[0].getsockname()[1])

    async def _serve(self, reader, writer):
        number, self.connections = self.connections, self.connections + 1
        seen = bytearray()
        self.seen.append(seen)
        there, back = await asyncio.open_connection(self._there.host, self._there.port)
        ways = [
            asyncio.create_task(_carry(reader, back, number, seen, self._change)),
            asyncio.create_task(_carry(there, writer, number, bytearray(), self._answer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        writer.transport.abort()
        back.transport.abort()


async def _carry(reader, writer, number, seen, change):
    while data := await reader.read(1 << 14):
        offset = len(seen)
        seen += data
        changed = change(number, offset, bytearray(data))
        if changed is None:
            return
        writer.write(changed)
        await writer.drain()
    # The end of one way says nothing of the other; but somebody who closed takes no answer.
    await asyncio.sleep(0.5)


__all__ = ["Plane", "Wire", "intake_of", "offering", "redirect", "two"]


async def moved_equal(giving, target, taking, plane, tokens=TOKENS, *, live=False):
    """Move a session over ``plane``; gives the result once the target goes on like a twin."""
    session = await giving.open("s")
    if live:
        session = await giving.append(session, tokens)
    result = await move(
        giving, target, session, () if live else tokens, data_plane=plane_message(plane)
    )
    twin = await giving.append(await giving.open("twin"), tokens)
    expected = await events(giving, twin, len(tokens), 6)
    assert await events(taking, await taking.get("s"), len(tokens), 6) == expected
    return result


async def copies_equal(giving, target, taking, plane, disturbances):
    """Copy one session once for each disturbance; every copy goes on like the session."""
    session = await giving.append(await giving.open("s"), TOKENS)
    there = intake_of(target).addresses[plane]
    results = []
    for number, (change, answer) in enumerate(disturbances):
        wire = Wire(there, change, answer)
        async with wire.open() as address:
            redirect(target, plane, address)
            wish = {"data_plane": plane_message(plane), "copy_as": f"c{number}"}
            results.append(await move(giving, target, session, **wish))
            session = await giving.get("s")
    twin, count = await giving.append(await giving.open("twin"), TOKENS), len(results) + 4
    expected = await events(giving, twin, len(TOKENS), count)
    for number in range(len(results)):
        found = await events(taking, await taking.get(f"c{number}"), len(TOKENS), count)
        assert [one[:2] for one in found] == [one[:2] for one in expected]
        # What the source chose before each copy was cut comes without logits.
        fresh = number + 1
        assert found[fresh:] == expected[fresh:] and all(one[2] for one in found[fresh:])
    return results


def first(change):
    """``change`` for the first connection alone."""
    return lambda number, offset, data: change(offset, data) if number == 0 else data


def put_in(place, extra):
    """Put bytes into the first connection."""

    def change(offset, data):
        if offset <= place < offset + len(data):
            data[place - offset : place - offset] = extra
        return data

    return first(change)
