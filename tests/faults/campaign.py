"""Run after run on two real nodes: one plan, everything healed, everything checked from outside."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

from kvpack.errors import KvpackError
from node.config import Address
from node.directory import Ownership
from node.errors import PeerAnswerError
from node.migration.wire import token_value
from node.pb.v1 import session_pb2 as pb

from .conversation import Conversation, WrongBits
from .healing import Faults, lock_directory
from .lab import NODE_LEASE_S, NODES, Lab, NodeProcess
from .link import Link
from .nursery import Nursery
from .outside import (
    Findings,
    check_bits,
    check_disks,
    check_one_owner,
    check_release,
    find_server,
    record_of,
)
from .plan import Plan
from .result import Result, carried_out
from .twin import Twins

#: A move that has not ended by then hangs.
MOVE_S = 90.0

#: Moves that one session makes before another takes its place.
MOVES_PER_SESSION = 12

ARRIVE_TRIES = 4

#: A lease that is over is taken anew within one more: three, on a machine that is busy.
RENEWED_S = 3 * NODE_LEASE_S

#: What a node says meanwhile.
RENEWING = frozenset({"fenced", "directory_unavailable", "peer_unavailable"})

#: What a source says of a move that did not come about.
KEPT = "stays on this node"


class Campaign:
    """Two nodes, the session that goes to and fro between them, and their client."""

    def __init__(self, lab: Lab, nursery: Nursery) -> None:
        self.lab = lab
        self.nodes = [NodeProcess(lab, name, nursery) for name in NODES]
        self.there: dict[str, Address] = {}  # how nodes reach each other, where not as we do
        self.twins = Twins(lab.model)
        self.talk: Conversation | None = None
        self.home: NodeProcess = self.nodes[0]
        self._moves = 0
        self._said = ""  # how the last move was said to have failed
        self._names = 0
        self._durable = False

    async def run(self, plan: Plan) -> Result:
        """Carry ``plan`` out. What did not hold is in the result."""
        result, start = Result(plan), time.monotonic()
        starts = [node.starts for node in self.nodes]
        if plan.mode == "known" or not self._durable or self._moves >= MOVES_PER_SESSION:
            await self.new_session(plan)
        giving = self.home
        taking = next(node for node in self.nodes if node is not giving)
        faults = Faults(
            {giving.name: list(plan.source), taking.name: list(plan.target)}, plan.pause_s
        )
        ends = (giving, taking)
        since = [len(node.reached()) for node in ends]
        watchers = [asyncio.ensure_future(faults.watch(node)) for node in self.nodes]
        try:
            await self._disturb(plan, result, giving, taking, faults)
            # From here on nothing fails any more.
            faults.done = True
            for node in self.nodes:
                node.order("")
            for name in await self._let_renew():
                result.found.other.append(f"{name} does not serve again after {RENEWED_S} s")
            try:
                await check_release(self.lab, giving, since[0], self.talk, result.found)
                await self._check(plan, result, giving, taking)
            except (KvpackError, TimeoutError) as error:
                result.found.other.append(f"while it was looked at: {error}")
            result.starts = sum(node.starts for node in self.nodes) - sum(starts)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        result.fired |= faults.healed > 0 or any(
            carried_out(order, node.reached()[place:])
            for orders, node, place in zip((plan.source, plan.target), ends, since, strict=True)
            for order in orders
        )
        result.seconds = time.monotonic() - start
        if result.found.all():
            await self._begin_anew()
        return result

    async def _let_renew(self) -> list[str]:
        """Wait until both leases run again: a directory that was away, or a pause, ended them.

        Returns:
            The names of nodes that do not serve again in time.
        """
        late = []
        for node in self.nodes:
            end = time.monotonic() + RENEWED_S
            while await self._is_fenced(node):
                if time.monotonic() > end:
                    late.append(node.name)
                    break
                await asyncio.sleep(0.1)
        return late

    async def _is_fenced(self, node: NodeProcess) -> bool:
        self._names += 1
        try:
            async with node.client() as client:
                await client.close_session(await client.open(f"probe{self._names}"))
        except KvpackError as error:
            return getattr(error, "peer_reason", "") in RENEWING
        return False

    async def new_session(self, plan: Plan) -> None:
        """A session of its own; one that will move live first arrives, and so is durable."""
        # Three seconds without the processor end a lease, too.
        await self._let_renew()
        await self._close(self.talk)
        self._names += 1
        length = 300 + 230 * (plan.seed % 3)
        self.talk = Conversation(f"s{self._names}", self.twins.of(length, plan.seed % 3))
        giving, taking = self.nodes[plan.seed % 2], self.nodes[1 - plan.seed % 2]
        self.home, self._moves, self._durable = giving, 0, False
        async with giving.client() as client:
            await client.open(self.talk.session_id)
        if plan.mode == "known":
            return
        arriving = replace(plan, mode="known")
        address = self.there.get(taking.name, taking.address)
        for _ in range(ARRIVE_TRIES):
            # On a machine that is busy a first prefill may outlast the short lease.
            if await self.try_move(arriving, giving, taking, address) == "done":
                break
        else:
            raise AssertionError(f"{self.talk.session_id} did not arrive, though nothing failed")
        self.home, self._durable = taking, True
        await self.talk.take(taking, 3)

    def _prompt(self) -> list[int]:
        assert self.talk is not None
        return self.talk.twin.token_ids[: self.talk.twin.given]

    async def _close(self, talk: Conversation | None) -> None:
        if talk is None:
            return
        record = await record_of(self.lab, talk.session_id)
        if isinstance(record, Ownership):
            owner = next(node for node in self.nodes if node.name == record.node)
            async with owner.client() as client:
                with contextlib.suppress(PeerAnswerError):
                    await client.close_session(await client.get(talk.session_id))

    async def _disturb(self, plan, result, giving, taking, faults) -> None:
        talk = self.talk
        follower = asyncio.ensure_future(talk.follow([giving, taking]))
        if plan.mode == "known":
            follower.cancel()
        link = Link(taking.address, plan.cuts)
        locking = asyncio.ensure_future(lock_directory(self.lab, plan.lock_s))
        try:
            async with link.open() as address, asyncio.timeout(MOVE_S):
                result.outcome = await self.try_move(plan, giving, taking, address)
                if plan.again and result.outcome != "done":
                    await self._wait_served(giving)
                    result.outcome = await self.try_move(plan, giving, taking, address)
                    # Which of the two the session's standing comes from is not told apart.
                    self._said = ""
        except TimeoutError:
            result.found.other.append("the move did not end")
        finally:
            await locking
            result.fired |= link.broken > 0
            follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                try:
                    await follower
                except WrongBits as error:
                    result.found.wrong_bits.append(str(error))

    async def try_move(self, plan, giving, taking, address) -> str:
        self._said = ""
        copy_as = f"{self.talk.session_id}-copy" if plan.mode == "copy" else ""
        try:
            async with giving.client() as client:
                session = await client.get(self.talk.session_id)
            self.talk.see(token_value(session.token))
            # A move that failed leaves the prompt with the session: it is not given twice.
            tokens = self._prompt()[session.next_index :] if plan.mode == "known" else []
            await self.move(giving, taking, session.token, tokens, copy_as, address)
        except PeerAnswerError as error:
            self._said = str(error)
            return error.peer_reason
        except KvpackError as error:
            return error.reason
        return "done"

    async def move(self, giving, taking, token, tokens, copy_as, address) -> None:
        request = pb.MigrateRequest(
            session_id=self.talk.session_id, token=token, target_node=taking.name,
            target_address=str(address), token_ids=tokens, copy_as=copy_as,
        )  # fmt: skip
        async with giving.client() as client:
            async for _ in client.migrate(request):
                pass

    async def _wait_served(self, node: NodeProcess) -> None:
        """Until ``node`` answers at all: it may be starting."""
        for _ in range(100):
            with contextlib.suppress(KvpackError):
                async with node.client() as client:
                    await client.describe()
                    return
            await asyncio.sleep(0.1)

    async def _check(self, plan, result, giving, taking) -> None:
        found, talk = result.found, self.talk
        for node in self.nodes:
            await self._wait_served(node)
        if plan.mode == "copy":
            await self._check_copy(plan, result, taking)
        if plan.mode == "known" and await self._is_unpublished(giving):
            await self._open_again(giving, found)
        try:
            server = await find_server(self.lab, self.nodes, talk)
        except TimeoutError as error:
            found.lost.append(str(error))
            return
        except WrongBits as error:
            found.wrong_bits.append(str(error))
            return
        if server is None:
            found.lost.append(f"{talk.session_id}: nobody has its state")
            return
        await check_one_owner(self.lab, self.nodes, talk, found)
        await check_bits(server, talk, found)
        if server is taking and plan.mode != "copy" and KEPT in self._said:
            found.other.append(f"{talk.session_id} moved, and was said to have stayed")
        if server is taking and plan.mode != "copy":
            self._moves, self._durable = self._moves + 1, True
        self.home = server
        await check_disks(self.lab, self.nodes, found)

    async def _is_unpublished(self, giving: NodeProcess) -> bool:
        """Whether the session still belongs to the end that it was opened on, and only there."""
        record = await record_of(self.lab, self.talk.session_id)
        return isinstance(record, Ownership) and record.node == giving.name

    async def _open_again(self, giving: NodeProcess, found: Findings) -> None:
        """A session without a published cut is lost with its process: the stated loss bound.

        Its id must be free to be claimed anew, and its prompt to be given again.
        """
        async with giving.client() as client:
            try:
                session = await client.get(self.talk.session_id)
            except PeerAnswerError as error:
                if error.peer_reason != "session_not_found":
                    found.other.append(f"after a restart: {error}")
                    return
                session = await client.open(self.talk.session_id)
            if session.next_index < self.talk.twin.given:
                rest = self._prompt()[session.next_index :]
                await client.append(session, rest)

    async def _check_copy(self, plan, result, taking) -> None:
        """The copy is whole on the target, or its name is free; then it goes."""
        name, found = f"{self.talk.session_id}-copy", result.found
        end = time.monotonic() + 12.0
        while True:
            record = await record_of(self.lab, name)
            if not isinstance(record, Ownership):
                return
            copy = Conversation(name, self.talk.twin)
            try:
                await copy.take(taking, 3)
                if KEPT in self._said:
                    found.other.append(f"{name} came about, and was said to have failed")
                break
            except WrongBits as error:
                found.wrong_bits.append(str(error))
                break
            except KvpackError as error:
                # A claim without its state goes with the transfer's lease.
                if time.monotonic() > end:
                    found.leftovers.append(f"{name} stays claimed by {record.node}: {error}")
                    break
            await asyncio.sleep(0.2)
        await self._close(copy)

    async def _begin_anew(self) -> None:
        """After a finding: other processes and another session, so that it is not counted twice."""
        self.talk, self._durable = None, False
        for node in self.nodes:
            node.order("")
            await node.kill()
            await node.start()
