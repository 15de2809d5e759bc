"""A session goes into a store and out on the other node; a node dies at a point on its way.

What must hold is what holds of moves: one owner, the bits of a twin, nothing left over. A process
that dies on the way in leaves the session at its source or in the store, never in neither; one that
dies on the way out leaves it in the store or on its new node.
"""

from __future__ import annotations

import asyncio

from kvpack.errors import KvpackError
from node.directory import Ownership
from node.parked import identity_of
from node.pb.v1 import session_pb2 as pb

from .campaign import Campaign
from .lab import Lab, NodeProcess
from .nursery import Nursery
from .outside import Findings, check_bits, check_disks, check_one_owner, find_server, record_of
from .plan import Plan

#: A move that does nothing but bring a session, so that it is durable where it is.
ARRIVES = Plan(0, "live", "", (), (), (), False, 0.3)


class Parking:
    """Two nodes that reach one folder of stores, and a session that comes and goes."""

    def __init__(self, lab: Lab, nursery: Nursery) -> None:
        self.runs = Campaign(lab, nursery)
        self.lab = lab
        root = lab.root / "stores"
        root.mkdir(mode=0o700, exist_ok=True)
        self.place = str(root / "s")
        for node in self.runs.nodes:
            node.more = ("--store-root", str(root))

    async def run(self, order: str) -> tuple[str, Findings]:
        """Carry ``order`` out on the node it is for; where the session then was, and findings."""
        runs, found = self.runs, Findings()
        await runs.new_session(ARRIVES)
        home = runs.home
        other = next(node for node in runs.nodes if node is not home)
        dies = home if order.startswith("park.") else other
        if dies is home:
            home.order(order)
        await self._try(home, self._park)
        await self._again(home)
        stood = await self._owner()
        if identity_of(stood):
            if dies is other:
                other.order(order)
            await self._try(other, self._restore)
            await self._again(other)
            if identity_of(await self._owner()):
                await self._restore(other)
        await self._check(found)
        return stood, found

    async def _try(self, node: NodeProcess, call) -> None:
        """``call`` on ``node``, which may die of it."""
        try:
            await call(node)
        except KvpackError:
            return

    async def _park(self, node: NodeProcess) -> None:
        async with node.client() as client:
            await client.park(await client.get(self.runs.talk.session_id), self.place, copy=False)

    async def _restore(self, node: NodeProcess) -> None:
        request = pb.RestoreRequest(session_id=self.runs.talk.session_id, store=self.place)
        async with node.client() as client:
            await client.restore(request)

    async def _again(self, node: NodeProcess) -> None:
        """Start it again where it has ended; nothing fails any more."""
        await asyncio.sleep(0.05)
        died = node.has_ended()
        node.order("")
        if died:
            assert await node.start()
        assert await self.runs._let_renew() == []

    async def _owner(self) -> str:
        record = await record_of(self.lab, self.runs.talk.session_id)
        assert isinstance(record, Ownership), record
        return record.node

    async def _check(self, found: Findings) -> None:
        runs = self.runs
        server = await find_server(self.lab, runs.nodes, runs.talk)
        if server is None:
            found.lost.append(runs.talk.session_id)
            return
        await check_one_owner(self.lab, runs.nodes, runs.talk, found)
        await check_bits(server, runs.talk, found)
        await check_disks(self.lab, runs.nodes, found)
        runs.home = server
